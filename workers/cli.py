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
from ..mdp.console import Endpoint, Number, log_level_option, log_to_stderr, run, version_option, with_default
from ..mdp.errors import SettingError
from ..mdp.loading import load
from ..mdp.reach import why_unreachable
from ..mdp.server import DEFAULT_ENDPOINT
from .aio import AsyncWorker
from .handling import is_async
from .mdworker import Worker
from .processes import Supervisor, command

PARENT_CHECK: Final = 1.0
"""Seconds between two looks at whether the supervising process is still there."""

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
    help="What the function's argument and results are; without, frames of bytes. Only if MODULE:WORKER is a function.",
)
@click.option(
    "--concurrency",
    type=Number("connections", whole=True),
    help=with_default("Requests handled at a time in each process, in threads or asyncio tasks.", 1),
)
@click.option(
    "--processes",
    type=Number("processes", whole=True),
    default=1,
    help=with_default("Processes; one that dies is started again.", 1),
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
    help=with_default("Silent intervals after which the broker is taken for dead.", 5, "intervals"),
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
    help=with_default("What to speak: 0.2 or 0.1 with a broker that is not zmdp's.", "X1"),
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

    The module is looked for in the current directory, then among the installed packages.  Settings given here go before
    those in the module.  SIGTERM or Ctrl-C finishes what is being worked on, tells the broker and ends; once more ends
    at once.

    \b
    Try it: mdworker zmdp.workers.echo:worker
    Exit codes: 0 ended as asked; 1 ended by a second signal; 2 bad usage, or the module cannot be used.
    """
    log_to_stderr(log_level)
    worker = _load(target, service, codec)
    if broker is not None:
        worker.broker = broker
    if concurrency is not None:
        worker.concurrency = concurrency
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
    told = f"serving {worker.service.decode()} at {worker.broker}, {worker.concurrency} at a time; Ctrl-C ends"

    def check_parent() -> None:
        if supervised_by is not None and os.getppid() != supervised_by:
            log.warning("the supervising process is gone")
            worker.stop()

    if isinstance(worker, AsyncWorker):
        asyncio.run(_serve_async(worker, told, check_parent))
        return 0
    worker.start()
    log.info(told)
    _look_for_broker(worker.broker)
    while not worker.wait(PARENT_CHECK):
        check_parent()
    return 0


def _look_for_broker(endpoint: str) -> None:
    reason = why_unreachable(endpoint)
    if reason is not None:
        log.warning("no broker at %s yet: %s; connecting goes on until there is one", endpoint, reason)


async def _serve_async(worker: AsyncWorker, told: str, check_parent: Callable[[], None]) -> None:
    worker.start()
    log.info(told)
    await asyncio.to_thread(_look_for_broker, worker.broker)
    ended = asyncio.ensure_future(worker.wait())
    while not (await asyncio.wait([ended], timeout=PARENT_CHECK))[0]:
        check_parent()


class _Stopper:
    """Stops the worker; the second time, ends the process, which a stuck handler would keep alive.

    A supervised process gets the signal from the terminal and from its supervisor: it leaves the second time to that.
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
            log.info("ending: what is being worked on is finished first; once more ends at once")


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
            raise click.BadParameter(f"{target} is a worker, which says itself what its codec is: leave out --codec")
        if found.started:
            hint = "put that under: if __name__ == '__main__':"
            raise click.BadParameter(f"cannot use {target}: its module starts the worker when it is imported; {hint}")
        if service is not None:
            found.service = wire.service_name(service)
        return found
    if not callable(found):
        wanted = "a zmdp.workers.Worker or AsyncWorker, or a function with --service"
        raise click.BadParameter(f"{target} is of type {type(found).__name__}: it takes {wanted}")
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
