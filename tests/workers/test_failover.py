"""Workers with several brokers: they move when a broker is lost or drains, and return to the first."""

import asyncio
import logging
import signal
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest
from support.loops import serving
from support.processes import TIMEOUT_SECONDS, eventually, free_endpoint
from support.processes import broker as broker_process

from zmdp import Limit
from zmdp.clients import Client
from zmdp.mdp.limits import Limits
from zmdp.testing import running_broker
from zmdp.workers import AsyncWorker, Worker

BEATS = {"heartbeat": 0.05, "liveness": 400}
QUICK = ("--heartbeat", "0.05", "--liveness", "400")

each_kind = pytest.mark.parametrize("kind", [Worker, AsyncWorker])


@pytest.fixture
def brokers():
    """Two endpoints without brokers."""
    return [free_endpoint(), free_endpoint()]


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.DEBUG, logger="zmdp.worker")

    def lines(text):
        return [each.getMessage() for each in caplog.records if text in each.getMessage()]

    return lines


@contextmanager
def killable(endpoint):
    """A broker process at that endpoint; its `kill` ends it as `kill -9` does."""
    with broker_process(*QUICK, "--drain-timeout", "600", bind=endpoint) as (process, _):
        yield process


def at(endpoint):
    """A broker in this process, which drains at the end of the block."""
    return running_broker(endpoint, limits=Limits(**BEATS), drain_timeout=600.0)


class Served:
    """A worker of `echo` in threads or in an event loop of its own; `hold` is answered when `go` is set."""

    def __init__(self, kind, brokers, **settings):
        self.began = threading.Semaphore(0)
        self.go = threading.Event()
        handler = self.handle if kind is Worker else self.handle_async
        self.worker = kind("echo", handler, broker=brokers, **BEATS, **settings)
        self._kind = kind

    def handle(self, request):
        if request[0] == b"hold":
            self.began.release()
            self.go.wait(TIMEOUT_SECONDS)
        return request

    async def handle_async(self, request):
        if request[0] == b"hold":
            self.began.release()
            while not self.go.is_set():
                await asyncio.sleep(0.005)
        return request

    def __enter__(self):
        self._running = self.worker if self._kind is Worker else serving(self.worker)
        self._running.__enter__()
        return self

    def __exit__(self, *_):
        self.go.set()
        self._running.__exit__(None, None, None)


def client(endpoint):
    return Client(endpoint, timeout=TIMEOUT_SECONDS, retries=0)


@each_kind
def test_a_worker_whose_broker_is_killed_serves_at_the_next_and_returns(kind, brokers, logged):
    first, second = brokers
    with ExitStack() as stack:
        process = stack.enter_context(killable(first))
        stack.enter_context(at(second))
        with client(first) as near, client(second) as far, Served(kind, brokers, concurrency=2) as served:
            assert near.request("echo", b"1") == [b"1"]
            waiting = far.submit("echo", b"2")
            process.kill()
            assert waiting.result() == [b"2"]
            eventually(lambda: logged(f"echo: moved to {second}: lost the broker at {first}: it closed the connection"))
            held = far.submit("echo", b"hold")
            assert served.began.acquire(timeout=TIMEOUT_SECONDS)
            stack.enter_context(killable(first))
            with client(first) as again:
                returning = again.submit("echo", b"3")
                served.go.set()
                assert held.result() == [b"hold"]  # what it held is finished where it was
                assert returning.result() == [b"3"]
            eventually(lambda: logged(f"echo: moved to {first}: the broker at {first} is back"))


@each_kind
def test_a_worker_does_not_return_while_requests_wait_for_it(kind, brokers, logged):
    """The brokers are not linked: no other worker could do them."""
    first, second = brokers
    with at(second), client(second) as far, Served(kind, brokers, concurrency=4) as served:
        results = [far.submit("echo", b"hold") for _ in range(20)]
        for _ in range(4):
            assert served.began.acquire(timeout=TIMEOUT_SECONDS)
        with at(first), client(first) as near:
            returning = near.submit("echo", b"x")
            served.go.set()
            assert [each.result() for each in results] == [[b"hold"]] * 20
            assert returning.result() == [b"x"]
            eventually(lambda: logged("is back"))


