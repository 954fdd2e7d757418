"""Serves in this process, or says what it would serve: the end of `mdworker`, and of each process it supervises."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from types import NoneType
from typing import Final

from ...interop.freelance.worker import AsyncFreelanceWorker, FreelanceWorker
from ...mdp.cli import notify
from ...mdp.cli.console import EXIT_FAILED
from ...mdp.cli.shutdown import Shutdown
from ...mdp.errors import SettingError
from ...mdp.program.logs import counted, enable_again, fields_of
from ...mdp.services import Streaming
from ...mdp.services.schedule import shown
from ...mdp.services.type_parts import show
from ..aio import AsyncWorker
from ..mdworker import Worker
from ..processes.supervised import ProcessLimits, SupervisorLink
from ..services import ServicesWorker
from ..services.offered import AnyOffered

MAX_SHOWN: Final = 10
"""Maximum number of unfinished requests, or of services, that the log names."""

RESTART: Final = "restart it to run new code, or start it with --processes N, whose processes SIGHUP replaces"

AnyWorker = Worker | AsyncWorker
Offering = AnyWorker | ServicesWorker
Watched = Callable[[Callable[[], bool]], None]
"""Has a worker tell that it is alive, given its `turning` (`notify.ready`)."""

log = logging.getLogger("zmdp.worker")


def serve(worker: Offering, drain_timeout: float, link: SupervisorLink | None, limits: ProcessLimits) -> int:
    """Serve until a signal says to stop.  Return the exit code."""
    started = f"offering {described(worker)}; Ctrl-C stops it"
    # A supervised process ignores further signals: on Ctrl-C it gets one from the terminal and one from its supervisor,
    # which also kills it if need be.
    with Shutdown(
        worker.stop, limit=drain_timeout, unfinished=partial(_unfinished, worker), exits=link is None,
        restart=RESTART, logger=log,
    ) as shutdown:  # fmt: skip
        if link is not None:

            def orphaned() -> None:
                shutdown.begin()
                log.warning("the supervisor process has died: stopping")
                worker.stop()

            os.environ.pop(notify.ADDRESS, None)  # the supervisor tells
            link.watch(worker, limits, orphaned)
            watched: Watched = partial(notify.watchdog, alive=link.alive, process=link.supervisor)
        else:
            watched = partial(notify.ready, serving=lambda: worker.registered)
        if isinstance(worker, ServicesWorker):
            return asyncio.run(_serve_services(worker, started, watched))
        if isinstance(worker, AsyncWorker):
            asyncio.run(_serve_async(worker, started, watched))
        else:
            worker.start()
            log.info(started)
            watched(worker.turning)
            worker.wait()
    return 0


def described(worker: Offering) -> str:
    """Return the services that a worker offers, and its brokers, for the log."""
    workers = worker.workers if isinstance(worker, ServicesWorker) else [worker]
    names = ", ".join(each.service.decode() for each in workers[:MAX_SHOWN])
    more = f" and {len(workers) - MAX_SHOWN} more" if len(workers) > MAX_SHOWN else ""
    brokers = " or ".join(workers[0].settings.endpoints)
    concurrency = f", concurrency {workers[0].settings.concurrency}" if len(workers) == 1 else ""
    return f"{names}{more} at {brokers}{concurrency}"


def scheduled(worker: ServicesWorker) -> list[str]:
    """Return a line for each service that has a schedule, which no worker follows by itself."""
    text = "{}: a Titanic is to submit a request {}; without one, nothing does"
    return [text.format(each.name, shown(each.schedule)) for each in worker.offered if each.schedule]


async def _serve_async(worker: AsyncWorker, started: str, watched: Watched) -> None:
    worker.start()
    log.info(started)
    watched(notify.event_loop())
    await worker.wait()


async def _serve_services(worker: ServicesWorker, started: str, watched: Watched) -> int:
    """Serve, and return the exit code.  Exceptions of a lifespan are logged, as those of handlers are."""
    try:
        await worker.start()
    except SettingError:
        raise
    except Exception:
        enable_again()  # the lifespan may have configured `logging`
        log.exception("the lifespan failed at the start, so nothing is served")
        return EXIT_FAILED
    enable_again()
    log.info(started)
    for line in scheduled(worker):
        log.info("%s", line)
    watched(notify.event_loop())
    try:
        await worker.wait()
    except Exception:
        log.exception("the lifespan failed at the end")
        return EXIT_FAILED
    return 0


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


TITLES = ("SERVICE", "REQUEST", "REPLY", "RUNS IN", "CONCURRENCY")


def table(worker: Offering) -> str:
    """Return a line for each service that a worker offers, under a line of titles, and for each schedule."""
    if isinstance(worker, ServicesWorker):
        rows = [_row(each, *_types(offered)) for each, offered in zip(worker.workers, worker.offered, strict=True)]
    else:
        body = worker.settings.codec or "frames"
        rows = [_row(worker, str(body), str(body))]
    widths = [max(map(len, column)) for column in zip(TITLES, *rows, strict=True)]
    schedules = scheduled(worker) if isinstance(worker, ServicesWorker) else []
    return "\n".join([*(_line(cells, widths) for cells in (TITLES, *rows)), *schedules])


def _row(worker: AnyWorker, request: str, reply: str) -> tuple[str, ...]:
    place = "event loop" if isinstance(worker, AsyncWorker) else "threads"
    return worker.service.decode(), request, reply, place, str(worker.settings.concurrency)


def _types(offered: AnyOffered) -> tuple[str, str]:
    request, reply = ("None" if each is NoneType else show(each) for each in (offered.request.kind, offered.reply.kind))
    return request, f"stream of {reply}" if isinstance(offered, Streaming) else reply


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
