"""The services that are called during a soak.  Each execution is written to the ledger before it does anything else."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from zmdp import Services

from .ledger import Ledger

services = Services()
PARTS = 3
MAX_PAUSE_MS = 50


@dataclass
class Task:
    """A call: its identity in the ledger, and the number from which the right reply follows."""

    call: str
    number: int


@dataclass
class Result:
    """What the service makes of a task."""

    call: str
    value: int


def right_result(task: Task, part: int = 0) -> Result:
    """Return the only right reply, or the part of it with this number."""
    return Result(task.call, 7 * task.number + part)


@cache
def _ledger() -> Ledger:
    return Ledger(Path(os.environ["SOAK_LEDGER"]), "worker")


@services.service("soak.work")
async def work(task: Task) -> Result:
    """Take up to 50 ms."""
    _ledger().write("executed", task.call)
    await asyncio.sleep(task.number % MAX_PAUSE_MS / 1000)
    return right_result(task)


@services.service("soak.parts")
async def parts(task: Task) -> AsyncIterator[Result]:
    """Stream three parts."""
    _ledger().write("executed", task.call)
    for part in range(PARTS):
        await asyncio.sleep(0.005)
        yield right_result(task, part)
