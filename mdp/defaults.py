"""Defaults that brokers, clients and workers share."""

from typing import Final

DEFAULT_ENDPOINT: Final = "tcp://127.0.0.1:5555"
"""Where a broker listens, and where clients and workers connect, by default."""
