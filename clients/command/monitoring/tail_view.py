"""What `mdclient tail` shows of requests that have ended (`mmi.tail`)."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from .top import milliseconds

DEFAULT_LIMIT: Final = 100
"""Requests in a second."""
MAX_INTERVAL_SECONDS: Final = 5.0
"""Half of the time after which a broker forgets a tail that is not asked for."""


def rows(answer: Mapping[str, Any], now: float) -> list[dict[str, Any]]:
    """Return the requests of an answer, ready for JSON, with the time in ISO 8601; `now` is in seconds since 1970."""
    return [_with_time(row, now) for row in answer["requests"]]


def _with_time(row: Mapping[str, Any], now: float) -> dict[str, Any]:
    rest = {name: value for name, value in row.items() if name != "ago_seconds"}
    ended = datetime.fromtimestamp(now - row["ago_seconds"], UTC)
    return {"ended": ended.isoformat(timespec="milliseconds"), **rest}


def line(row: Mapping[str, Any]) -> str:
    """Return a request as a line of text."""
    ended = datetime.fromisoformat(row["ended"]).astimezone()
    details = {
        "worker": row["worker"],
        "role": row["role"],
        "client": row["client"],
        "attempts": row["attempts"] if row["attempts"] > 1 else None,
        "request": row["request_id"] or row["id"],
    }
    return (
        f"{ended:%H:%M:%S}.{ended.microsecond // 1000:03}  {row['outcome']:>4}  {row['service']}  "
        f"queue {milliseconds(row['queue_seconds'])}  time {milliseconds(row['worker_seconds'])}  "
        + "  ".join(f"{name} {value}" for name, value in details.items() if value not in (None, ""))
    )
