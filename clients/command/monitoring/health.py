"""The checks of `mdclient health`: a broker and its services, from answers to `mmi.*` (docs/how-to/operations.md)."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from ....mdp import wire
from .top import duration

Question = Callable[[str, bytes], bytes | None]
"""Asks the broker for a service `mmi.*` with this body, and returns the answer; None if it may not be known."""
MAX_PAGES: Final = 1000
"""Pages of `mmi.metrics` that are read at most: 100,000 services."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits that services must keep; None for no limit."""

    min_workers: int | None = None
    max_queue: int | None = None
    max_age: float | None = None

    @property
    def of_queues(self) -> bool:
        """Whether the queues must be known."""
        return self.max_queue is not None or self.max_age is not None


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.  The fields are those that `--json` prints."""

    check: str
    """`broker`, `workers`, `queue` or `age`."""
    service: str | None
    """The service; None if there is none."""
    ok: bool
    value: float | None
    """The result; None if it could not be found out."""
    limit: float | None
    text: str
    """The result as a text for people."""

    def line(self) -> str:
        """Return the check as a line of text."""
        return f"{'ok' if self.ok else 'FAILED':6}  {self.check:7}  {self.text}"


def checks(question: Question, services: Sequence[str], wanted: Thresholds) -> Iterator[Check]:
    """Check the broker, and then these services; without any, the queues of all services that it has."""
    yield _broker(question)
    if services:
        for service in services:
            yield from _service(question, service, wanted)
    elif wanted.of_queues:
        rows = _all_rows(question)
        if wanted.max_queue is not None:
            yield _worst("queue", rows, "queued", wanted.max_queue)
        if wanted.max_age is not None:
            yield _worst("age", rows, "oldest_seconds", wanted.max_age)


def as_dict(found: Iterable[Check], endpoint: str) -> dict[str, Any]:
    """Return the results as `--json` prints them."""
    rows = [asdict(each) for each in found]
    return {"ok": all(row["ok"] for row in rows), "broker": endpoint, "checks": rows}


def _broker(question: Question) -> Check:
    answer = _object(question("mmi.broker", b""))
    if answer is None:  # not zmdp's, or the client's role may not ask; but it has answered
        return Check("broker", None, ok=True, value=None, limit=None, text="answers")
    if answer["draining"]:
        return Check("broker", None, ok=False, value=None, limit=None, text="is draining: it takes no more requests")
    up = answer["up_seconds"]
    return Check("broker", None, ok=True, value=up, limit=None, text=f"up {duration(up)}, version {answer['version']}")


def _service(question: Question, service: str, wanted: Thresholds) -> Iterator[Check]:
    name = wire.service_name(service)
    listed = _object(question("mmi.services", name))
    if listed is None:
        yield _offered(service, question("mmi.service", name), wanted.min_workers)
        row = None
    else:
        row = listed["services"][0] if listed["services"] else {"workers": 0, "queued": 0, "hops": None}
        yield _workers(service, row, wanted.min_workers)
    if wanted.max_queue is not None:
        yield _at_most("queue", service, None if row is None else row["queued"], wanted.max_queue)
    if wanted.max_age is not None:
        yield _at_most("age", service, _oldest(question, service), wanted.max_age)


def _offered(service: str, answer: bytes | None, minimum: int | None) -> Check:
    """Check a service at a broker that tells no more than whether it has workers."""
    if answer == b"404":
        return Check("workers", service, ok=False, value=0, limit=minimum or 1, text=f"{service}: no worker offers it")
    if answer != b"200" or (minimum or 1) > 1:
        return _unknown("workers", service, minimum or 1)
    return Check("workers", service, ok=True, value=None, limit=minimum or 1, text=f"{service}: offered")


def _workers(service: str, row: Mapping[str, Any], minimum: int | None) -> Check:
    here = row["workers"]
    if minimum is None and not here and row.get("hops"):
        hops = f"{row['hops']} hop{'s' if row['hops'] > 1 else ''}"
        return Check("workers", service, ok=True, value=0, limit=1, text=f"{service}: at another broker, {hops}")
    text = f"{service}: {here} (at least {minimum or 1})"
    return Check("workers", service, ok=here >= (minimum or 1), value=here, limit=minimum or 1, text=text)


def _oldest(question: Question, service: str) -> float | None:
    """Return for how many seconds the oldest request of a service has waited; None if the broker does not tell."""
    # A page has the services after a name.  No UTF-8 text contains the byte FF: nothing is between this and the name.
    name = wire.service_name(service)
    before = name[:-1] + bytes([name[-1] - 1, 0xFF])
    page = _object(question("mmi.metrics", before))
    if page is None:
        return None
    oldest: float = next((row["oldest_seconds"] for row in page["services"] if row["name"] == service), 0.0)
    return oldest


def _all_rows(question: Question) -> list[dict[str, Any]] | None:
    """Return the services in `mmi.metrics`; None if the broker does not tell."""
    rows: list[dict[str, Any]] = []
    after = b""
    for _ in range(MAX_PAGES):
        page = _object(question("mmi.metrics", after))
        if page is None:
            return None
        rows += page["services"]
        if page["next"] is None:
            break
        after = bytes.fromhex(page["next"])
    return rows


def _worst(check: str, rows: Sequence[Mapping[str, Any]] | None, key: str, limit: float) -> Check:
    if rows is None:
        return _unknown(check, None, limit)
    if not rows:
        return Check(check, None, ok=True, value=0, limit=limit, text=f"no services (at most {limit:g})")
    worst = max(rows, key=lambda row: float(row[key]))
    return _at_most(check, worst["name"], worst[key], limit)


def _at_most(check: str, service: str, value: float | None, limit: float) -> Check:
    if value is None:
        return _unknown(check, service, limit)
    unit = " s" if check == "age" else ""
    text = f"{service}: {value:g}{unit} (at most {limit:g}{unit})"
    return Check(check, service, ok=value <= limit, value=value, limit=limit, text=text)


def _unknown(check: str, service: str | None, limit: float) -> Check:
    where = "" if service is None else f"{service}: "
    return Check(check, service, ok=False, value=None, limit=limit, text=f"{where}unknown: the broker does not tell")


def _object(answer: bytes | None) -> dict[str, Any] | None:
    """Return an answer that is a JSON object, or None."""
    with suppress(ValueError):
        value = json.loads(answer or b"")
        return value if isinstance(value, dict) else None
    return None
