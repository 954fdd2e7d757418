"""Requests to a batch, as every client sends them, and its large results."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Final

import msgspec

from ...clients import Client, Reply
from ...mdp.errors import ServiceError
from ...titanic import Ticket
from .sql_values import finite_scalar, is_plain, plain, sql_scalar, sql_type

FETCH_PREFIX: Final = "spark.fetch."
"""Prefix of the service through which a batch sends large results (`batch/fetching.py`)."""
STREAM_TIMEOUT_SECONDS: Final = 7 * 86400.0
"""How long a client waits for a PARTIAL or the result: a request may wait in the broker's queue for days."""


def sql_frames(query: str | bytes, args: Any, format_: str, types: Mapping[Any, str] | None = None) -> list[bytes]:
    """Return the body of a request to `spark.sql`.

    Args:
        query: The query.
        args: The values of its parameters, by name or in order, if it has any.
        format_: That of the result.
        types: The types of some of those with a name, which are JSON in a `Raw`; others have that of their value.

    Raises:
        SettingError: A value has no type in Spark.
    """
    settings: dict[str, Any] = {"format": format_}
    if args:
        sent: dict[Any, Any] = {}
        kinds: dict[Any, str | None] = {}
        for name, value in args.items() if isinstance(args, Mapping) else enumerate(args, 1):
            if isinstance(value, msgspec.Raw):
                sent[name], kinds[name] = value, (types or {})[name]
                continue
            where = f"parameter {name}"
            sent[name] = plain(value, sql_scalar, where)
            kinds[name] = None if is_plain(value) else sql_type(value, where)
        named = isinstance(args, Mapping)
        settings["args"] = sent if named else list(sent.values())
        if any(kinds.values()):
            settings["types"] = {name: kind for name, kind in kinds.items() if kind} if named else list(kinds.values())
    return [query.encode() if isinstance(query, str) else query, msgspec.json.encode(settings)]


def job_frames(name: str, arguments: Mapping[str, Any], format_: str) -> list[bytes]:
    """Return the body of a request to `spark.job`; arguments that are `bytes` of JSON in a `Raw` are sent as they are.

    Raises `SettingError` for a value that JSON cannot represent.
    """
    sent = {
        str(each): value if isinstance(value, msgspec.Raw) else plain(value, finite_scalar, f"argument {each}")
        for each, value in arguments.items()
    }
    return [name.encode(), msgspec.json.encode(sent), json.dumps({"format": format_}).encode()]


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
