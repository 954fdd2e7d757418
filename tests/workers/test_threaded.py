"""Threads that serve one connection, seen by a broker made by hand."""

import threading

import pytest
from support.processes import TIMEOUT_SECONDS, eventually
from support.router import Router
from support.x1_broker import Peer

from zmdp.clients import Client
from zmdp.mdp import wire
from zmdp.mdp.limits import Limits
from zmdp.testing import running_broker
from zmdp.workers import Request, Worker


@pytest.fixture
def router():
    with Router() as router:
        yield router


@pytest.fixture
def peer(router):
    return Peer(router)


class Gate:
    """A handler that answers at once, but for bodies that are not `short`: then it waits until `go` is set."""

    def __init__(self):
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)

    def __call__(self, request):
        if request != [b"short"]:
            self.begun.release()
            assert self.go.wait(TIMEOUT_SECONDS)
        return request


def test_one_connection_for_all_threads(router, peer):
    together = threading.Barrier(4, timeout=TIMEOUT_SECONDS)
    with Worker("meet", lambda request: b"%d" % together.wait(), broker=router.endpoint, concurrency=4) as worker:
        ready = peer.ready()
        assert (ready.credit, ready.service) == (4, b"meet")
        assert ready.host
        peer.send(work=[1, 2, 3, 4])
        assert sorted(peer.ends(4).values()) == [b"0", b"1", b"2", b"3"]
        peer.let_go(worker.stop)


def test_before_x1_each_thread_has_a_connection(router):
    with Worker("echo", list, broker=router.endpoint, concurrency=3, protocol="0.2"):
        assert len({router.command()[0] for _ in range(3)}) == 3


def test_replies_to_one_batch_travel_together(router, peer):
    with Worker("echo", list, broker=router.endpoint) as worker:
        peer.ready()
        peer.send(work=range(200))
        before = peer.messages
        assert len(peer.ends(200)) == 200
        assert peer.messages - before < 200
        peer.let_go(worker.stop)


@pytest.mark.parametrize("threads", [1, 3])
def test_requests_behind_a_slow_handler_are_returned(router, peer, threads):
    gate = Gate()
    with Worker("gate", gate, broker=router.endpoint, concurrency=threads) as worker:
        assert peer.ready().credit == threads
        peer.send(work=range(100, 100 + 3 * threads), body=b"slow")
        released = {peer.next().id for _ in range(2 * threads)}
        assert released == set(range(100 + threads, 100 + 3 * threads))
        gate.go.set()
        assert set(peer.ends(threads)) == set(range(100, 100 + threads))
        peer.let_go(worker.stop)


def test_the_connection_is_alive_while_all_threads_are_busy(router, peer):
    gate = Gate()
    with Worker("gate", gate, broker=router.endpoint, heartbeat=0.05, liveness=400) as worker:
        peer.ready()
        peer.send(work=[1], body=b"slow")
        assert gate.begun.acquire(timeout=TIMEOUT_SECONDS)
        for _ in range(3):
            assert router.recv()[1:] == [b"", b"MDPWX1"]
        peer.send(cancel=[1])
        while not worker._connections[0].session.held[1].cancelled:
            pass
        gate.go.set()
        peer.ends(1)
        peer.let_go(worker.stop)


def test_leaving_returns_what_has_not_begun(router, peer):
    gate = Gate()
    with Worker("gate", gate, broker=router.endpoint, concurrency=1, heartbeat=0.05, liveness=400) as worker:
        peer.ready()
        peer.send(work=[1], body=b"slow")
        assert gate.begun.acquire(timeout=TIMEOUT_SECONDS)
        worker.stop()
        assert isinstance(peer.next(), wire.Disconnect)
        peer.send(work=[2], body=b"slow")
        assert peer.next().id == 2
        assert not worker.wait(0)
        gate.go.set()
        assert peer.ends(1) == {1: b"slow"}
        peer.disconnect()
        assert worker.wait(TIMEOUT_SECONDS)


def test_a_stuck_handler_harms_no_other_request(logged):
    """Its neighbour ends at the same worker; it alone goes to another, and counts as an attempt."""
    attempts, hang, neighbour = {}, threading.Event(), threading.Event()

    def first(request: Request):
        attempts[request[0]] = request.attempt
        if request == [b"hang"]:
            hang.wait(TIMEOUT_SECONDS)
        elif request == [b"neighbour"]:
            while not neighbour.wait(0.05):
                yield b""  # a sign of life
        return b"first"

    def second(request: Request):
        attempts[request[0]] = request.attempt
        return b"second"

    with running_broker(limits=Limits(heartbeat=0.1, liveness=200)) as server:
        at = server.endpoints[0]
        settings = {"broker": at, "heartbeat": 0.1, "liveness": 200}
        with (
            Worker("job", first, concurrency=2, handler_timeout=2.0, **settings),
            Client(at, timeout=TIMEOUT_SECONDS) as client,
        ):
            neighbour_reply = client.submit("job", b"neighbour")
            hang_reply = client.submit("job", b"hang")
            assert logged("a handler has neither returned nor yielded for 2 s")
            with Worker("job", second, **settings):
                eventually(lambda: len(server.broker.directory.workers) == 2)
                neighbour.set()  # now the first worker leaves the connection
                assert hang_reply.result(TIMEOUT_SECONDS)[-1] == b"second"
                assert neighbour_reply.result(TIMEOUT_SECONDS)[-1] == b"first"
                assert attempts == {b"neighbour": 1, b"hang": 2}
            hang.set()
            assert logged("dropped a late reply")
            assert client.request("job", b"later") == [b"first"]
