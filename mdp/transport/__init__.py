"""Sockets, and sending and receiving whole multipart messages."""
