"""The command `titanic` for operators.  All but `serve` open the database directly, without the broker."""

import asyncio
import json
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import click
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from ...clients import bodies
from ...mdp.access import load as load_access
from ...mdp.cli.console import (
    EXIT_CODES,
    Address,
    Group,
    Number,
    brokers_option,
    heartbeat_options,
    key_options,
    log_level_option,
    log_to_stderr,
    printable,
    with_default,
)
from ...mdp.cli.shutdown import Shutdown, in_loop
from ...mdp.errors import BindError, TitanicError, UnknownTicket
from ...mdp.keys import ClientKeys
from ...mdp.transport.reach import warn_if_unreachable
from ...mdp.transport.tcp import is_loopback
from .. import admin, schema
from ..frames import unpack
from ..server import (
    DEFAULT_DRAIN_SECONDS,
    DEFAULT_LEASE_SECONDS,
    DEFAULT_MAX_DEATHS,
    DEFAULT_MAX_WAITING,
    MIN_LEASE_SECONDS,
    Server,
)
from ..store.models import STATES
from .parameters import AGE, DURATION, DURATION_FROM_0, EXPIRY, NEEDS_UNIT, UUID_TYPE

if TYPE_CHECKING:
    from ..web.server import WebServer

CHUNK: Final = 1000
"""Requests changed in one transaction; between two transactions a running Titanic gets its turn."""
MAX_SHOWN: Final = 1000
"""Characters of a value that `titanic show` prints without --full."""

log = logging.getLogger("zmdp.titanic")

_DB = click.option(
    "--db",
    default=schema.DEFAULT_DB,
    envvar="TITANIC_DB",
    show_envvar=True,
    metavar="URL",
    help=with_default("Database: sqlite:///FILE (or just FILE), or postgresql://USER@HOST/NAME.", schema.DEFAULT_DB),
)
_SERVICE = click.option("--service", help="Only requests for this service.")
_OLDER = click.option(
    "--older-than",
    type=AGE,
    help=f"Only requests submitted longer ago than this. {NEEDS_UNIT}",
)
_UUIDS = click.argument("uuids", type=UUID_TYPE, nargs=-1, metavar="UUID…")
_ALL = click.option(
    "--all", "everything", is_flag=True, help="All such requests, or only those that --service and --older-than select."
)


# ── the program ──────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@brokers_option(
    "Broker to register at and to send requests through. Can be repeated, or separate endpoints with commas: Titanic "
    "then registers at each, and sends requests through the first that answers."
)
@key_options
@_DB
@click.option(
    "--lease",
    type=DURATION,
    default=DEFAULT_LEASE_SECONDS,
    help=with_default(
        f"How long after a Titanic's crash others take over its requests; {MIN_LEASE_SECONDS:g} s or more.",
        DEFAULT_LEASE_SECONDS,
        "seconds",
    ),
)
@click.option(
    "--max-waiting",
    type=Number("requests", whole=True),
    default=DEFAULT_MAX_WAITING,
    help=with_default("Maximum number of requests that have not ended; more are rejected.", DEFAULT_MAX_WAITING),
)
@click.option(
    "--max-deaths",
    type=Number("workers", whole=True),
    default=DEFAULT_MAX_DEATHS,
    help=with_default(
        "Number of workers lost while they handled a request after which it fails instead of being retried.",
        DEFAULT_MAX_DEATHS,
    ),
)
@click.option(
    "--ttl",
    type=EXPIRY,
    help=with_default(
        f"How long to keep results of requests without a ttl of their own. {NEEDS_UNIT}", "until they are closed"
    ),
)
@click.option(
    "--drain-timeout",
    type=DURATION_FROM_0,
    default=DEFAULT_DRAIN_SECONDS,
    help=with_default(
        "How long running requests may take to finish after SIGTERM or Ctrl-C.", DEFAULT_DRAIN_SECONDS, "seconds"
    ),
)
@click.option(
    "--http",
    type=Address(),
    help="Serve a dashboard, /metrics, /livez and /readyz at HOST:PORT (0 for a free port). Needs zmdp[web].",
)
@click.option(
    "--http-access",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Admit only holders of tokens to --http: the access file of the broker, or one like it (mdp-keys token).",
)
@click.option(
    "--http-insecure",
    is_flag=True,
    help="Serve --http on any address without --http-access: whoever can connect may read and change every request.",
)
@heartbeat_options()
@log_level_option
def serve(
    *,
    broker: Sequence[str],
    keys: ClientKeys | None,
    db: str,
    http: tuple[str, int] | None,
    http_access: Path | None,
    http_insecure: bool,
    log_level: str,
    **settings: Any,
) -> int:
    """Store requests in a database and execute them.

    A SQLite file is created and migrated automatically. Any number of Titanics can share one PostgreSQL database;
    `titanic db upgrade` creates and migrates its tables. A request that was answered with 200 is on disk.

    SIGTERM or Ctrl-C stops accepting requests, lets the running ones finish, and exits, at the latest after
    --drain-timeout; interrupt again to exit immediately. Neither loses a request: those that were interrupted are
    executed again.

    \b
    Exit codes:
      0  stopped, all running requests were finished
      1  stopped before that, by --drain-timeout or a second signal; or another failure
      2  invalid usage
      6  the database cannot be used
    """
    log_to_stderr(log_level)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ExitStack() as stack:
        web = None
        if http is not None:
            web = stack.enter_context(_web_server(http, http_access, insecure=http_insecure))
        elif http_access is not None or http_insecure:
            raise click.UsageError("--http-access and --http-insecure need --http HOST:PORT")
        return asyncio.run(_serve(broker, keys, db, settings, web))


