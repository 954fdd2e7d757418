"""The command `titanic serve`."""

import asyncio
import gc
import logging
import resource
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ....mdp.cli import notify
from ....mdp.cli.console import (
    Address,
    Number,
    SectionedCommand,
    brokers_option,
    heartbeat_options,
    key_options,
    log_level_option,
    log_to_stderr,
)
from ....mdp.cli.shutdown import Shutdown, in_loop
from ....mdp.errors import BindError
from ....mdp.security.access import load as load_access
from ....mdp.security.keys import ClientKeys
from ....mdp.transport.listening import is_loopback
from ....mdp.transport.reach import warn_if_unreachable
from ...db import schema
from ...server.counters import DEFAULT_MAX_WAITING
from ...server.outcome import Retention
from ...server.program import (
    DEFAULT_DRAIN_SECONDS,
    DEFAULT_LEASE_SECONDS,
    DEFAULT_MAX_DEATHS,
    MIN_LEASE_SECONDS,
    Server,
)
from .database import DB, database_errors
from .parameter_types import DURATION, DURATION_FROM_0, NEEDS_UNIT, ServiceExpiry

if TYPE_CHECKING:
    from ..pages.web_server import WebServer

SECTIONS: Final = {
    "Results and limits": ("lease", "max_waiting", "max_waiting_per_service", "max_deaths", "ttls", "failed_ttls"),
    "Keys and liveness": ("key_file", "broker_key", "heartbeat", "liveness"),
}
"""The headings of the help, and the options under each."""
COLLECT_AFTER: Final = 10_000
"""New objects after which Python collects garbage.  By default it does after 700, of which most belong to requests that
are under way: that takes a tenth of the time."""

log = logging.getLogger("zmdp.titanic")


@click.command(cls=SectionedCommand, sections=SECTIONS)
@brokers_option(
    "Broker to register at and to send requests through. Can be repeated, or separate endpoints with commas: Titanic "
    "then registers at each, and sends requests through the first that answers."
)
@key_options
@DB
@click.option(
    "--lease",
    type=DURATION,
    default=DEFAULT_LEASE_SECONDS,
    help=f"How long after a Titanic's crash others take over its requests; {MIN_LEASE_SECONDS:g} s or more.",
)
@click.option(
    "--max-waiting",
    type=Number("requests", whole=True),
    default=DEFAULT_MAX_WAITING,
    help="Maximum number of requests that have not ended; more are rejected.",
)
@click.option(
    "--max-waiting-per-service",
    type=Number("requests", whole=True),
    show_default="half of --max-waiting",
    help="Maximum number of these to one service.",
)
@click.option(
    "--max-deaths",
    type=Number("workers", whole=True),
    default=DEFAULT_MAX_DEATHS,
    help="Number of workers lost while they handled a request after which it fails instead of being retried.",
)
@click.option(
    "--ttl",
    "ttls",
    type=ServiceExpiry(),
    multiple=True,
    show_default="until they are closed",
    help=(
        "How long to keep results of requests without a ttl of their own: of all services, or with SERVICE= of one. "
        f"Can be repeated. {NEEDS_UNIT}"
    ),
)
@click.option(
    "--failed-ttl",
    "failed_ttls",
    type=ServiceExpiry(),
    multiple=True,
    show_default="as --ttl",
    help="The same for requests that have failed.",
)
@click.option(
    "--service-schedules/--no-service-schedules",
    default=None,
    help=(
        "Take up the schedules that services declare: @services.service(…, every=…). Any worker that may offer a "
        "service can then have requests submitted to it."
    ),
)
@click.option(
    "--drain-timeout",
    type=DURATION_FROM_0,
    default=DEFAULT_DRAIN_SECONDS,
    help="How long running requests may take to finish after SIGTERM or Ctrl-C.",
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
    ttls: Sequence[tuple[str, float]],
    failed_ttls: Sequence[tuple[str, float]],
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
    kept, kept_failed = dict(ttls), dict(failed_ttls)
    settings["ttl"] = Retention(kept.pop("", None), kept, kept_failed.pop("", None), kept_failed)
    with ExitStack() as stack:
        web = None
        if http is not None:
            web = stack.enter_context(_web_server(http, http_access, insecure=http_insecure))
        elif http_access is not None or http_insecure:
            raise click.UsageError("--http-access and --http-insecure need --http HOST:PORT")
        return asyncio.run(_serve(broker, keys, db, settings, web))


def _web_server(address: tuple[str, int], access: Path | None, *, insecure: bool) -> "WebServer":
    from ....mdp.cli.web import check_packages  # noqa: PLC0415 - which imports the broker

    check_packages("titanic serve --http")
    from ..pages.web_server import WebServer  # noqa: PLC0415 - which needs these packages

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
    with database_errors(db):
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
            "serving titanic.request, titanic.reply, titanic.close, titanic.schedule at %s; %s; Ctrl-C stops it",
            ", ".join(broker),
            schema.shown(schema.absolute(server.url)),
        )
        if web is not None:
            web.start(server.url, server.snapshot)
            click.echo(web.url)
            sys.stdout.flush()
        notify.ready(notify.event_loop())
        gc.freeze()  # what is there now stays
        gc.set_threshold(COLLECT_AFTER)

    with Shutdown(
        in_loop(server.stop),
        in_loop(abort),
        limit=settings["drain_timeout"],
        unfinished=server.unfinished,
        restart="restart it to read its settings and files again; accepted requests are kept",
        logger=log,
    ):
        await asyncio.to_thread(warn_if_unreachable, log, broker, keys)
        serving = asyncio.ensure_future(server.run(ready))
        with suppress(asyncio.CancelledError):
            await serving
    return int(forced or server.cut_off)
