"""The commands of `titanic` for operators, which open the database directly, without the broker."""

import json
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import wraps
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import UUID

import click
from sqlalchemy.engine import Connection

from ....clients.console import bodies
from ....mdp.cli.console import EXIT_CODES, Decorator, Group, Number, options, printable
from ....mdp.errors import SettingError, UnknownTicket
from ....mdp.program.logs import counted
from ...api.submission import unpack
from ...db import schema
from ...db.store.models import ENDED, NOT_ENDED, STATES
from .. import admin
from .database import DB, Begin, opened_engine, opened_tables
from .parameter_types import AGE, JSON_LINES, NEEDS_UNIT, TEXT, UUID_TYPE, print_rows, shown_age

CHUNK: Final = 1000
"""Requests changed in one transaction; between two transactions a running Titanic gets its turn."""
MAX_SHOWN: Final = 1000
"""Characters of a value that `titanic show` prints without --full."""
Row = TypeVar("Row")
_STDOUT: Final = Path("-")
MAX_BINARY: Final = 16
"""Bytes of a frame that is not text, which it prints then."""

_SELECTIONS: Final = {
    "states": click.option(
        "--state", "states", type=click.Choice(STATES), multiple=True,
        help="Only requests in this state. Can be repeated.",
    ),
    "service": click.option("--service", type=TEXT, help="Only requests for this service."),
    "owner": click.option("--owner", type=TEXT, metavar="ROLE", help="Only requests that this role submitted."),
    "older_than": click.option(
        "--older-than", type=AGE, help=f"Only requests submitted longer ago than this. {NEEDS_UNIT}"
    ),
    "code": click.option("--code", type=click.IntRange(0, 999), help="Only requests that failed with this code."),
    "error": click.option(
        "--error", type=TEXT, help="Only requests whose error contains this text, in upper or lower case."
    ),
}  # fmt: skip
"""The options that select requests, by the parameters of `_selected`."""
_UUIDS = click.argument("uuids", type=UUID_TYPE, nargs=-1, metavar="UUID…")
_ALL = click.option(
    "--all", "everything", is_flag=True, help="All such requests, or only those that the other options select."
)


def selecting(*names: str) -> Decorator:
    """Return the decorator that adds options which select requests, and calls the command with `which`, the filter."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(**given: Any) -> Any:
            return command(which=_selected(**{name: given.pop(name) for name in names}), **given)

        return options(*(_SELECTIONS[name] for name in names))(run)

    return decorate


def _selected(states: tuple[str, ...] = (), older_than: float | None = None, **others: Any) -> admin.Filter:
    before = None if older_than is None else time.time() - older_than
    return admin.Filter(states or STATES, created_before=before, **others)


@click.group(cls=Group)
def db() -> None:
    """Create or migrate Titanic's tables, or check their version."""


@db.command()
@DB
def upgrade(*, db: str) -> None:
    """Create the tables, or migrate them to this release's version."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with opened_engine(db, create=True) as engine:
        before, now = schema.upgrade(engine)
    click.echo(
        f"{schema.shown(engine.url)}: "
        + (f"tables are at version {now}" if before == now else f"migrated: {before or 'no tables'} → {now}")
    )


@db.command()
@DB
@bodies.JSON
def current(*, db: str, as_json: bool) -> None:
    """Print the version of the tables."""
    with opened_engine(db, write=False) as engine, engine.connect() as connection:
        version = schema.current(connection)
    if as_json:
        bodies.print_json({"version": version, "needed": schema.head()})
    else:
        click.echo(version or "no tables")


@db.command()
@DB
def check(*, db: str) -> None:
    """Check that this zmdp works with the tables' version; exit with 6 if it does not."""
    with opened_tables(db):
        click.echo(f"{schema.shown(schema.database_url(db))}: tables are at version {schema.head()}, as required")


@click.command()
@selecting("states", "service", "owner", "older_than", "code", "error")
@click.option(
    "--limit", type=Number("requests", whole=True), default=50, help="Maximum number of requests to list, oldest first."
)
@DB
@JSON_LINES
def ls(*, which: admin.Filter, limit: int, db: str, as_json: bool) -> None:
    """List requests."""
    with opened_tables(db) as begin, begin() as connection:
        rows = admin.ls(connection, which, limit + 1)
    now = time.time()
    print_rows(
        [_with_times(row) if as_json else row for row in rows[:limit]],
        {
            "UUID": lambda row: row["uuid"], "SERVICE": lambda row: row["service"],
            "OWNER": lambda row: row["owner"] or "-", "STATE": lambda row: row["state"],
            "PRI": lambda row: row["priority"], "AGE": lambda row: shown_age(now - row["created"]),
            "TRIES": lambda row: row["attempts"], "NOTE": lambda row: printable(admin.note(row, now, _span)[:80]),
        },
        as_json=as_json, none="no such requests", right=("PRI", "AGE", "TRIES"),
    )  # fmt: skip
    if len(rows) > limit:
        click.echo("there are more requests: use --limit to see them", err=True)


