"""UUIDs of requests: version 7, which starts with the time.

A UUID is a secret, because at a broker without access control anyone who knows it can fetch or close the request: 74 of
its bits are random.  UUIDs that grow with time are neighbors in the database's index, so a transaction writes a few
index pages instead of one for each request.
"""

import os
import time
from typing import Final
from uuid import UUID

UNKNOWN_UUID: Final = "unknown-uuid"
"""The reason that Titanic gives if it has no such request, or another owner has it."""
RANDOM_BYTES: Final = 10
_POOL: Final[list[bytes]] = []
"""Random bytes for the next UUIDs, fetched from the system for many at a time."""
_VERSION: Final = 7 << 76 | 0b10 << 62
_RANDOM: Final = 0xFFF << 64 | (1 << 62) - 1
"""Mask of the random bits."""


def new_uuid() -> UUID:
    """Return a new UUID."""
    return UUID(int=_new())


def new_uuid_hex() -> str:
    """Return a new UUID as 32 hex digits."""
    return f"{_new():032x}"


def _new() -> int:
    while True:
        try:
            random = _POOL.pop()
        except IndexError:
            many = os.urandom(RANDOM_BYTES * 256)
            _POOL.extend(many[at : at + RANDOM_BYTES] for at in range(0, len(many), RANDOM_BYTES))
        else:
            milliseconds = time.time_ns() // 1_000_000
            return milliseconds << 80 | _VERSION | int.from_bytes(random, "big") & _RANDOM


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_POOL.clear)