def _web_server(address: tuple[str, int], access: Path | None, *, insecure: bool) -> "WebServer":
    from ...mdp.cli.web import check_packages  # noqa: PLC0415 - which imports the broker

    check_packages("titanic serve --http")
    from ..web.server import WebServer  # noqa: PLC0415 - which needs these packages

    host, port = address
    if access is None and not insecure and not is_loopback(host):
        raise BindError(
            f"refused to serve HTTP on {host}, where other machines may connect, without access control: use "
            "--http-access FILE to admit holders of tokens only, or --http-insecure to admit everybody"
        )
    return WebServer(host, port, access=None if access is None else load_access(access))


async def _serve(
    broker: Sequence[str], keys: ClientKeys | None, db: str, settings: dict[str, Any], web: "WebServer | None"
) -> int:
    with _database_errors(db):
        server = Server(db, broker=broker, key=keys, **settings)
    forced = False
    serving: asyncio.Task[None] | None = None

    def abort() -> None:
        nonlocal forced
        forced = True
        log.info("exiting immediately; interrupted requests will be executed again")
        server.abort()  # in case the drain has not begun
        if serving is not None:
            serving.cancel()

    def ready() -> None:
        log.info(
            "serving titanic.request, titanic.reply, titanic.close at %s; %s; Ctrl-C stops it",
            ", ".join(broker),
            schema.shown(schema.absolute(server.url)),
        )
        if web is not None:
            web.start(server.url, server.snapshot)
            click.echo(web.url)
            sys.stdout.flush()

    with Shutdown(
        in_loop(server.stop), in_loop(abort), limit=settings["drain_timeout"], unfinished=server.unfinished, logger=log
    ):
        await asyncio.to_thread(warn_if_unreachable, log, broker, keys)
        serving = asyncio.ensure_future(server.run(ready))
        with suppress(asyncio.CancelledError):
            await serving
    return int(forced or server.cut_off)


# ── the operator ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _database_errors(db: str) -> Iterator[None]:
    """Convert the database's errors to one-line errors."""
    try:
        yield
    except sa.exc.DBAPIError as error:
        url = schema.database_url(db)
        raise TitanicError(f"{schema.shown(url)}: {schema.explain(error, url)}", code=500) from None


@contextmanager
def _engine(db: str, **how: bool) -> Iterator[Engine]:
    """Yield an engine that `schema.open_engine` opens, and close its connections."""
    engine = schema.open_engine(schema.database_url(db), **how)
    try:
        with _database_errors(db):
            yield engine
    finally:
        engine.dispose()