@click.command()
@selecting("service", "owner", "code", "error")
@click.option(
    "--limit", type=Number("reasons", whole=True), default=50,
    help="Maximum number of reasons to list, the most frequent first.",
)  # fmt: skip
@DB
@JSON_LINES
def failures(*, which: admin.Filter, limit: int, db: str, as_json: bool) -> None:
    """List why requests have failed, and how often: by service, code and error.

    `titanic retry --all --service SERVICE --error TEXT` retries those that failed for one of these reasons.
    """
    with opened_tables(db) as begin, begin() as connection:
        rows = admin.failures(connection, which, limit)
    now = time.time()
    print_rows(
        [_with_times(row) if as_json else row for row in rows],
        {
            "SERVICE": lambda row: row["service"], "COUNT": lambda row: row["count"],
            "LAST": lambda row: shown_age(now - row["last"]),
            "ERROR": lambda row: printable(f"{row['code']}: {row['error']}"[:MAX_SHOWN]),
        },
        as_json=as_json, none="no failed requests", right=("COUNT", "LAST"),
    )  # fmt: skip


@click.command()
@selecting("states", "service", "owner", "older_than")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", default=_STDOUT,
    show_default="stdout", help="Where to write to.",
)  # fmt: skip
@DB
def export(*, which: admin.Filter, output: Path, db: str) -> None:
    """Write requests with their bodies and replies as JSON, one object per line, oldest first.

    The file has what is in the database while it is read, in many short transactions. It appears once it is
    complete; until then it is called FILE.part.
    """
    _check_is_no_database(output, db)
    with (
        opened_tables(db) as read,
        _completed(output) as path,
        click.open_file(str(path), "w", encoding="utf-8") as file,
    ):
        for chunk in _chunks(read, admin.export, which, lambda row: row["id"]):
            for row in chunk:
                file.write(f"{json.dumps(_readable(row), ensure_ascii=False)}\n")


def _check_is_no_database(output: Path, db: str) -> None:
    url = schema.database_url(db)
    if schema.is_sqlite(url) and output.exists() and output.samefile(str(url.database)):
        raise SettingError(f"{output} is the database that is to be exported")


@contextmanager
def _completed(output: Path) -> Generator[Path]:
    """Yield where to write a file, which takes the place of `output` when it is complete, and is deleted otherwise."""
    if output == _STDOUT or (output.exists() and not output.is_file()):  # such as /dev/stdout
        yield output
        return
    part = output.with_name(f"{output.name}.part")
    try:
        yield part
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    part.replace(output)


def _readable(row: dict[str, Any], shown: Callable[[bytes], Any] = bodies.text_or_base64) -> dict[str, Any]:
    """Return everything about a request, with each frame as `shown` returns it; by default ready for JSON."""
    found = _with_times(row)
    found.pop("id", None)
    for name in ("body", "reply"):
        found[name] = None if found[name] is None else [*map(shown, unpack(found[name]))]
    if "partials" in found:
        found["partials"] = [[*map(shown, unpack(part))] for part in found["partials"]]
    return found


def _text_or_size(frame: bytes) -> str:
    """Return a frame as people read it: its text, or how large it is and how it begins."""
    try:
        return json.dumps(frame.decode(), ensure_ascii=False)
    except UnicodeDecodeError:
        return f"{len(frame)} bytes, {frame[:MAX_BINARY].hex(' ')}{' …' if len(frame) > MAX_BINARY else ''}"


@click.command()
@click.argument("uuid", type=UUID_TYPE)
@click.option(
    "--full",
    is_flag=True,
    help=f"Print whole values, not just {MAX_SHOWN} characters of each, and what is not text as Base64.",
)
@DB
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with whole values.")
def show(*, uuid: UUID, full: bool, db: str, as_json: bool) -> None:
    """Show everything about the request UUID."""
    with opened_tables(db) as begin, begin() as connection:
        row = admin.show(connection, uuid)
    if row is None:
        raise UnknownTicket(f"no request {uuid.hex} in {schema.shown(schema.database_url(db))}")
    if as_json:
        bodies.print_json(_readable(row))
        return
    for name, value in _readable(row, bodies.text_or_base64 if full else _text_or_size).items():
        if value not in (None, [], ""):
            text = printable(_text_of(value))
            click.echo(f"{name:11} {text if full else _shortened(text)}")


