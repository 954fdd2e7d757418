"""Supervises the worker processes of `mdworker`: restarts, reloads and replaces them."""

import logging
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from ...mdp.cli import notify
from ...mdp.cli.shutdown import Shutdown
from ..processes.reload import source_folders, watch_sources
from ..processes.supervisor import END_SECONDS, Supervisor

log = logging.getLogger("zmdp.worker")


class Supervision(NamedTuple):
    """How worker processes are supervised."""

    processes: int
    drain_timeout: float
    reload: Sequence[str]
    """The modules whose source is watched."""


def supervise(settings: Supervision) -> int:
    """Run processes of this command until a signal says to stop.  Return the exit code."""
    with ExitStack() as stack:
        supervisor = Supervisor(
            sys.argv[1:], settings.processes,
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