@contextmanager
def _opened(db: str, *, write: bool = False) -> Iterator[Callable[[], Any]]:
    """Check the tables and yield a function that begins a transaction."""
    with _engine(db, write=write) as engine:
        with engine.begin() as connection:
            schema.check(connection, engine.url)
        yield engine.begin


@click.group(cls=Group)
def db() -> None:
    """Create or migrate Titanic's tables, or check their version."""


@db.command()
@_DB
def upgrade(*, db: str) -> None:
    """Create the tables, or migrate them to this release's version."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with _engine(db, create=True) as engine:
        before, now = schema.upgrade(engine)
    click.echo(
        f"{schema.shown(engine.url)}: "
        + (f"tables are at version {now}" if before == now else f"migrated: {before or 'no tables'} → {now}")
    )


@db.command()
@_DB
@bodies.JSON
def current(*, db: str, as_json: bool) -> None:
    """Print the version of the tables."""
    with _engine(db, write=False) as engine, engine.connect() as connection:
        version = schema.current(connection)
    if as_json:
        bodies.print_json({"version": version, "needed": schema.head()})
    else:
        click.echo(version or "no tables")


@db.command()
@_DB
def check(*, db: str) -> None:
    """Check that this zmdp works with the tables' version; exit with 6 if it does not."""
    with _opened(db):
        click.echo(f"{schema.shown(schema.database_url(db))}: tables are at version {schema.head()}, as required")


@click.command()
@click.option(
    "--state", "states", type=click.Choice(STATES), multiple=True, help="Only requests in this state. Can be repeated."
)
@_SERVICE
@click.option("--owner", metavar="ROLE", help="Only requests that this role submitted.")
@_OLDER
@click.option(
    "--limit",
    type=Number("requests", whole=True),
    default=50,
    help=with_default("Maximum number of requests to list, oldest first.", 50),
)
@_DB
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def ls(
    *,
    states: tuple[str, ...],
    service: str | None,
    owner: str | None,
    older_than: float | None,
    limit: int,
    db: str,
    as_json: bool,
) -> None:
    """List requests."""
    with _opened(db) as begin, begin() as connection:
        rows = admin.ls(connection, _which(states or STATES, service, older_than, owner), limit + 1)
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
                f"{row['priority']:3}  {_age(now - row['created']):>6}  {row['attempts']:5}  "
                f"{printable(_note(row, now))}".rstrip()
            )
    if len(rows) > limit:
        click.echo("there are more requests: use --limit to see them", err=True)
    elif not rows:
        click.echo("no such requests", err=True)


@click.command()
@click.argument("uuid", type=UUID_TYPE)
@click.option("--full", is_flag=True, help=f"Print whole values, not just {MAX_SHOWN} characters of each.")
@_DB
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with whole values.")
def show(*, uuid: UUID, full: bool, db: str, as_json: bool) -> None:
    """Show everything about the request UUID."""
    with _opened(db) as begin, begin() as connection:
        row = admin.show(connection, uuid)
    if row is None:
        raise UnknownTicket(f"no request {uuid.hex} in {schema.shown(schema.database_url(db))}")
    row = _with_times(row)
    for name in ("body", "reply"):
        row[name] = None if row[name] is None else [bodies.text_or_base64(frame) for frame in unpack(row[name])]
    row["partials"] = [[bodies.text_or_base64(frame) for frame in unpack(part)] for part in row["partials"]]
    if as_json:
        bodies.print_json(row)
        return
    for name, value in row.items():
        if value not in (None, [], ""):
            text = printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            click.echo(f"{name:11} {text if full else _shortened(text)}")


@click.command()
@_UUIDS
@_ALL
@_SERVICE
@_OLDER
@_DB
def retry(**asked: Any) -> int:
    """Retry failed requests."""
    return _change("retried", admin.retry, ("failed",), **asked)


