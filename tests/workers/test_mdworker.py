"""The synchronous worker, against a real broker and real clients in this process."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from zmdp.clients import Client, ServiceError, StreamInterrupted
from zmdp.mdp.limits import Limits
from zmdp.mdp.testing import running_broker
from zmdp.workers import ClosedError, Request, SettingError, Worker, echo


@pytest.fixture
def server():
    with running_broker(limits=Limits(heartbeat=0.05, liveness=20)) as server:
        yield server


@pytest.fixture
def endpoint(server):
    return server.endpoints[0]


@pytest.fixture
def client(endpoint):
    with Client(endpoint, timeout=20, retries=0) as client:
        yield client


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_a_handler_gets_a_request_that_is_its_frames(client, endpoint):
    seen = []
    with Worker("look", seen.append, broker=endpoint):
        client.request("look", b"a", b"b")
    (request,) = seen
    assert (request, type(request), request.service) == ([b"a", b"b"], Request, "look")


def test_the_worker_as_a_decorator(client, endpoint):
    worker = Worker("upper", broker=endpoint)

    @worker
    def upper(request):
        return request[0].upper()

    assert upper([b"plain call"]) == b"PLAIN CALL"
    with worker:
        assert client.request("upper", b"abc") == [b"ABC"]


def test_the_echo_that_is_built_in(client, endpoint):
    with Worker("echo", echo.echo, broker=endpoint):
        assert client.request("echo", b"a", b"") == [b"a", b""]


@pytest.mark.parametrize(
    ("handler", "told"),
    [
        (lambda request: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda request: sys.exit(3), "SystemExit: 3"),
        (lambda request: "text", "HandlerError: a handler gave 'text': it takes bytes, a list of bytes, or None"),
        (lambda request: [b"x", "y"], "HandlerError"),
        (lambda request: exec("raise ValueError('x' * 10000)"), "ValueError: xxx"),
    ],
)
def test_a_handler_that_fails_is_told_and_logged_and_the_worker_goes_on(client, endpoint, handler, told, logged):
    with Worker("fail", handler, broker=endpoint):
        for _ in range(3):
            with pytest.raises(ServiceError) as caught:
                client.request("fail", b"x")
            assert told in caught.value.text
            assert len(caught.value.text) <= 1000
        assert logged("fail: the handler failed")


def test_a_stuck_handler_is_reported_and_its_request_goes_to_another(client, endpoint, pool, logged):
    stuck, go_on = threading.Event(), threading.Event()

    def hang(request):
        stuck.set()
        assert go_on.wait(30)
        return b"late"

    bad = Worker("job", hang, broker=endpoint, heartbeat=0.05, liveness=20, handler_timeout=0.2)
    with bad:
        reply = pool.submit(client.request, "job", b"x")
        assert stuck.wait(10)
        with Worker("job", lambda request: b"from the other", broker=endpoint):
            assert reply.result() == [b"from the other"]
            assert logged("the handler has not come back after 0.2 s")
            go_on.set()
            assert logged("a reply came too late")
            # It is of use again: with the other gone it serves.
        with Client(endpoint, timeout=20) as another:
            assert another.request("job", b"y") == [b"late"]


def test_a_handler_that_yields_is_not_stuck(client, endpoint, logged):
    def slow_but_alive(request):
        for number in range(6):
            threading.Event().wait(0.1)
            yield b"%d" % number

    with Worker("slow", slow_but_alive, broker=endpoint, heartbeat=0.05, handler_timeout=0.5):
        assert len(list(client.stream("slow"))) == 7
    assert not logged("has not come back", timeout=0)


def test_so_many_at_a_time(client, endpoint, pool):
    together = threading.Barrier(3, timeout=10)
    with Worker("meet", lambda request: b"%d" % together.wait(), broker=endpoint, concurrency=3):
        clients = [Client(endpoint, timeout=20) for _ in range(3)]
        replies = [pool.submit(each.request, "meet", b"x") for each in clients]
        assert sorted(reply.result()[0] for reply in replies) == [b"0", b"1", b"2"]
        for each in clients:
            each.close()


def test_stop_finishes_what_is_worked_on(client, endpoint, pool):
    taken, go_on = threading.Event(), threading.Event()

    def slow(request):
        taken.set()
        assert go_on.wait(10)
        return b"done"

    worker = Worker("slow", slow, broker=endpoint)
    running = pool.submit(worker.run)
    reply = pool.submit(client.request, "slow", b"x")
    assert taken.wait(10)
    worker.stop()
    assert not worker.wait(timeout=0.05)
    go_on.set()
    assert reply.result() == [b"done"]
    running.result()
    with Client(endpoint, timeout=10) as other:
        assert other.request("mmi.service", b"slow") == [b"404"]


def test_a_stream_whose_request_was_lost_is_broken_off(client, endpoint, server, pool, logged):
    closed, go_on = threading.Event(), threading.Event()

    def endless(request):
        try:
            yield b"first"
            assert go_on.wait(10)
            while True:
                yield b"more"
        finally:
            closed.set()

    with Worker("endless", endless, broker=endpoint, heartbeat=0.05, liveness=20, handler_timeout=0.2):
        parts = client.stream("endless", timeout=2)
        next(parts)
        assert logged("has not come back")
        go_on.set()
        assert closed.wait(10)  # the generator is closed, not run for nobody
        with pytest.raises(StreamInterrupted):  # after a PARTIAL no other worker gets it
            next(parts)


def test_the_guides_loop(client, endpoint, pool):
    def serve():
        reply = None
        with Worker("echo", broker=endpoint, heartbeat=0.05) as worker:
            for _ in range(3):
                request = worker.recv(reply)
                reply = [b"seen", *request]
            assert worker.recv(reply, timeout=0.05) is None

    served = pool.submit(serve)
    assert [client.request("echo", b"%d" % n) for n in range(3)] == [[b"seen", b"%d" % n] for n in range(3)]
    served.result()


def test_the_guides_loop_streams_and_beats_between_two_calls(client, endpoint, pool, server):
    with Worker("slow", broker=endpoint, heartbeat=0.05, liveness=20) as worker:
        parts = client.stream("slow", b"x")
        first = pool.submit(next, parts)
        assert worker.recv() == [b"x"]
        worker.send_partial(b"one")
        assert first.result() == [b"one"]
        before = server.broker.stats.heartbeats
        with Client(endpoint, timeout=10) as other:
            while json.loads(other.request("mmi.stats")[0])["heartbeats"] < before + 5:
                pass
        assert worker.recv(b"two", timeout=0.01) is None
        assert next(parts) == [b"two"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"service": ""}, "no service name"),
        ({"service": b"\xff"}, "no service name"),
        ({"service": "mmi.mine"}, "'mmi.mine' is reserved"),
        ({"heartbeat": float("inf")}, "heartbeat is inf"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"heartbeat": 0}, "heartbeat is 0"),
        ({"liveness": 0}, "liveness is 0"),
        ({"handler_timeout": 0}, "handler_timeout is 0"),
        ({"protocol": "1"}, "protocol is '1': it is one of 0.2, 0.1"),
    ],
)
def test_wrong_settings_are_told(settings, message):
    with pytest.raises(SettingError, match=message):
        Worker(**{"service": "echo", "handler": list, **settings})


def test_wrong_use_is_told(endpoint):
    with pytest.raises(SettingError, match="'nonsense' is no endpoint"):
        Worker("echo", list, broker="nonsense").start()
    with pytest.raises(SettingError, match="has no handler"):
        Worker("echo", broker=endpoint).start()
    with Worker("echo", list, broker=endpoint) as worker:
        with pytest.raises(ClosedError, match="has a handler"):
            worker.recv()
        with pytest.raises(ClosedError, match="is running"):
            worker.start()
    with Worker("echo", broker=endpoint) as worker, pytest.raises(ClosedError, match="no request"):
        worker.send_partial(b"x")


def test_a_worker_that_is_refused_waits_before_it_tries_again(logged):
    with running_broker(limits=Limits(max_workers=1)) as server:
        at = server.endpoints[0]
        with Worker("echo", list, broker=at) as _, Client(at, timeout=10) as client:
            while not client.available("echo"):
                pass
            with Worker("echo", list, broker=at):
                assert logged("connecting to")
                assert logged("disconnected worker")
            assert server.broker.stats.disconnected["too-many-workers"] == 1


@pytest.mark.parametrize("result", [b"x" * (64 << 20), [b"x"] * 1100], ids=["bytes", "frames"])
def test_a_reply_that_no_broker_takes_is_the_handlers_failure(client, endpoint, result):
    with Worker("big", lambda request: result, broker=endpoint):
        for _ in range(2):
            with pytest.raises(ServiceError, match="a reply may have 67088864 in 1004"):
                client.request("big")


def test_a_reply_that_this_broker_does_not_take_costs_the_worker_nothing():
    with running_broker(limits=Limits(max_message=100_000, heartbeat=0.05, liveness=10)) as server:
        at = server.endpoints[0]
        with Worker("big", lambda request: b"x" * int(request[0]), broker=at), Client(at, timeout=10) as client:
            with pytest.raises(TimeoutError):
                client.request("big", b"150000", timeout=0.3, retries=0)
            assert client.request("big", b"5") == [b"xxxxx"]
            assert server.broker.stats.dropped == {"reply-too-large": 1}


def test_the_guides_loop_beats_when_nobody_waits(endpoint, server):
    with Worker("slow", broker=endpoint, heartbeat=0.05, liveness=20) as worker, Client(endpoint, timeout=20) as client:
        assert worker.recv(timeout=0.01) is None
        before = server.broker.stats.heartbeats
        while server.broker.stats.heartbeats < before + 5:
            client.available("slow")
        client.send("slow", b"x")
        while not server.broker.registry.running:
            pass
        assert worker.recv() == [b"x"]
        worker.recv(b"done", timeout=0.01)
        assert client.recv() == [b"done"]


def test_a_terminated_context_ends_a_worker(endpoint):
    context = zmq.Context()
    worker = Worker("echo", list, broker=endpoint, context=context)
    worker.start()
    context.term()
    assert worker.wait(timeout=10)


def test_a_worker_that_cannot_open_a_socket_tries_again(endpoint, client, monkeypatch, logged):
    with Worker("echo", list, broker=endpoint) as worker:
        while not client.available("echo"):
            pass
        opened = type(worker._connections[0])._open

        def fail(connection):
            monkeypatch.setattr(type(connection), "_open", opened)
            raise zmq.ZMQError(24)

        monkeypatch.setattr(type(worker._connections[0]), "_open", fail)
        worker._connections[0]._session.lose("a test", 0.0, wait=False)
        assert logged("Too many open files")
        assert client.request("echo", b"x", timeout=10) == [b"x"]