def _text_of(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(f"[{_text_of(each)}]" if isinstance(each, list) else _text_of(each) for each in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@click.command()
@_UUIDS
@_ALL
@selecting("service", "older_than", "code", "error")
@DB
def retry(**asked: Any) -> int:
    """Retry failed requests, as if they were new.

    `titanic failures` lists why requests have failed; --code and --error select those that failed for one reason.
    """
    return _change("retried", admin.retry, ("failed",), **asked)


@click.command()
@_UUIDS
@_ALL
@selecting("service", "older_than")
@DB
def cancel(**asked: Any) -> int:
    """Cancel requests that have not ended.

    They fail with code 499. Those that are running are interrupted.
    """
    return _change("cancelled", admin.cancel, NOT_ENDED, **asked)


def _change(
    what: str,
    change: Callable[[Connection, Sequence[UUID], float], list[UUID]],
    states: tuple[str, ...],
    *,
    uuids: Sequence[UUID],
    everything: bool,
    which: admin.Filter,
    db: str,
) -> int:
    if bool(uuids) == everything or (which != admin.Filter() and not everything):
        raise click.UsageError("expected UUIDs, or --all (optionally with options that select some)")
    changed: set[UUID] = set()
    with opened_tables(db) as read, opened_tables(db, write=True) as begin:
        chunks: Iterable[Sequence[UUID]] = (uuids[at : at + CHUNK] for at in range(0, len(uuids), CHUNK))
        if everything:
            found = _chunks(read, admin.matching, replace(which, states=states), lambda pair: pair[0])
            chunks = ([uuid for _, uuid in chunk] for chunk in found)
        for chunk in chunks:
            with begin() as connection:
                changed |= set(change(connection, chunk, time.time()))
    for uuid in uuids:
        if uuid not in changed:
            click.echo(f"{uuid.hex}: no such request in state {' or '.join(states)}", err=True)
    click.echo(f"{len(changed)} {what}")
    return 0 if everything or len(changed) == len(set(uuids)) else EXIT_CODES[UnknownTicket]


@click.command()
@click.option(
    "--state", "states", type=click.Choice(ENDED), multiple=True, default=["done"],
    help="State of the requests to delete. Can be repeated.",
)  # fmt: skip
@selecting("service")
@click.option(
    "--older-than", type=AGE, required=True,
    help=f"Only requests that ended longer ago than this; 0 deletes all that --state selects. {NEEDS_UNIT}",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only print how many requests would be deleted.")
@DB
def purge(*, which: admin.Filter, states: tuple[str, ...], older_than: float, dry_run: bool, db: str) -> None:
    """Delete requests that have ended.

    Their replies are deleted too, whether they were fetched or not.
    """
    which = replace(which, states=states, finished_before=time.time() - older_than if older_than else None)
    deleted = 0
    with opened_tables(db) as read:
        if dry_run:
            with read() as connection:
                click.echo(f"{admin.count(connection, which)} would be deleted")
            return
        with opened_tables(db, write=True) as begin:
            for chunk in _chunks(read, admin.matching, which, lambda pair: pair[0]):
                with begin() as connection:
                    deleted += admin.purge(connection, which, [id_ for id_, _ in chunk])
    click.echo(f"{deleted} deleted")


@click.command()
@DB
@bodies.JSON
def stats(*, db: str, as_json: bool) -> None:
    """Count requests by service and state."""
    with opened_tables(db) as begin, begin() as connection:
        found = admin.stats(connection, time.time())
    if as_json:
        bodies.print_json(found)
        return
    print_rows(
        [{"name": name, **counts} for name, counts in [*found["services"].items(), ("", found["total"])]],
        {
            "SERVICE": lambda row: row["name"],
            **{state.upper(): itemgetter(state) for state in STATES},
            "OLDEST": lambda row: "" if (age := row.get("oldest_waiting_seconds")) is None else shown_age(age),
        },
        right=(*map(str.upper, STATES), "OLDEST"),
    )
    click.echo(f"{counted(found['partials'], 'PARTIAL')}, {counted(found['keys'], 'key')}")


def _chunks(
    read: Begin,
    query: Callable[[Connection, admin.Filter, int, int], list[Row]],
    which: admin.Filter,
    id_of: Callable[[Row], int],
) -> Iterator[list[Row]]:
    """Yield what a query finds for these requests, `CHUNK` at a time; reading them blocks no writer."""
    last = 0
    while True:
        with read() as connection:
            chunk = query(connection, which, last, CHUNK)
        if not chunk:
            return
        last = id_of(chunk[-1])
        yield chunk


def _with_times(row: dict[str, Any]) -> dict[str, Any]:
    """Return `row` with its times in ISO 8601."""
    times = {"created", "due", "started", "finished", "expires", "first", "last"}
    return {
        name: datetime.fromtimestamp(value, UTC).isoformat(timespec="milliseconds")
        if name in times and value is not None
        else value
        for name, value in row.items()
    }


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}… ({len(text)} characters; --full prints all)"


def _span(seconds: float) -> str:
    return f"{seconds:.3g}s" if seconds < 10 else shown_age(seconds)
