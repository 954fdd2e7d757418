"""The command `mdworker`."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Final, NoReturn

import click

from ..mdp import wire
from ..mdp.cli.console import Endpoint, Number, log_level_option, log_to_stderr, run, version_option, with_default
from ..mdp.defaults import DEFAULT_ENDPOINT
from ..mdp.errors import SettingError
from ..mdp.loading import load
from ..mdp.transport.reach import why_unreachable
from .aio import CONCURRENCY, AsyncWorker
from .handling import is_async
from .mdworker import Worker
from .processes import Supervisor, command

PARENT_CHECK: Final = 1.0
"""Seconds between two checks whether the supervising process still exists."""

AnyWorker = Worker | AsyncWorker

log = logging.getLogger("zmdp.worker")


@click.command(context_settings={"max_content_width": 110})
@click.argument("target", metavar="MODULE:WORKER")
@click.option(
    "--broker",
    type=Endpoint(),
    envvar="MDP_BROKER",
    show_envvar=True,
    help=with_default("Broker to serve.", DEFAULT_ENDPOINT),
)
@click.option("--service", metavar="NAME", help="Service to offer; needed if MODULE:WORKER is a function.")
@click.option(
    "--codec",
    type=click.Choice(["json", "msgpack", "arrow"]),
    help="Encoding of a function's argument and results; without, they are frames of bytes.",
)
@click.option(
    "--concurrency",
    type=Number("requests", whole=True),
    help=f"Requests handled at a time in each process. [default: 1 thread; {CONCURRENCY} for asyncio handlers]",
)
@click.option(
    "--processes",
    type=Number("processes", whole=True),
    default=1,
    help=with_default("Number of processes; one that dies is restarted.", 1),
)
@click.option(
    "--heartbeat",
    type=Number("seconds"),
    envvar="MDP_HEARTBEAT",
    show_envvar=True,
    help=with_default("Interval of heartbeats.", 1.0, "seconds"),
)
@click.option(
    "--liveness",
    type=Number("intervals", whole=True),
    envvar="MDP_LIVENESS",
    show_envvar=True,
    help=with_default("Silent intervals after which the broker is considered dead.", 5, "intervals"),
)
@click.option(
    "--handler-timeout",
    type=Number("seconds"),
    help=with_default("Give up a request whose handler has neither returned nor yielded for this long.", "never"),
)
@click.option(
    "--protocol",
    type=click.Choice(["X1", "0.2", "0.1"]),
    envvar="MDP_PROTOCOL",
    show_envvar=True,
    help=with_default("Protocol: 0.2 or 0.1 for a third-party broker.", "X1"),
)
@log_level_option
@click.option("--supervised-by", type=int, hidden=True)
@version_option()
def cli(
    *,
    target: str,
    broker: str | None,
    service: str | None,
    codec: str | None,
    concurrency: int | None,
    processes: int,
    heartbeat: float | None,
    liveness: int | None,
    handler_timeout: float | None,
    protocol: str | None,
    log_level: str,
    supervised_by: int | None,
) -> int:
    """Serve requests with MODULE:WORKER: a `zmdp.workers.Worker` or `AsyncWorker`, or a function of a request.

    The module is searched for in the current directory, then among the installed packages.  Settings given here
    override those in the module.  SIGTERM or Ctrl-C finishes the requests that have begun and exits; interrupt again to
    exit immediately.

    \b
    Try it: mdworker zmdp.workers.echo:worker
    Exit codes: 0 stopped; 1 stopped by a second signal; 2 bad usage, or the module cannot be used.
    """
    log_to_stderr(log_level)
    worker = _load(target, service, codec)
    worker.name = worker.name or target
    if broker is not None:
        worker.broker = broker
    if concurrency is not None:
        worker.concurrency = concurrency
        if isinstance(worker, AsyncWorker):
            worker.max_concurrency = None
    if heartbeat is not None:
        worker.heartbeat = heartbeat
    if liveness is not None:
        worker.liveness = liveness
    if handler_timeout is not None:
        worker.handler_timeout = handler_timeout
    if protocol is not None:
        worker.protocol = protocol
    if processes > 1 and supervised_by is None:
        return _supervise(processes)
    return _serve(worker, supervised_by)


def _serve(worker: AnyWorker, supervised_by: int | None) -> int:
    _on_signals(_Stopper(worker, alone=supervised_by is None))
    credit = worker.credit if isinstance(worker, AsyncWorker) else worker.concurrency
    started = f"offers {worker.service.decode()}, credit {credit}, at {worker.broker}; Ctrl-C stops it"

    def check_parent() -> None:
        if supervised_by is not None and os.getppid() != supervised_by:
            log.warning("the supervising process has died: stopping")
            worker.stop()

    if isinstance(worker, AsyncWorker):
        asyncio.run(_serve_async(worker, started, check_parent))
        return 0
    worker.start()
    log.info(started)
    _look_for_broker(worker.broker)
    while not worker.wait(PARENT_CHECK):
        check_parent()
    return 0


def _look_for_broker(endpoint: str) -> None:
    reason = why_unreachable(endpoint)
    if reason is not None:
        log.warning("no broker at %s yet: %s; trying to connect until there is one", endpoint, reason)


async def _serve_async(worker: AsyncWorker, started: str, check_parent: Callable[[], None]) -> None:
    worker.start()
    log.info(started)
    await asyncio.to_thread(_look_for_broker, worker.broker)
    ended = asyncio.ensure_future(worker.wait())
    while not (await asyncio.wait([ended], timeout=PARENT_CHECK))[0]:
        check_parent()


class _Stopper:
    """Stops the worker; the second time, exits the process, which a stuck handler would keep alive.

    A supervised process gets the signal from the terminal and from its supervisor: only the supervisor kills it.
    """

    def __init__(self, worker: AnyWorker, *, alone: bool) -> None:
        self._worker = worker
        self._alone = alone
        self._stops = 0

    def stop(self) -> None:
        self._stops += 1
        if self._stops > 1:
            if self._alone:
                os._exit(1)
            return
        self._worker.stop()
        with suppress(RuntimeError):  # the signal may have come while this thread was writing to stderr
            log.info("stopping when the requests that have begun are finished; interrupt again to exit immediately")


def _supervise(processes: int) -> int:
    arguments = ["--supervised-by", str(os.getpid()), *sys.argv[1:]]
    supervisor = Supervisor(command(*arguments), processes)
    _on_signals(supervisor)
    return supervisor.run()


def _on_signals(what: _Stopper | Supervisor) -> None:
    """SIGTERM and Ctrl-C call `what.stop()`."""

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        what.stop()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def _load(target: str, service: str | None, codec: str | None) -> AnyWorker:
    """The worker that MODULE:WORKER names."""
    try:
        found = load(target, "MODULE:WORKER, for example zmdp.workers.echo:worker")
    except SettingError as error:
        raise click.BadParameter(str(error)) from None
    if isinstance(found, Worker | AsyncWorker):
        if codec is not None:
            raise click.BadParameter(f"{target} is a worker, which has a codec of its own: leave out --codec")
        if found.started:
            hint = "put that under: if __name__ == '__main__':"
            raise click.BadParameter(f"cannot use {target}: its module starts the worker when it is imported; {hint}")
        if service is not None:
            found.service = wire.service_name(service)
        return found
    if not callable(found):
        wanted = "a zmdp.workers.Worker or AsyncWorker, or a function with --service"
        raise click.BadParameter(f"{target} is of type {type(found).__name__}: it must be {wanted}")
    if service is None:
        raise click.BadParameter(f"{target} is a function: name the service it offers with --service NAME")
    if is_async(found):
        return AsyncWorker(service, found, codec=codec)
    return Worker(service, found, codec=codec)


def main() -> NoReturn:
    """Entry point of `mdworker`."""
    run("mdworker", cli)


if __name__ == "__main__":
    main()
