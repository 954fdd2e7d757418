"""The command `mdworker`."""

import asyncio
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn

import click
from click.core import ParameterSource

from ...mdp import wire
from ...mdp.access import load as load_access
from ...mdp.cli import notify
from ...mdp.cli.console import (
    CONTEXT_SETTINGS,
    Endpoint,
    Number,
    brokers_option,
    environment_variable,
    handler_timeout_option,
    heartbeat_options,
    key_options,
    log_level_option,
    log_to_stderr,
    run,
    version_option,
    with_default,
)
from ...mdp.cli.shutdown import Shutdown, drain_timeout_option
from ...mdp.cli.systemd import systemd_option
from ...mdp.errors import SettingError
from ...mdp.keys import ClientKeys
from ...mdp.loading import load
from ...mdp.logs import counted, fields_of
from ..aio import DEFAULT_CONCURRENCY, AsyncWorker
from ..freelance import DEFAULT_SERVICE, AsyncFreelanceWorker, FreelanceWorker, freelance_worker
from ..handling import is_async
from ..load import fetch_load, fetch_pids
from ..mdworker import Worker
from ..processes import END_SECONDS, Supervisor, command
from ..scaling import Load, Slots
from ..services import Services, ServicesWorker

PARENT_CHECK_SECONDS: Final = 1.0
"""Interval at which a supervised process checks that its supervisor still exists."""

DEFAULT_IDLE_SECONDS: Final = 60.0
DEFAULT_DRAIN_SECONDS: Final = 30.0
MAX_SHOWN: Final = 10
"""Maximum number of unfinished requests that the log names."""

AnyWorker = Worker | AsyncWorker
Offering = AnyWorker | ServicesWorker

log = logging.getLogger("zmdp.worker")


