"""Requests to a batch, as every client sends them, and its large results."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Final

import msgspec

from ...clients import Client, Reply
from ...mdp.errors import ServiceError, SettingError
from ...titanic import Ticket

FETCH_PREFIX: Final = "spark.fetch."
"""Prefix of the service through which a batch sends large results (`batch/fetching.py`)."""
STREAM_TIMEOUT_SECONDS: Final = 7 * 86400.0
"""How long a client waits for a PARTIAL or the result: a request may wait in the broker's queue for days."""


def sql_frames(query: str | bytes, args: Any, format_: str) -> list[bytes]:
    """Return the body of a request to `spark.sql`; `args` are the values of the query's parameters, if it has any.

    Raises `SettingError` for a number that JSON cannot represent.
    """
    settings = {"format": format_} | ({"args": args} if args else {})
    return [query.encode() if isinstance(query, str) else query, _encoded(settings)]


def job_frames(name: str, arguments: Mapping[str, Any], format_: str) -> list[bytes]:
    """Return the body of a request to `spark.job`.  Raises `SettingError` for a number that JSON cannot represent."""
    return [name.encode(), _encoded(arguments), _encoded({"format": format_})]


def _encoded(value: Any) -> bytes:
    """Return values as JSON.  Raises `SettingError` for NaN and infinities, of which msgspec would make null."""
    plain = msgspec.to_builtins(value, str_keys=True)
    try:
        return json.dumps(plain, allow_nan=False).encode()
    except ValueError:
        raise SettingError("JSON has no NaN and no infinity; send them as strings, or None for NULL") from None


def parse_result(reply: Reply) -> tuple[dict[str, Any], bytes]:
    """Return description and data of a result.  Raises `ServiceError` 500 if it is none."""
    with suppress(ValueError, LookupError):
        described, data = json.loads(reply[-2]), reply[-1]
        if isinstance(described, dict) and isinstance(described.get("format"), str):
            return described, data
    raise ServiceError(500, f"not a result of a batch: {reply[0][:100]!r}", service=reply.service)


def difference(ticket: Ticket[Reply, Reply], frames: Sequence[bytes]) -> str:
    """Return how these frames differ from those of the ticket's request, or an empty string if they are the same."""
    first = ticket.request()
    if first == list(frames):
        return ""
    before, now = _described(first), _described(frames)
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return "; ".join(f"{name} is {now.get(name)!r:.100}, and was {before.get(name)!r:.100}" for name in names)


def _described(frames: Sequence[bytes]) -> dict[str, Any]:
    """Return the parts of a request by name: a query or a job's name, its arguments and settings."""
    found: dict[str, Any] = {"the query or job": frames[0].decode(errors="replace")}
    for frame in frames[1:]:
        with suppress(ValueError, TypeError):  # not from a client of zmdp's
            found |= json.loads(frame)
    return found


def copy_rows(client: Client, driver: str, job: str, format_: str, file: IO[bytes]) -> int:
    """Fetch a large result from the batch `driver`, part by part, into `file`.  Return the number of rows."""
    rows: int = 0
    position: str | None = None
    while True:
        settings = json.dumps({"format": format_, "position": position}).encode()
        for part in client.stream(FETCH_PREFIX + driver, job.encode(), settings, wait=False):
            if not part.final:
                file.write(part[0])
        answer = json.loads(part[0])
        rows, position = rows + answer["rows"], answer["next"]
        if position is None:
            return rows
