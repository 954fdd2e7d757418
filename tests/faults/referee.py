"""Decides from the ledger alone whether what was promised was kept."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .fault import Fault, HardPeriods
from .ledger import Entry, LedgerReader

BREAKABLE: Final = ("StreamInterrupted", "WorkerLost", "HTTPStatusError: Server error '502")
"""Errors that a call may end with, if a hard fault explains them: a stream that had begun is not repeated, and a
request that has lost three workers goes to no other one.  No other error may occur while one side is up."""
SHOWN: Final = 20


@dataclass(slots=True)
class Call:
    """What the ledger says of a call."""

    sent: float | None = None
    ended: float | None = None
    outcome: str = ""
    detail: str = ""
    retries: int = 0
    uuid: str = ""
    """The UUID under which Titanic has accepted it."""
    closed: bool = False
    executions: list[float] = field(default_factory=list)
    made: set[str] = field(default_factory=set)
    """The marks of its executions."""
    mark: str = ""
    """That of the execution whose reply was seen."""


@dataclass(frozen=True)
class Verdict:
    """The counts, and the invariants that are broken."""

    counts: dict[str, int]
    broken: list[str]


class Referee:
    """Reads the ledger as it grows, and judges it."""

    def __init__(self, folder: Path) -> None:
        self._reader = LedgerReader(folder)
        self.calls: dict[str, Call] = {}
        self._wrong: list[str] = []

    def read(self) -> list[tuple[str, float]]:
        """Read what is new; return kind and duration of the calls that were answered since."""
        return [took for entry in self._reader.new_entries() if (took := self._take(entry)) is not None]

    def _take(self, entry: Entry) -> tuple[str, float] | None:  # noqa: PLR0912 - one case for each event
        call = self.calls.setdefault(entry.call, Call())
        match entry.event:
            case "sent":
                call.sent = entry.at
            case "executed":
                call.executions.append(entry.at)
                call.made.add(entry.detail)
            case "retried":
                call.retries += 1
            case "accepted":
                if call.uuid not in {"", entry.detail}:
                    self._wrong.append(f"{entry.call}: its key stands for {call.uuid} and for {entry.detail}")
                call.uuid = entry.detail
            case "closed":
                call.closed = True
                if call.ended is None:
                    call.ended, call.outcome = entry.at, "closed unread"
            case "seen":
                self._note_mark(entry, call)
            case "wrong":
                self._wrong.append(f"{entry.call} got a wrong reply: {entry.detail:.200}")
                call.ended, call.outcome = entry.at, "wrong"
            case "right" | "failed" | "abandoned" as outcome:
                if call.ended is not None:
                    self._wrong.append(f"{entry.call} ended twice: {call.outcome}, then {outcome}")
                call.ended, call.outcome, call.detail = entry.at, outcome, entry.detail
                if outcome == "right":
                    self._note_mark(entry, call)
                if outcome == "right" and call.sent is not None:
                    return entry.call.split("-", 1)[0], entry.at - call.sent
        return None

    def _note_mark(self, entry: Entry, call: Call) -> None:
        """Note which execution a reply is of: a request has one reply, whoever fetches it, and however often."""
        if call.mark not in {"", entry.detail}:
            self._wrong.append(f"{entry.call}: its reply changed, from execution {call.mark} to {entry.detail}")
        call.mark = entry.detail

    def judge(self, faults: Sequence[Fault], *, complete_to: float = math.inf) -> Verdict:
        """Judge all calls; those must have ended.

        Of the others, ledgers were read up to `complete_to`: calls of which something was written since are left out.
        """
        hard = HardPeriods(faults)
        counts: Counter[str] = Counter(calls=len(self.calls))
        broken = [*self._wrong]
        counts["wrong"] = len(self._wrong)
        for name, call in self.calls.items():
            if max(call.ended or 0.0, *call.executions, 0.0) >= complete_to:
                continue
            for what, text in self._complaints(call, hard, counts):
                counts[what] += 1
                broken.append(f"{name} {text}")
        for each in ("lost", "failed", "twice", "never executed"):
            counts.setdefault(each, 0)
        return Verdict(dict(sorted(counts.items())), broken)

    @staticmethod
    def _complaints(call: Call, hard: HardPeriods, counts: Counter[str]) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with a call; count what is noteworthy."""
        if call.sent is None:
            yield "wrong", "was executed, but nobody has sent it"
            return
        if call.ended is None:
            yield "lost", "has no end" + (", although it was accepted" if call.uuid else "")
            return
        counts[f"ended {call.outcome}"] += 1
        counts["retried by the caller"] += call.retries > 0
        if call.outcome == "failed":
            if call.detail.startswith(BREAKABLE) and hard.overlaps(call.sent, call.ended):
                counts["failed as is allowed"] += 1
            else:
                yield ("lost" if call.uuid else "failed"), f"failed: {call.detail:.200}"
        if call.outcome == "right" and call.mark not in call.made:
            yield "never executed", "was answered, but never executed"
        if len(call.executions) > 1:
            if call.retries or hard.overlaps(call.sent, max(call.executions)):
                counts["executed again after a fault"] += 1
            else:
                yield "twice", f"was executed {len(call.executions)} times, and no fault explains it"
