"""The services that are called during a run.  Each execution is written to the ledger before it does anything else."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from zmdp import Limit, Services
from zmdp.workers import ServiceError

from .ledger import Ledger

services = Services()
MAX_PAUSE_MS = 50
LIMIT = Limit(concurrency=8, rate="500/min", burst=20)


@dataclass
class Task:
    """A call: its identity in the ledger, the number from which the right reply follows, and what is to be done."""

    call: str
    number: int
    body: str = ""
    parts: int = 3
    fails: bool = False


@dataclass
class Result:
    """What the service makes of a task; `mark` is the execution's own."""

    call: str
    value: int
    body: str = ""
    mark: str = ""


def right_result(task: Task, part: int = 0) -> Result:
    """Return the only right reply, or the part of it with this number, without its mark."""
    return Result(task.call, 7 * task.number + part, task.body)


@cache
def _ledger() -> Ledger:
    return Ledger(Path(os.environ["FAULTS_LEDGER"]), "worker")


def _begin(task: Task) -> str:
    """Write an execution down, and return its mark, which begins with the process."""
    mark = f"{os.getpid()}.{secrets.token_hex(6)}"
    _ledger().write("executed", task.call, mark)
    return mark


def _marked(task: Task, mark: str, part: int = 0) -> Result:
    found = right_result(task, part)
    found.mark = mark
    return found


@services.service("faults.work")
async def work(task: Task) -> Result:
    """Take up to 50 ms, now and then much longer, so that something is always running."""
    mark = _begin(task)
    await asyncio.sleep(0.5 if task.number % 97 == 0 else task.number % MAX_PAUSE_MS / 1000)
    if task.fails:
        raise ServiceError(422, f"{task.number} fails, as it should", mark.encode())
    return _marked(task, mark)


@services.service("faults.quick")
async def quick(task: Task) -> Result:
    """Reply at once."""
    return _marked(task, _begin(task))


@services.service("faults.parts")
async def parts(task: Task) -> AsyncIterator[Result]:
    """Stream the parts that are asked for."""
    mark = _begin(task)
    for part in range(task.parts):
        await asyncio.sleep(0.005)
        yield _marked(task, mark, part)


@services.service("faults.limited", limit=LIMIT)
async def limited(task: Task) -> Result:
    """Take 0.6 s, and write down when that is over."""
    mark = _begin(task)
    try:
        await asyncio.sleep(0.6)
    finally:
        _ledger().write("finished", task.call, mark)
    if task.fails:
        raise ServiceError(422, f"{task.number} fails, as it should", mark.encode())
    return _marked(task, mark)
