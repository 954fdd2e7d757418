"""What callers and handlers write down, independently of the product: one append-only file per process."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".ledger"


@dataclass(frozen=True, slots=True)
class Entry:
    """A line: what happened to a call, and when on the clock that all processes of a machine share."""

    at: float
    event: str
    call: str
    detail: str


class Ledger:
    """Writes entries.  Each is one `write`, so a killed process leaves no half of a line and loses none."""

    def __init__(self, folder: Path, name: str) -> None:
        path = folder / f"{name}-{os.getpid()}{SUFFIX}"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: str, call: str, detail: str = "") -> None:
        """Append an entry."""
        text = detail.replace("\t", " ").replace("\n", " ")
        os.write(self._file, f"{time.monotonic():.6f}\t{event}\t{call}\t{text}\n".encode())


class LedgerReader:
    """Reads all ledgers in a folder, each time from where it stopped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def new_entries(self) -> Iterator[Entry]:
        """Yield what was written since the last call, file by file."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offsets[path] = self._offsets.get(path, 0) + len(line)
                    at, event, call, detail = line.decode().rstrip("\n").split("\t", 3)
                    yield Entry(float(at), event, call, detail)
