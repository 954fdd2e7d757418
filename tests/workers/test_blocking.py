"""The warning about handlers that block the event loop."""

import asyncio
import logging
import time

import pytest

from zmdp.clients import AsyncClient
from zmdp.testing import running_broker
from zmdp.workers import AsyncWorker, aio_handling
from zmdp.workers.aio_handling import BLOCKED_SECONDS, WARNING_SECONDS, BlockingWatch


@pytest.fixture
def watch():
    loop = asyncio.new_event_loop()
    yield BlockingWatch(loop, "images", "resize")
    loop.close()


def test_the_warning_says_who_and_what_to_do(watch, caplog):
    watch.checked(0.3, 0.0, 100.0)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("images: the event loop was blocked for 0.3 s")
    for each in ("resize", "asyncio.to_thread", "Worker"):
        assert each in record.getMessage()


def test_waiting_for_a_processor_is_not_blocking(watch, caplog):
    watch.checked(5.0, 5.0 - BLOCKED_SECONDS / 2, 100.0)
    assert not caplog.records
    watch.checked(5.0, 4.0, 100.0)
    assert "blocked for 1.0 s" in caplog.text


def test_there_is_one_warning_in_a_while_and_it_counts_the_others(watch, caplog):
    for now in (100.0, 100.5, 101.0, 100.0 + WARNING_SECONDS, 101.0 + WARNING_SECONDS):
        watch.checked(1.0, 0.0, now)
    first, second = (record.getMessage() for record in caplog.records)
    assert "times" not in first
    assert "(and 2 times since the last such line)" in second


def test_a_system_that_does_not_tell_how_long_a_thread_waited(monkeypatch, tmp_path):
    monkeypatch.setattr(aio_handling, "_SCHEDSTAT", tmp_path / "missing")
    assert aio_handling.processor_wait() == 0.0


def test_time_spent_waiting_for_a_processor_only_grows():
    before = aio_handling.processor_wait()
    time.sleep(0)
    assert 0.0 <= before <= aio_handling.processor_wait()


@pytest.mark.parametrize("waits_first", [False, True])
def test_a_handler_that_blocks_is_named(waits_first, logged):
    """In its first step, and in a later one."""

    async def dig(request):
        if waits_first:
            await asyncio.sleep(0)
        time.sleep(0.5)  # what it must not do
        return b"done"

    async def scenario():
        with running_broker() as server:
            async with (
                AsyncWorker("dig", dig, broker=server.endpoints[0]) as worker,
                AsyncClient(server.endpoints[0], timeout=None) as client,
            ):
                assert await client.request("dig") == [b"done"]
                assert await asyncio.to_thread(logged, "dig: the event loop was blocked for 0.")
                assert await asyncio.to_thread(logged, "The handler test_a_handler_that_blocks_is_named.<locals>.dig")
                assert worker.started

    asyncio.run(scenario())


def test_an_idle_worker_makes_no_checks():
    async def scenario():
        loop = asyncio.get_running_loop()
        watch = BlockingWatch(loop, "images", "resize")
        watch.note()
        assert watch.active
        while watch.active:
            await asyncio.sleep(0.01)
        watch.note()
        assert watch.active
        watch.close()
        assert not watch.active

    asyncio.run(scenario())
