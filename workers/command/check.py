"""The table of `mdworker --check`: what a process would offer."""

from collections.abc import Sequence
from types import NoneType

from ...mdp.services import Streaming
from ...mdp.services.type_parts import show
from ..aio import AsyncWorker
from ..services import ServicesWorker
from ..services.offered import AnyOffered
from .serving import AnyWorker, Offering, scheduled

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
