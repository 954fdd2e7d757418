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
_VERSION: Final = 7 << 76 | 0b10 << 62
_RANDOM: Final = 0xFFF << 64 | (1 << 62) - 1
"""Mask of the random bits."""


def new_uuid() -> UUID:
    """Return a new UUID."""
    random = int.from_bytes(os.urandom(10), "big") & _RANDOM
    return UUID(int=time.time_ns() // 1_000_000 << 80 | _VERSION | random)
