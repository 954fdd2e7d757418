"""The commands of `titanic` for operators, which open the database directly, without the broker."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import click
from sqlalchemy.engine import Connection

from ...clients import bodies
from ...mdp.cli.console import EXIT_CODES, Group, Number, printable
from ...mdp.errors import SettingError, UnknownTicket
from ...mdp.extras import install_command
from ...mdp.logs import counted
from .. import admin, schema
from ..frames import unpack
from ..store.models import NOT_ENDED, STATES
from .database import DB, Begin, opened_engine, opened_tables, progress
from .parameters import AGE, NEEDS_UNIT, TEXT, UUID_TYPE, shown_age

CHUNK: Final = 1000
"""Requests changed in one transaction; between two transactions a running Titanic gets its turn."""
MAX_SHOWN: Final = 1000
"""Characters of a value that `titanic show` prints without --full."""
_STDOUT: Final = Path("-")
MAX_BINARY: Final = 16
"""Bytes of a frame that is not text, which it prints then."""

_SERVICE = click.option("--service", type=TEXT, help="Only requests for this service.")
_OLDER = click.option(
    "--older-than",
    type=AGE,
    help=f"Only requests submitted longer ago than this. {NEEDS_UNIT}",
)
_CODE = click.option("--code", type=click.IntRange(0, 999), help="Only requests that failed with this code.")
_ERROR = click.option(
    "--error", type=TEXT, help="Only requests whose error contains this text, in upper or lower case."
)
_STATES = click.option(
    "--state", "states", type=click.Choice(STATES), multiple=True, help="Only requests in this state. Can be repeated."
)
_OWNER = click.option("--owner", type=TEXT, metavar="ROLE", help="Only requests that this role submitted.")
_UUIDS = click.argument("uuids", type=UUID_TYPE, nargs=-1, metavar="UUID…")
_ALL = click.option(
    "--all", "everything", is_flag=True, help="All such requests, or only those that the other options select."
)


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
@_STATES
@_SERVICE
@_OWNER
@_OLDER
@_CODE
@_ERROR
@click.option(
    "--limit",
    type=Number("requests", whole=True),
    default=50,
    help="Maximum number of requests to list, oldest first.",
)
@DB
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def ls(
    *,
    states: tuple[str, ...],
    service: str | None,
    owner: str | None,
    older_than: float | None,
    code: int | None,
    error: str | None,
    limit: int,
    db: str,
    as_json: bool,
) -> None:
    """List requests."""
    which = _which(states or STATES, service, older_than, owner=owner, code=code, error=error)
    with opened_tables(db) as begin, begin() as connection:
        rows = admin.ls(connection, which, limit + 1)
    now = time.time()
    for row in rows[:limit]:
        if as_json:
            bodies.print_json(_with_times(row))
    if not as_json and rows:
        width = max(len("SERVICE"), *(len(row["service"]) for row in rows[:limit]))
        owners = max(len("OWNER"), *(len(row["owner"]) for row in rows[:limit]))
        click.echo(
            f"{'UUID':32}  {'SERVICE':{width}}  {'OWNER':{owners}}  {'STATE':7}  "
            f"{'PRI':>3}  {'AGE':>6}  {'TRIES':>5}  NOTE"
        )
        for row in rows[:limit]:
            click.echo(
                f"{row['uuid']}  {row['service']:{width}}  {row['owner'] or '-':{owners}}  {row['state']:7}  "
                f"{row['priority']:3}  {shown_age(now - row['created']):>6}  {row['attempts']:5}  "
                f"{printable(_note(row, now))}".rstrip()
            )
    if len(rows) > limit:
        click.echo("there are more requests: use --limit to see them", err=True)
    elif not rows:
        click.echo("no such requests", err=True)


@click.command()
@_SERVICE
@_OWNER
@_CODE
@_ERROR
@click.option(
    "--limit",
    type=Number("reasons", whole=True),
    default=50,
    help="Maximum number of reasons to list, the most frequent first.",
)
@DB
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def failures(*, limit: int, db: str, as_json: bool, **selected: Any) -> None:
    """List why requests have failed, and how often: by service, code and error.

    `titanic retry --all --service SERVICE --error TEXT` retries those that failed for one of these reasons.
    """
    with opened_tables(db) as begin, begin() as connection:
        rows = admin.failures(connection, admin.Filter(**selected), limit)
    now = time.time()
    if as_json:
        for row in rows:
            bodies.print_json(_with_times(row))
    elif rows:
        width = max(len("SERVICE"), *(len(row["service"]) for row in rows))
        click.echo(f"{'SERVICE':{width}}  {'COUNT':>7}  {'LAST':>6}  ERROR")
        for row in rows:
            why = printable(f"{row['code']}: {row['error']}"[:MAX_SHOWN])
            click.echo(f"{row['service']:{width}}  {row['count']:7}  {shown_age(now - row['last']):>6}  {why}")
    else:
        click.echo("no failed requests", err=True)


@click.command()
@_STATES
@_SERVICE
@_OWNER
@_OLDER
@click.option(
    "--format",
    "as_parquet",
    type=click.Choice(["ndjson", "parquet"]),
    default="ndjson",
    callback=lambda context, option, value: value == "parquet",
    help="One JSON object per line, or Parquet, which needs zmdp[arrow].",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Where to write to; Parquet needs it. [default: stdout]",
)  # fmt: skip
@DB
def export(
    *,
    states: tuple[str, ...],
    as_parquet: bool,
    output: Path | None,
    older_than: float | None,
    db: str,
    **selected: Any,
) -> None:
    """Write requests with their bodies and replies to a file, oldest first.

    The file has what is in the database while it is read, in many short transactions. It appears once it is
    complete; until then it is called FILE.part.
    """
    which = _which(states or STATES, older_than=older_than, **selected)
    if output is not None:
        _check_is_no_database(output, db)
    if not as_parquet:
        with (
            opened_tables(db) as read,
            _completed(output or _STDOUT) as path,
            click.open_file(str(path), "w", encoding="utf-8") as file,
        ):
            for row in _exported(read, which):
                file.write(f"{json.dumps(row, ensure_ascii=False)}\n")
        return
    if output is None:
        raise click.UsageError("--format parquet needs --output FILE")
    try:
        from ..arrow.parquet import write_parquet  # noqa: PLC0415 - which needs pyarrow
    except ImportError as error:
        raise SettingError(f"Parquet needs pyarrow: {install_command('arrow')} ({error})") from None
    with opened_tables(db), _completed(output) as path:
        write_parquet(db, which, path)


def _check_is_no_database(output: Path, db: str) -> None:
    url = schema.database_url(db)
    if schema.is_sqlite(url) and output.exists() and output.samefile(str(url.database)):
        raise SettingError(f"{output} is the database that is to be exported")


@contextmanager
def _completed(output: Path) -> Iterator[Path]:
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


def _exported(read: Begin, which: admin.Filter) -> Iterator[dict[str, Any]]:
    """Yield these requests as `show --json` prints them, without PARTIALs; reading them blocks no writer."""
    last = 0
    while True:
        with read() as connection:
            chunk = admin.export(connection, which, last, CHUNK)
        if not chunk:
            return
        last = chunk[-1]["id"]
        for row in chunk:
            yield _readable(row)


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
@_SERVICE
@_OLDER
@_CODE
@_ERROR
@DB
def retry(**asked: Any) -> int:
    """Retry failed requests, as if they were new.

    `titanic failures` lists why requests have failed; --code and --error select those that failed for one reason.
    """
    return _change("retried", admin.retry, ("failed",), **asked)


@click.command()
@_UUIDS
@_ALL
@_SERVICE
@_OLDER
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
    service: str | None,
    older_than: float | None,
    db: str,
    **reason: Any,
) -> int:
    narrowed = any(each is not None for each in (service, older_than, *reason.values()))
    if bool(uuids) == everything or (narrowed and not everything):
        selecting = ", ".join(f"--{name}" for name in ("service", "older-than", *sorted(reason)))
        raise click.UsageError(f"expected UUIDs, or --all (optionally with {selecting})")
    changed: set[UUID] = set()
    with opened_tables(db) as read, opened_tables(db, write=True) as begin:
        which = _which(states, service, older_than, **reason)
        chunks: Iterable[Sequence[UUID]] = (uuids[at : at + CHUNK] for at in range(0, len(uuids), CHUNK))
        if everything:
            chunks = ([uuid for _, uuid in chunk] for chunk in _chunks(read, which))
        with progress(_count(read, which) if everything else len(uuids), what) as advance:
            for chunk in chunks:
                with begin() as connection:
                    changed |= set(change(connection, chunk, time.time()))
                advance(len(chunk))
    for uuid in uuids:
        if uuid not in changed and not everything:
            click.echo(f"{uuid.hex}: no such request in state {' or '.join(states)}", err=True)
    click.echo(f"{len(changed)} {what}")
    return 0 if everything or len(changed) == len(set(uuids)) else EXIT_CODES[UnknownTicket]


@click.command()
@click.option(
    "--state",
    "states",
    type=click.Choice(["done", "failed"]),
    multiple=True,
    default=["done"],
    help="State of the requests to delete. Can be repeated.",
)
@_SERVICE
@click.option(
    "--older-than",
    type=AGE,
    required=True,
    help=f"Only requests that ended longer ago than this; 0 deletes all that --state selects. {NEEDS_UNIT}",
)
@click.option("--dry-run", is_flag=True, help="Only print how many requests would be deleted.")
@DB
def purge(*, states: tuple[str, ...], service: str | None, older_than: float, dry_run: bool, db: str) -> None:
    """Delete requests that have ended.

    Their replies are deleted too, whether they were fetched or not.
    """
    which = admin.Filter(states, service, finished_before=time.time() - older_than if older_than else None)
    deleted = 0
    with opened_tables(db) as read:
        total = _count(read, which)
        if dry_run:
            click.echo(f"{total} would be deleted")
            return
        with opened_tables(db, write=True) as begin, progress(total, "deleted") as advance:
            for chunk in _chunks(read, which):
                with begin() as connection:
                    deleted += admin.purge(connection, which, [id_ for id_, _ in chunk])
                advance(len(chunk))
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
    width = max([len("SERVICE"), *(len(name) for name in found["services"])])
    click.echo(f"{'SERVICE':{width}}" + "".join(f"  {state.upper():>9}" for state in STATES) + f"  {'OLDEST':>7}")
    for name, counts in [*found["services"].items(), ("", found["total"])]:
        waited = counts.get("oldest_waiting_seconds")
        oldest = "" if waited is None else shown_age(waited)
        click.echo(f"{name:{width}}" + "".join(f"  {counts[state]:9}" for state in STATES) + f"  {oldest:>7}".rstrip())
    click.echo(f"{counted(found['partials'], 'PARTIAL')}, {counted(found['keys'], 'key')}")


def _count(read: Begin, which: admin.Filter) -> int:
    with read() as connection:
        return admin.count(connection, which)


def _chunks(read: Begin, which: admin.Filter) -> Iterator[list[tuple[int, UUID]]]:
    """Yield the ids and UUIDs of these requests; reading them blocks no writer."""
    last = 0
    while True:
        with read() as connection:
            chunk = admin.matching(connection, which, last, CHUNK)
        if not chunk:
            return
        last = chunk[-1][0]
        yield chunk


def _which(states: tuple[str, ...], service: str | None, older_than: float | None, **others: Any) -> admin.Filter:
    before = None if older_than is None else time.time() - older_than
    return admin.Filter(states, service, created_before=before, **others)


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


def _note(row: dict[str, Any], now: float) -> str:
    """Return the most important detail of a request, for the last column."""
    if row["state"] == "failed":
        return f"{row['code']}: {row['error']}"[:80]
    if row["state"] == "delayed":
        why = f" after: {row['error']}" if row["error"] else ""
        return f"due in {shown_age(row['due'] - now)}{why}"[:80]
    if row["state"] == "done":
        return f"took {row['finished'] - row['created']:.3g} s"
    return ""
