"""The broker and what it shares with clients and workers."""
