"""The broker and what it shares with clients and workers.

Nothing is imported here.  `wire` turns frames into commands and back, `broker` is the broker, `transport` moves
messages, `testing` runs brokers in tests, and `cli` has the commands.
"""