@each_kind
def test_a_worker_leaves_a_draining_broker(kind, brokers, logged):
    first, second = brokers
    with at(second), client(second) as far, Served(kind, brokers) as served:
        with at(first) as draining, client(first) as near:
            eventually(lambda: logged("is back") or logged(f"serving at {first}"))
            held = near.submit("echo", b"hold")
            assert served.began.acquire(timeout=TIMEOUT_SECONDS)
            draining.stop()
            waiting = far.submit("echo", b"y")
            served.go.set()
            assert held.result() == [b"hold"]
            assert waiting.result() == [b"y"]
        eventually(lambda: logged(f"echo: moved to {second}: the broker at {first} is draining"))
    assert not [each for each in logged("") if "dropped" in each]


@pytest.mark.parametrize("protocol", ["0.2", "0.1"])
@each_kind
def test_workers_of_mdp_move_too(kind, brokers, logged, protocol):
    first, second = brokers
    with ExitStack() as stack:
        process = stack.enter_context(killable(first))
        ends = stack.enter_context(at(second))
        far = stack.enter_context(client(second))
        stack.enter_context(Served(kind, brokers, protocol=protocol, concurrency=2))
        eventually(lambda: logged(f"serving at {first}"))
        process.kill()
        assert far.request("echo", b"1") == [b"1"]
        near = stack.enter_context(client(stack.enter_context(at(first)).endpoints[0]))
        ends.stop()  # DISCONNECT
        assert near.request("echo", b"2") == [b"2"]
        eventually(lambda: logged(f"echo: moved to {first}: the broker at {second} is draining"))


def test_a_worker_begins_at_whichever_broker_there_is(brokers, logged):
    first, second = brokers
    with at(second), client(second) as far, Served(Worker, brokers):
        assert far.request("echo", b"1") == [b"1"]
    (moved,) = logged("moved")
    assert moved.startswith(f"echo: moved to {second}: cannot use the broker at {first}: nothing is listening there")
    assert not logged("waiting")


def test_a_worker_without_any_broker_says_so_once_and_waits(brokers, logged):
    first, second = brokers
    with Served(Worker, brokers):
        waiting = eventually(lambda: logged("waiting"))
        (said,) = waiting
        failed = f"cannot use the broker at {first}: nothing is listening there"
        assert said.startswith(f"echo: waiting for a broker at {first} or {second}: {failed}")
        with at(second), client(second) as far:
            assert far.request("echo", b"1") == [b"1"]
            assert len(logged("waiting")) == 1


def test_workers_that_prefer_one_broker_of_a_pair_hold_one_limit(brokers):
    counts, lock = {"running": 0, "most": 0}, threading.Lock()

    def handle(request):
        with lock:
            counts["running"] += 1
            counts["most"] = max(counts.values())
        time.sleep(0.01)  # the work
        with lock:
            counts["running"] -= 1
        return request

    def answered(*clients):
        futures = [client.submit("echo", b"x") for _ in range(10) for client in clients]
        return [future.result(TIMEOUT_SECONDS) for future in futures]

    a, b = brokers
    with (
        broker_process(*QUICK, "--name", "b", "--peer", a, bind=b),
        broker_process(*QUICK, "--name", "a", "--peer", b, bind=a) as (first, _),
        Worker("echo", handle, broker=[a, b], concurrency=4, limit=Limit(concurrency=1), **BEATS),
        Worker("echo", handle, broker=[a, b], concurrency=4, limit=Limit(concurrency=1), **BEATS),
        Client(a, timeout=TIMEOUT_SECONDS) as at_a,
        Client(b, timeout=TIMEOUT_SECONDS) as at_b,
    ):
        eventually(lambda: at_a.available("echo") and at_b.available("echo"))
        assert len(answered(at_a, at_b)) == 20
        first.end(signal.SIGKILL)
        assert len(answered(at_b)) == 10
    assert counts["most"] == 1
