"""The disk alone: accepted messages are written to a file and synced with fdatasync; waiting messages share a write."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import processes

from .load import Caller, body
from .peer import Peer

SIZE = 100
ROOM = 1 << 23


@dataclass
class Disk(Peer):
    """No server and no data structure: the limit of durable accepts."""

    name: str = "write and fdatasync"
    synchronous: ClassVar[bool] = True

    @contextmanager
    def server(self, folder: Path) -> Iterator[processes.Server]:
        yield processes.Server(str(folder / "written"), [])

    @contextmanager
    def caller(self, address: str, outstanding: int) -> Iterator[Caller]:
        del outstanding
        with open(address, "wb", buffering=0) as file:
            # Synced beforehand, so that a sync writes what is written and nothing about the file.
            file.write(bytes(ROOM))
            os.fsync(file.fileno())
            yield _Writing(file.fileno())


class _Writing:
    def __init__(self, file: int) -> None:
        self._file = file
        self._keys: list[int] = []
        self._at = 0

    def send(self, key: int) -> None:
        self._keys.append(key)

    def receive(self) -> Iterator[tuple[int, float]]:
        keys, self._keys = self._keys, []
        self._at += os.pwrite(self._file, b"".join(body(key, SIZE) for key in keys), self._at)
        if self._at > ROOM - 64 * SIZE:
            self._at = 0
        os.fdatasync(self._file)
        now = time.perf_counter()
        return iter([(key, now) for key in keys])
