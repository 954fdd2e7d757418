"""Brokers for tests: in a thread, without sockets, as pytest fixtures."""