@click.command()
@_UUIDS
@_ALL
@_SERVICE
@_OLDER
@_DB
def cancel(**asked: Any) -> int:
    """Cancel requests that have not ended.

    They fail with code 499. Those that are running are interrupted.
    """
    return _change("cancelled", admin.cancel, ("delayed", "pending", "running"), **asked)


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
) -> int:
    narrowed = service is not None or older_than is not None
    if bool(uuids) == everything or (narrowed and not everything):
        raise click.UsageError("expected UUIDs, or --all (optionally with --service, --older-than)")
    changed: set[UUID] = set()
    with _opened(db) as read, _opened(db, write=True) as begin:
        which = _which(states, service, older_than)
        chunks: Iterable[Sequence[UUID]] = (uuids[at : at + CHUNK] for at in range(0, len(uuids), CHUNK))
        if everything:
            chunks = ([uuid for _, uuid in chunk] for chunk in _chunks(read, which))
        with _progress(_count(read, which) if everything else len(uuids), what) as advance:
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
    help=with_default("State of the requests to delete. Can be repeated.", "done"),
)
@_SERVICE
@click.option(
    "--older-than",
    type=AGE,
    required=True,
    help=f"Only requests that ended longer ago than this; 0 deletes all that --state selects. {NEEDS_UNIT}",
)
@click.option("--dry-run", is_flag=True, help="Only print how many requests would be deleted.")
@_DB
def purge(*, states: tuple[str, ...], service: str | None, older_than: float, dry_run: bool, db: str) -> None:
    """Delete requests that have ended.

    Their replies are deleted too, whether they were fetched or not.
    """
    which = admin.Filter(states, service, finished_before=time.time() - older_than)
    deleted = 0
    with _opened(db) as read:
        total = _count(read, which)
        if dry_run:
            click.echo(f"{total} would be deleted")
            return
        with _opened(db, write=True) as begin, _progress(total, "deleted") as advance:
            for chunk in _chunks(read, which):
                with begin() as connection:
                    deleted += admin.purge(connection, which, [id_ for id_, _ in chunk])
                advance(len(chunk))
    click.echo(f"{deleted} deleted")


@click.command()
@_DB
@bodies.JSON
def stats(*, db: str, as_json: bool) -> None:
    """Count requests by service and state."""
    with _opened(db) as begin, begin() as connection:
        found = admin.stats(connection, time.time())
    if as_json:
        bodies.print_json(found)
        return
    width = max([len("SERVICE"), *(len(name) for name in found["services"])])
    click.echo(f"{'SERVICE':{width}}" + "".join(f"  {state.upper():>9}" for state in STATES) + f"  {'OLDEST':>7}")
    for name, counts in [*found["services"].items(), ("", found["total"])]:
        waited = counts.get("oldest_waiting_seconds")
        oldest = "" if waited is None else _age(waited)
        click.echo(f"{name:{width}}" + "".join(f"  {counts[state]:9}" for state in STATES) + f"  {oldest:>7}".rstrip())
    click.echo(f"{found['partials']} PARTIALs, {found['keys']} keys")


Begin = Callable[[], AbstractContextManager[Connection]]
"""Begin a transaction."""


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


def _which(
    states: tuple[str, ...], service: str | None, older_than: float | None, owner: str | None = None
) -> admin.Filter:
    before = None if older_than is None else time.time() - older_than
    return admin.Filter(states, service, created_before=before, owner=owner)


@contextmanager
def _progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, if that is a terminal and there is enough to do."""
    if total <= CHUNK or not sys.stderr.isatty():
        yield lambda steps: None
        return
    with click.progressbar(length=total, label=what, file=sys.stderr) as bar:
        yield bar.update


def _with_times(row: dict[str, Any]) -> dict[str, Any]:
    """Return `row` with its times in ISO 8601."""
    times = {"created", "due", "started", "finished", "expires"}
    return {
        name: datetime.fromtimestamp(value, UTC).isoformat(timespec="milliseconds")
        if name in times and value is not None
        else value
        for name, value in row.items()
    }


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}… ({len(text)} characters; --full prints all)"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def _note(row: dict[str, Any], now: float) -> str:
    """Return the most important detail of a request, for the last column."""
    if row["state"] == "failed":
        return f"{row['code']}: {row['error']}"[:80]
    if row["state"] == "delayed":
        why = f" after: {row['error']}" if row["error"] else ""
        return f"due in {_age(row['due'] - now)}{why}"[:80]
    if row["state"] == "done":
        return f"took {row['finished'] - row['created']:.3g} s"
    return ""
