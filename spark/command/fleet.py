"""The commands `mdp-spark fleet` and `doctor`."""

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, Final

import click

from ...clients.console import bodies
from ...clients.console.asking import BROKER
from ...mdp.cli import console
from ...mdp.cli.shutdown import Shutdown, drain_timeout_option
from ...mdp.program.control_services import name_or_default
from ...mdp.security.keys import ClientKeys, load_keys
from ...mdp.transport.endpoints import split_brokers
from ...titanic.operator.command.parameter_types import DURATION
from ...workers import AsyncWorker
from ..fleet.cluster import Cluster
from ..fleet.doctor import Doctor
from ..fleet.driver import Fleet
from ..fleet.settings import DEFAULT_IDLE_SECONDS, DEFAULT_LEASE_SECONDS, FleetSettings
from ..session import silence_py4j
from .parameters import CONF, MASTER, PY_FILES, SPARK_GRACE_SECONDS, name_option

DEFAULT_DRAIN_SECONDS: Final = 30.0
"""How long running requests may take to finish: as long as in `mdworker`, whose handlers are the same."""

log = logging.getLogger("zmdp.spark")


_cluster_options = console.options(
    BROKER,
    console.key_options,
    click.option(
        "--broker-from-executors", type=console.EndpointList(console.BrokerEndpoint()), multiple=True,
        callback=console.all_values, show_default="--broker",
        help="Broker address that executors use, if it differs. Can be repeated.",
    ),
    MASTER,
    CONF,
    PY_FILES,
    click.option(
        "--archive", metavar="FILE",
        help="Python environment for executors: a tar.gz made by venv-pack or conda-pack.",
    ),
    click.option(
        "--dynamic", is_flag=True,
        help="Let Spark start and stop executors of one core as needed (dynamic allocation).",
    ),
    click.option(
        "--reserve", type=console.Number("cores", whole=True, zero=True), default=1,
        help="Cores to leave free for other jobs of the application.",
    ),
)  # fmt: skip
"""The options for the cluster, and for the files to ship to its executors."""


def _min_option(text: str) -> console.Decorator:
    kind = console.Number("slots", whole=True, zero=True)
    return click.option("--min", "minimum", type=kind, default=1, help=text)


def _for_executors(broker: Sequence[str], keys: ClientKeys | None) -> tuple[Sequence[str], ClientKeys | None]:
    """Return the endpoints of the brokers as executors reach them, and `keys` with the keys that these carry."""
    brokers = split_brokers(broker) if broker else {}
    return tuple(brokers), load_keys(keys, None, brokers)


def _cluster(given: dict[str, Any]) -> Cluster:
    return Cluster(**{each.name: given.pop(each.name) for each in fields(Cluster)})


# ── fleet ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@click.argument("handler", metavar="MODULE:FUNCTION")
@click.option("--service", metavar="NAME", required=True, help="Service to offer.")
@_cluster_options
@name_option("fleet")
@_min_option("Minimum number of slots (cores that serve).")
@click.option(
    "--max", "maximum", type=console.Number("slots", whole=True),
    show_default="all cores but --reserve", help="Maximum number of slots.",
)  # fmt: skip
@click.option(
    "--concurrency",
    type=console.Number("requests", whole=True),
    help="Maximum number of concurrent requests of each slot.  "
    f"[default: 1 thread; {AsyncWorker.default_concurrency} for asyncio handlers]",
)
@click.option(
    "--lease", type=DURATION, default=DEFAULT_LEASE_SECONDS,
    help="How long a slot serves in one Spark job.",
)  # fmt: skip
@click.option(
    "--idle", type=DURATION, default=DEFAULT_IDLE_SECONDS,
    help="How long a slot must be unneeded before it is released.",
)  # fmt: skip
@click.option(
    "--codec",
    type=click.Choice(["json", "msgpack", "arrow"]),
    help="Encoding of requests and replies. Without it, handlers get and return frames of bytes.",
)
@console.handler_timeout_option
@drain_timeout_option(
    DEFAULT_DRAIN_SECONDS,
    "How long running requests may take to finish after SIGTERM or Ctrl-C; then other workers get them.",
)
@console.heartbeat_options()
@console.log_level_option
def fleet(
    *, handler: str, name: str | None, log_level: str, broker_from_executors: Sequence[str], keys: ClientKeys | None,
    drain_timeout: float, **given: Any,
) -> int:  # fmt: skip
    """Serve requests with MODULE:FUNCTION on the executors of a Spark cluster, as `mdworker` does on one machine.

    The number of slots follows the broker's queue, between --min and --max; a slot that dies is restarted.
    Executors need Python, pyzmq and msgspec, installed or in an --archive: `mdp-spark doctor` checks for them.  zmdp
    itself is always shipped.  With a local master, modules are also imported from the current directory.

    SIGTERM, Ctrl-C or `mdp-spark drain NAME` finishes running requests and exits, at the latest after --drain-timeout;
    a second signal exits immediately.

    \b
    Try it: mdp-spark fleet zmdp.workers.examples:repeat --service echo --master 'local[2]'

    \b
    Exit codes:
      0  stopped, all requests were finished
      1  stopped before that, by --drain-timeout or a second signal; or Spark cannot be reached
      2  invalid usage
    """
    console.log_to_stderr(log_level)
    silence_py4j()
    cluster = _cluster(given)
    executors_broker, keys = _for_executors(broker_from_executors, keys)
    settings = FleetSettings(
        handler, name=name_or_default(name, "fleet", os.getpid()), executors_broker=executors_broker, keys=keys,
        log_level=log_level.upper(), log_format=console.log_format(), **given,
    )  # fmt: skip
    running = Fleet(settings, cluster)

    def ready() -> None:
        log.info(
            "fleet %s serves %s at %s with %s; Ctrl-C stops it",
            settings.name, settings.service, " or ".join(settings.brokers), running.status()["master"],
        )  # fmt: skip

    with Shutdown(
        running.drain, limit=drain_timeout, unfinished=running.unfinished, announcement="finishing running requests",
        grace=SPARK_GRACE_SECONDS, logger=log,
    ) as shutdown:  # fmt: skip
        running.on_drain = shutdown.begin
        log.info("starting Spark on %s", cluster.master or "local[*]")
        running.run(ready)
    return 0


# ── doctor ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@click.command()
@_cluster_options
@_min_option("Number of slots that the cluster must have room for.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line per check.")
def doctor(
    *, broker: Sequence[str], broker_from_executors: Sequence[str], keys: ClientKeys | None, reserve: int,
    minimum: int, as_json: bool, **given: Any,
) -> int:  # fmt: skip
    """Check everything that Spark services need, and explain how to fix what is missing.

    Checks Java, Python and libraries; the broker; a session on --master; Python and libraries on its executors, and
    whether they reach the broker; cores for slots. Pass the same options as to `mdp-spark fleet`.

    Exit codes: 0 all checks passed; 1 a check failed; 2 invalid usage.
    """
    console.log_to_stderr("error")
    silence_py4j()
    well = True
    executors_broker, keys = _for_executors(broker_from_executors, keys)
    for check in Doctor(_cluster(given), broker, executors_broker, reserve, minimum, keys).checks():
        well = well and check.state == "ok"
        if as_json:
            bodies.print_json(asdict(check))
            continue
        click.echo(f"{check.state:<8} {check.name}: {console.printable(check.found)}")
        if check.advice:
            click.echo(f"         → {console.printable(check.advice)}")
    return 0 if well else console.EXIT_FAILED