class _Processes(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """How many processes there are, at least and at most."""

    name = "N|MIN-MAX"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return N|MIN-MAX."""
        del param, ctx
        return self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Return MIN and MAX."""
        found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", value, re.ASCII)
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if most < 1 or least > most:
            self.fail(f"expected a number of processes, or a range such as 1-8, got {value!r}", param, ctx)
        return least, most


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("target", metavar="MODULE:NAME")
@brokers_option(
    "Broker to serve. Can be repeated, or separate endpoints with commas: if one is lost or drains, the next is served "
    "until the first is back.",
    default=False,
)
@key_options
@click.option("--service", metavar="NAME", help="Service to offer; required if MODULE:NAME is a function.")
@click.option("--only", multiple=True, metavar="NAME", help="Offer only this service of a Services. Can be repeated.")
@click.option(
    "--codec",
    type=click.Choice(["json", "msgpack", "arrow"]),
    help="Codec of a function's argument and result. Without it, both are lists of bytes.",
)
@click.option(
    "--concurrency",
    type=Number("requests", whole=True),
    help="Maximum number of concurrent requests of each process.  "
    f"[default: 1 thread; {DEFAULT_CONCURRENCY} for asyncio handlers]",
)
@click.option(
    "--processes",
    type=_Processes(),
    default="1",
    help=with_default(
        "Number of worker processes, which are restarted if they die; MIN-MAX, such as 1-8, scales with the load.", 1
    ),
)
@click.option(
    "--idle",
    type=Number("seconds"),
    default=DEFAULT_IDLE_SECONDS,
    help=with_default(
        "With --processes MIN-MAX: how long a process must not have been needed before it is stopped.",
        f"{DEFAULT_IDLE_SECONDS:g}",
    ),
)
@heartbeat_options(default=False)
@handler_timeout_option
@drain_timeout_option(
    DEFAULT_DRAIN_SECONDS,
    "How long running requests may take to finish after SIGTERM or Ctrl-C; then other workers get them.",
)
@click.option(
    "--protocol",
    type=click.Choice(["X1", "0.2", "0.1"]),
    envvar="MDP_PROTOCOL",
    show_envvar=True,
    help=with_default("Protocol to speak: 0.2 or 0.1 for third-party brokers.", "X1"),
)
@click.option(
    "--freelance",
    type=Endpoint(),
    help="Serve without a broker: clients connect to this endpoint (mdclient call --freelance). It is the public name "
    "of this server, such as tcp://server1:5555.",
)
@click.option(
    "--bind",
    type=Endpoint(),
    help="With --freelance: where to listen, if not at that endpoint, such as tcp://*:5555.",
)
@click.option(
    "--access",
    metavar="FILE",
    help="With --freelance: admit only the keys in this access file (see mdp-keys), whose secret_key is the server's.",
)
@click.option(
    "--insecure", is_flag=True, help="With --freelance: listen without --access where other machines can connect."
)
@log_level_option
@click.option("--supervised-by", type=int, hidden=True)
@systemd_option("mdworker")
@version_option()
def cli(
    *,
    target: str,
    broker: tuple[str, ...],
    keys: ClientKeys | None,
    service: str | None,
    only: tuple[str, ...],
    codec: str | None,
    concurrency: int | None,
    processes: tuple[int, int],
    idle: float,
    heartbeat: float | None,
    liveness: int | None,
    handler_timeout: float | None,
    drain_timeout: float,
    protocol: str | None,
    freelance: str | None,
    bind: str | None,
    access: str | None,
    insecure: bool,
    log_level: str,
    supervised_by: int | None,
) -> int:
    """Serve requests with MODULE:NAME: a `zmdp.Services`, a `zmdp.Worker` or `AsyncWorker`, or a function of a request.

    The module is looked up in the current directory, then among the installed packages.  Options override the settings
    in the module.

    SIGTERM or Ctrl-C finishes the requests in progress and exits, at the latest after --drain-timeout, whatever the
    handlers do; a second signal exits immediately.  Other workers get the requests that were not finished.

    \b
    Try it: mdworker zmdp.workers.echo:worker

    \b
    Exit codes:
      0  stopped, all requests were finished
      1  stopped before that, by --drain-timeout or a second signal; or --freelance cannot listen
      2  invalid usage, or MODULE:NAME cannot be used
    """
    log_to_stderr(log_level)
    _check_freelance(freelance)
    _export_connection()
    found = load(target, "MODULE:NAME, for example zmdp.workers.echo:worker")
    options: dict[str, Any] = {
        "endpoints": broker or None, "keys": keys, "concurrency": concurrency,
        "heartbeat": heartbeat, "liveness": liveness, "handler_timeout": handler_timeout, "protocol": protocol,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(found, Services):
        services = _services_worker(found, target, only, given)
        if processes == (1, 1) or supervised_by is not None:
            return _serve(services, drain_timeout, supervised_by)
        return _supervise(None, processes, idle, drain_timeout)
    if only:
        raise click.UsageError(f"--only requires a zmdp.Services, but {target} is not one")
    worker = _as_worker(found, target, service, codec, None if freelance is None else DEFAULT_SERVICE)
    worker.settings = replace(worker.settings, **{"name": worker.settings.name or target, **given})
    if freelance is not None:
        rules = None if access is None else load_access(access)
        worker = freelance_worker(worker, freelance, bind=bind, access=rules, insecure=insecure)
    if processes != (1, 1) and supervised_by is None:
        return _supervise(worker, processes, idle, drain_timeout)
    return _serve(worker, drain_timeout, supervised_by)


def _export_connection() -> None:
    """Put --broker and the keys of the command line in the environment, where the module's workers and clients look."""
    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        given = context.params.get(name)
        if name in {"broker", "key_file", "broker_key"} and given:
            os.environ[environment_variable(context, option)] = given if isinstance(given, str) else " ".join(given)


_NEEDS_FREELANCE: Final = ("bind", "access", "insecure")
_NEEDS_BROKER: Final = (
    "broker", "key_file", "broker_key", "processes", "idle", "heartbeat", "liveness", "handler_timeout", "protocol",
)  # fmt: skip


def _check_freelance(freelance: str | None) -> None:
    """Raise `click.UsageError` for options on the command line that have no meaning with, or without, --freelance."""
    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        if freelance is None and name in _NEEDS_FREELANCE:
            raise click.UsageError(f"{option.opts[0]} requires --freelance", context)
        if freelance is not None and name in _NEEDS_BROKER:
            hint = "start one mdworker for each endpoint" if name == "processes" else "it uses no broker"
            raise click.UsageError(f"{option.opts[0]} has no meaning with --freelance: {hint}", context)


def _services_worker(services: Services, target: str, only: tuple[str, ...], given: dict[str, Any]) -> ServicesWorker:
    """Return the worker of these services, with the settings that the command line gives."""
    context = click.get_current_context()
    for name in ("service", "codec", "freelance"):
        if context.params[name] is not None:
            raise click.UsageError(f"--{name} has no meaning with {target}, which has services with names and types")
    least, most = context.params["processes"]
    if least < most:
        raise click.UsageError("--processes MIN-MAX follows the load of one service: give a Services a fixed number")
    arguments = {"name": target, **given}
    keys = arguments.pop("keys", None)
    broker = arguments.pop("endpoints", None)
    return services.worker(broker=broker, only=only, **({"key": keys} if keys is not None else {}), **arguments)


def _described(worker: Offering) -> str:
    """Return what a worker offers, and where."""
    workers = worker.workers if isinstance(worker, ServicesWorker) else [worker]
    names = ", ".join(each.service.decode() for each in workers[:MAX_SHOWN])
    more = f" and {len(workers) - MAX_SHOWN} more" if len(workers) > MAX_SHOWN else ""
    brokers = " or ".join(workers[0].settings.endpoints)
    concurrency = f", concurrency {workers[0].settings.concurrency}" if len(workers) == 1 else ""
    return f"{names}{more} at {brokers}{concurrency}"


def _serve(worker: Offering, drain_timeout: float, supervised_by: int | None) -> int:
    started = f"offering {_described(worker)}; Ctrl-C stops it"
    if supervised_by is not None:
        notify.ready_when(lambda: worker.registered, os.environ.pop(notify.ADDRESS, ""))
    # A supervised process ignores further signals: on Ctrl-C it gets one from the terminal and one from its supervisor,
    # which also kills it if need be.
    with Shutdown(
        worker.stop, limit=drain_timeout, unfinished=partial(_unfinished, worker), exits=supervised_by is None,
        logger=log,
    ) as shutdown:  # fmt: skip
        if supervised_by is not None:
            watching = (supervised_by, worker, shutdown)
            threading.Thread(target=_watch_supervisor, args=watching, name="supervisor", daemon=True).start()
        if isinstance(worker, ServicesWorker):
            asyncio.run(_serve_services(worker, started))
        elif isinstance(worker, AsyncWorker):
            asyncio.run(_serve_async(worker, started))
        else:
            worker.start()
            log.info(started)
            notify.ready(worker.turning, lambda: worker.registered)
            worker.wait()
    return 0


async def _serve_async(worker: AsyncWorker, started: str) -> None:
    worker.start()
    log.info(started)
    notify.ready(notify.event_loop(), lambda: worker.registered)
    await worker.wait()


async def _serve_services(worker: ServicesWorker, started: str) -> None:
    await worker.start()
    log.info(started)
    notify.ready(notify.event_loop(), lambda: worker.registered)
    await worker.wait()


def _watch_supervisor(pid: int, worker: Offering, shutdown: Shutdown) -> None:
    """Stop the worker when its supervisor has died.  Runs in a thread, because handlers may block the event loop."""
    while os.getppid() == pid:
        time.sleep(PARENT_CHECK_SECONDS)
    shutdown.begin()
    log.warning("the supervisor process has died: stopping")
    worker.stop()


def _unfinished(worker: Offering) -> str:
    """Describe the requests whose handlers have not ended."""
    requests = worker.requests
    if not requests:
        return "waiting for a handler whose request has been given up before, or for the broker to confirm the end"
    shown = [str(fields_of(request).get("request_id", "")) for request in requests[:MAX_SHOWN]]
    names = ", ".join(shown + ["…"] * (len(requests) > MAX_SHOWN))
    freelance = isinstance(worker, FreelanceWorker | AsyncFreelanceWorker)
    then = "their clients try other servers" if freelance else "other workers get them"
    services = ", ".join(sorted({request.service for request in requests})[:MAX_SHOWN])
    return f"{counted(len(requests), 'request')} of {services} ({names}); {then}"


def _supervise(worker: AnyWorker | None, processes: tuple[int, int], idle: float, drain_timeout: float) -> int:
    least, most = processes
    concurrency = 1 if worker is None else worker.settings.concurrency
    slots = Slots(least, most, lease=math.inf, idle=idle, concurrency=concurrency)
    watch: Callable[[], tuple[Load, set[int]]] | None = None
    with ExitStack() as stack:
        if least < most and worker is not None:  # services have a fixed number of processes
            settings = worker.settings
            if settings.protocol != "X1":
                raise SettingError("--processes MIN-MAX needs X1, in which workers tell the broker their process ids")
            from ...clients import Client  # noqa: PLC0415 - workers do without it otherwise

            client = stack.enter_context(
                Client(settings.endpoints, timeout=1.0, retries=0, heartbeat=settings.heartbeat, key=settings.keys)
            )
            service = worker.service.decode()

            def watch() -> tuple[Load, set[int]]:
                return fetch_load(client, service), fetch_pids(client, service)

        processes_command = command("--supervised-by", str(os.getpid()), *sys.argv[1:])
        supervisor = Supervisor(processes_command, slots, watch, drain_timeout=drain_timeout)
        stack.enter_context(
            Shutdown(
                supervisor.stop, supervisor.stop, limit=drain_timeout, unfinished=supervisor.unfinished,
                announcement="", grace=END_SECONDS, logger=log,
            )
        )  # fmt: skip
        notify.watchdog(supervisor.turning)  # its processes say when they serve
        return supervisor.run()


def _as_worker(
    found: object, target: str, service: str | None, codec: str | None, default_service: str | None = None
) -> AnyWorker:
    """Return `found`, which `target` names, if it is a worker, or make one of it if it is a function."""
    if isinstance(found, Worker | AsyncWorker):
        if codec is not None:
            raise SettingError(f"{target} is a worker, which has its own codec: remove --codec")
        if service is not None:
            found.service = wire.service_name(service)
        return found
    if not callable(found):
        expected = "a zmdp.Services, a zmdp.Worker or AsyncWorker, or a function with --service"
        raise SettingError(f"{target} is of type {type(found).__name__}: expected {expected}")
    service = service or default_service
    if service is None:
        raise SettingError(f"{target} is a function: name the service that it offers with --service NAME")
    if is_async(found):
        return AsyncWorker(service, found, codec=codec)
    return Worker(service, found, codec=codec)


def main() -> NoReturn:
    """Entry point of `mdworker`."""
    run("mdworker", cli)


if __name__ == "__main__":
    main()
