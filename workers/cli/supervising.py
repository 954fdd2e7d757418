"""Supervises the worker processes of `mdworker`: scales, reloads and replaces them."""

import logging
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from ...mdp.cli import notify
from ...mdp.cli.shutdown import Shutdown
from ..load import fetch_load, fetch_pids
from ..processes import END_SECONDS, Supervisor
from ..reload import source_folders, watch_sources
from ..scaling import Load, Slots
from ..services import ServicesWorker
from .serving import AnyWorker, Offering

log = logging.getLogger("zmdp.worker")


class Supervision(NamedTuple):
    """How worker processes are supervised."""

    least: int
    most: int
    idle: float
    """Seconds after which a process that was not needed is stopped."""
    drain_timeout: float
    reload: Sequence[str]
    """The modules whose source is watched."""


def supervise(worker: Offering, settings: Supervision) -> int:
    """Run processes that serve with `worker`, until a signal says to stop.  Return the exit code."""
    least, most = settings.least, settings.most
    concurrency = 1 if isinstance(worker, ServicesWorker) else worker.settings.concurrency
    slots = Slots(least, most, lease=math.inf, idle=settings.idle, concurrency=concurrency)
    with ExitStack() as stack:
        watch = None
        if least < most and not isinstance(worker, ServicesWorker):  # services have a fixed number of processes
            watch = _load_watch(worker, stack)
        supervisor = Supervisor(
            sys.argv[1:], slots, watch,
            drain_timeout=settings.drain_timeout, patience=notify.watchdog_seconds() or math.inf,
        )  # fmt: skip
        if settings.reload:
            stack.enter_context(watch_sources(source_folders(settings.reload), supervisor.replace_all))
        stack.enter_context(
            Shutdown(
                supervisor.stop, supervisor.stop, limit=settings.drain_timeout, unfinished=supervisor.unfinished,
                announcement="", grace=END_SECONDS, reload=partial(supervisor.replace_all, "SIGHUP"), logger=log,
            )
        )  # fmt: skip
        notify.ready(supervisor.turning, lambda: supervisor.served)
        return supervisor.run()


def _load_watch(worker: AnyWorker, stack: ExitStack) -> Callable[[], tuple[Load, set[int]]]:
    """Return a function that asks the broker for the service's load and processes."""
    from ...clients import Client  # noqa: PLC0415 - workers do without it otherwise

    settings = worker.settings
    client = stack.enter_context(
        Client(settings.endpoints, timeout=1.0, retries=0, heartbeat=settings.heartbeat, key=settings.keys)
    )
    service = worker.service.decode()
    return lambda: (fetch_load(client, service), fetch_pids(client, service))
