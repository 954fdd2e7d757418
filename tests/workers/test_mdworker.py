"""The synchronous worker, against a real broker and real clients in this process."""

import functools
import gc
import json
import math
import signal
import threading
import time
from dataclasses import replace

import pytest
import zmq
from support.garbage import no_collector
from support.processes import TIMEOUT_SECONDS, eventually
from support.router import Router
from support.x1_broker import Peer

from zmdp.clients import Client, ServiceError
from zmdp.mdp import wire
from zmdp.mdp.limits import Limits
from zmdp.testing import running_broker
from zmdp.workers import (
    AsyncWorker,
    ClosedError,
    Request,
    SettingError,
    Worker,
    connection,
    current_request,
)
from zmdp.workers.examples import pause, repeat
from zmdp.workers.threaded import ThreadedConnection

ALL = ["X1", "0.2", "0.1"]


@pytest.fixture
def server():
    with running_broker(limits=Limits(heartbeat=0.05, liveness=400)) as server:
        yield server


@pytest.fixture
def endpoint(server):
    return server.endpoints[0]


@pytest.fixture
def client(endpoint):
    with Client(endpoint, timeout=TIMEOUT_SECONDS, retries=0) as client:
        yield client


@pytest.fixture(params=ALL)
def protocol(request):
    """What the worker speaks."""
    return request.param


def test_an_idle_worker_holds_no_request(client, endpoint, protocol):
    with no_collector():
        with Worker("take", lambda request: b"", broker=endpoint, protocol=protocol):
            client.request("take", b"a large body")
            eventually(lambda: not any(each == [b"a large body"] for each in gc.get_objects() if type(each) is Request))


def test_the_worker_as_a_decorator(client, endpoint):
    worker = Worker("upper", broker=endpoint)

    @worker
    def upper(request):
        return request[0].upper()

    assert upper([b"plain call"]) == b"PLAIN CALL"
    with worker:
        assert client.request("upper", b"abc") == [b"ABC"]


def test_the_sleep_that_is_built_in(client, endpoint):
    with Worker("sleep", pause, broker=endpoint):
        assert client.request("sleep", b"1", b"x") == [b"1", b"x"]
        for body in (b"", b"soon", b"-1", b"nan", b"1e99"):
            with pytest.raises(ServiceError, match="400: expected milliseconds from 0 to 3600000"):
                client.request("sleep", body)
        long = client.submit("sleep", b"3600000")
        eventually(lambda: json.loads(client.request("mmi.stats")[0])["running"] == 1)
        long.cancel()
        assert client.request("sleep", b"0") == [b"0"]


def test_the_guides_loop(client, endpoint, pool, protocol):
    def serve():
        reply = None
        with Worker("echo", broker=endpoint, heartbeat=0.05, liveness=400, protocol=protocol) as worker:
            for _ in range(3):
                request = worker.recv(reply)
                reply = [b"seen", *request]
            assert worker.recv(reply, timeout=0.05) is None

    served = pool.submit(serve)
    assert [client.request("echo", b"%d" % n) for n in range(3)] == [[b"seen", b"%d" % n] for n in range(3)]
    served.result()


def test_the_guides_loop_streams_and_beats_between_two_calls(client, endpoint, pool, server):
    with Worker("slow", broker=endpoint, heartbeat=0.05, liveness=400) as worker:
        parts = client.stream("slow", b"x")
        first = pool.submit(next, parts)
        assert worker.recv() == [b"x"]
        worker.send_partial(b"one")
        assert first.result() == [b"one"]
        before = server.broker.stats.heartbeats
        with Client(endpoint, timeout=TIMEOUT_SECONDS) as other:
            eventually(lambda: json.loads(other.request("mmi.stats")[0])["heartbeats"] >= before + 5)
        assert worker.recv(b"two", timeout=0.01) is None
        assert next(parts) == [b"two"]


def serve_until_ctrl_c(worker, pool, requests):
    """Answer so many requests in the Guide's loop, and press Ctrl-C while it waits for another."""

    def interrupt():
        eventually(lambda: worker._connections and worker._connections[0]._io_waits and worker.served == requests)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    reply, interrupting = None, pool.submit(interrupt)
    try:
        while (request := worker.recv(reply)) is not None:
            reply = request
    except KeyboardInterrupt:
        interrupting.result()
    else:
        pytest.fail("there was no Ctrl-C")


@pytest.mark.parametrize("requests", [0, 1])
def test_ctrl_c_ends_the_guides_loop(client, endpoint, pool, requests):
    worker = Worker("echo", broker=endpoint)
    asked = [client.submit("echo", b"x") for _ in range(requests)]
    serve_until_ctrl_c(worker, pool, requests)
    assert [future.result() for future in asked] == [[b"x"]] * requests
    pool.submit(worker.close).result(TIMEOUT_SECONDS)


def test_the_guides_loop_goes_on_after_ctrl_c(client, endpoint, pool, caplog):
    asked = client.submit("echo", b"x")
    with Worker("echo", broker=endpoint) as worker:
        serve_until_ctrl_c(worker, pool, 1)
        assert asked.result() == [b"x"]
        assert worker.recv(b"x", timeout=0.0) is None
        assert worker.served == 1
    assert "late reply" not in caplog.text


@pytest.mark.pure_only  # compiled code does not look up its own methods
def test_a_request_that_ctrl_c_kept_from_being_returned_goes_to_another(client, endpoint, pool, monkeypatch):
    begin = ThreadedConnection._begin

    def interrupted(self, now):
        if begin(self, now) is not None:
            raise KeyboardInterrupt

    asked = client.submit("echo", b"x")
    worker = Worker("echo", broker=endpoint)
    monkeypatch.setattr(ThreadedConnection, "_begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.recv()
    monkeypatch.undo()
    pool.submit(worker.close).result(TIMEOUT_SECONDS)
    with Worker("echo", repeat, broker=endpoint):
        assert asked.result() == [b"x"]


def test_the_guides_loop_without_a_thread(endpoint, monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    worker = Worker("echo", broker=endpoint)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        worker.recv(timeout=0.0)
    monkeypatch.undo()
    worker.stop()
    assert worker.wait(TIMEOUT_SECONDS)


@pytest.mark.parametrize("kind", [Worker, AsyncWorker])
def test_a_setting_that_is_misspelt(kind):
    with pytest.raises(TypeError, match=r"a worker has no setting 'concurency': did you mean concurrency\?"):
        kind("echo", concurency=3)
    with pytest.raises(TypeError, match=r"a worker has no setting 'brokers': did you mean broker\?"):
        kind("echo", brokers="tcp://127.0.0.1:5555")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"service": ""}, "not a valid service name"),
        ({"service": b"\xff"}, "not a valid service name"),
        ({"service": "mmi.mine"}, "'mmi.mine' is reserved"),
        ({"heartbeat": float("inf")}, "heartbeat is inf"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"heartbeat": 0}, "heartbeat is 0"),
        ({"liveness": 0}, "liveness is 0"),
        ({"handler_timeout": 0}, "handler_timeout is 0"),
        ({"protocol": "1"}, "protocol is '1': it must be one of X1, 0.2, 0.1"),
        ({"concurrency": "2"}, "concurrency is '2': it must be a whole number"),
        ({"heartbeat": "1"}, "heartbeat is '1': it must be a number"),
        ({"liveness": None}, "liveness is None: it must be a whole number"),
        ({"handler_timeout": "2"}, "handler_timeout is '2': it must be a number"),
        ({"name": 5}, "name is 5: it must be a text"),
    ],
)
def test_wrong_settings_are_told(settings, message):
    with pytest.raises(SettingError, match=message):
        Worker(**{"service": "echo", "handler": list, **settings})


def test_wrong_use_is_told(endpoint):
    with pytest.raises(SettingError, match="'nonsense' is not a valid endpoint"):
        Worker("echo", list, broker="nonsense").start()
    with pytest.raises(SettingError, match="'tcp://h' is not a valid endpoint: it has no port"):
        Worker("echo", list, broker="tcp://h")
    with pytest.raises(SettingError, match="has no handler"):
        Worker("echo", broker=endpoint).start()
    with Worker("echo", list, broker=endpoint) as worker:
        with pytest.raises(ClosedError, match="has a handler"):
            worker.recv()
        with pytest.raises(ClosedError, match="started only once"):
            worker.start()
    with Worker("echo", broker=endpoint) as worker, pytest.raises(ClosedError, match="no request"):
        worker.send_partial(b"x")


def test_a_copy_has_the_same_settings_and_its_own_state(endpoint):
    original = Worker(
        "double", lambda number: 2 * number, broker="tcp://127.0.0.1:1", concurrency=3, heartbeat=0.5, liveness=7,
        handler_timeout=9.0, codec="json", protocol="0.2", name="original", dialect=True,
    )  # fmt: skip
    same, other = original.copy(), original.copy(broker=endpoint)
    assert same.settings == original.settings
    assert other.settings == replace(original.settings, endpoints=[endpoint])
    with other, Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        assert client.call("double", 21) == 42
        assert other.started
        assert not original.started
    again = other.copy()
    with again, Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        assert client.call("double", 4) == 8


@pytest.mark.parametrize("protocol", ["X1", "0.2"])
def test_it_is_registered_once_the_broker_has_answered(endpoint, protocol):
    with Router() as silent, Worker("echo", list, broker=silent.endpoint, protocol=protocol) as worker:
        silent.recv()
        assert not worker.registered
    with Worker("echo", list, broker=endpoint, protocol=protocol) as worker:
        eventually(lambda: worker.registered)
    assert not worker.registered


@pytest.mark.parametrize(("delay", "told"), [(0.0, "now"), (0.04, "now"), (1.5, "in 1.5 s")])
def test_a_loss_says_when_the_worker_reconnects(endpoint, client, monkeypatch, logged, delay, told):
    with Worker("echo", list, broker=endpoint) as worker:
        assert client.request("echo", b"x") == [b"x"]
        (served,) = worker._connections
        with served._lock:
            served.session.lose("a test", 0.0, wait=False)
            served.session.failover.retry_at = delay
            served.flush(0.0)
        assert logged(f"echo: a test; reconnecting to {endpoint} {told}")
        with served._lock:
            served.session.failover.retry_at = 0.0
        served.wake()


def test_a_worker_that_is_refused_waits_before_it_tries_again(logged):
    with running_broker(limits=Limits(max_workers=1)) as server:
        at = server.endpoints[0]
        with Worker("echo", list, broker=at) as _, Client(at, timeout=TIMEOUT_SECONDS) as client:
            eventually(lambda: client.available("echo"))
            with Worker("echo", list, broker=at):
                assert logged("too-many-workers")
                assert logged(f"reconnecting to {at} in ")


def test_a_terminated_context_ends_a_worker(endpoint):
    context = zmq.Context()
    worker = Worker("echo", list, broker=endpoint, context=context)
    worker.start()
    context.term()
    assert worker.wait(timeout=TIMEOUT_SECONDS)


def test_a_worker_that_cannot_open_a_socket_tries_again(endpoint, client, monkeypatch, logged):
    with Worker("echo", list, broker=endpoint) as worker:
        assert client.request("echo", b"x") == [b"x"]

        def fail(*arguments):
            monkeypatch.undo()
            raise zmq.ZMQError(24)

        monkeypatch.setattr(connection, "MonitoredDealer", fail)
        (served,) = worker._connections
        with served._lock:
            served.session.lose("a test", 0.0, wait=False)
        served.wake()
        assert logged("Too many open files")
        assert client.request("echo", b"x") == [b"x"]


def test_a_worker_sleeps_until_it_connects_again(endpoint, monkeypatch):
    with Worker("echo", broker=endpoint) as worker:
        assert worker.recv(timeout=0.01) is None
        (served,) = worker._connections
        steps, step = [], type(served)._step
        monkeypatch.setattr(type(served), "_step", lambda self, now: (steps.append(now), step(self, now))[1])
        with served._lock:
            served.session.lose("a test", time.monotonic())
            served.session.failover.retry_at = math.inf
        assert worker.recv(timeout=0.1) is None
        assert len(steps) < 100


# ── what a handler knows of its request ──────────────────────────────────────────────────────────────────────────────


def test_the_current_request(client, endpoint, protocol):
    """In functions, in generators, and in each thread its own."""
    together = threading.Barrier(2, timeout=TIMEOUT_SECONDS)

    def function(value):
        together.wait()
        request = current_request()
        together.wait()
        return [value, request.service, json.loads(request[0])]

    def generator(value):
        yield current_request().service
        yield json.loads(current_request()[0])
        return json.loads(current_request()[0])

    with (
        Worker("function", function, broker=endpoint, concurrency=2, codec="json", protocol=protocol),
        Worker("generator", generator, broker=endpoint, codec="json", protocol=protocol),
    ):
        both = [client.submit("function", b"%d" % number) for number in range(2)]
        assert sorted(json.loads(f.result(TIMEOUT_SECONDS)[0]) for f in both) == [
            [0, "function", 0],
            [1, "function", 1],
        ]
        assert client.request("generator", b"7") == [b'"generator"', b"7", b"7"]
    with pytest.raises(LookupError):
        current_request()


# ── cancelling ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_generator_is_closed_when_a_part_cannot_be_sent(client, endpoint, caplog):
    """At once and within its request, even if the log keeps the traceback, and with it the generator."""
    closed_in = []

    def wrong(request):
        try:
            yield 5
        finally:
            closed_in.append(current_request())

    with Worker("wrong", wrong, broker=endpoint):
        with pytest.raises(ServiceError, match="a handler returned 5"):
            client.request("wrong", b"x")
        assert closed_in == [[b"x"]]
    assert any(record.exc_info for record in caplog.records)


# ── failures and codecs ──────────────────────────────────────────────────────────────────────────────────────────────


class Reversing:
    """A codec of one's own, for texts."""

    def encode(self, value):
        return [value[::-1].encode(), b"reversed"]

    def decode(self, frames):
        text, _ = frames
        return text.decode()[::-1]


def test_a_codec_of_ones_own(client, endpoint):
    with Worker("upper", str.upper, broker=endpoint, codec=Reversing()):
        assert client.call("upper", "abc", codec=Reversing()) == "ABC"
        assert client.request("upper", b"cba", b"") == [b"CBA", b"reversed"]


# ── brokers that come and go ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_says_whether_there_is_a_broker(protocol, tmp_path, logged, caplog):
    at = f"ipc://{tmp_path}/broker"
    with Worker("echo", list, broker=at, protocol=protocol, concurrency=2):
        nothing = f"nothing is listening there. Is the broker running? `mdp-broker --bind {at}` starts one"
        assert logged(f"echo: waiting for a broker at {at}: {nothing}")
        with running_broker(at):
            assert logged(f"echo: serving at {at}")
    said = [each.levelname for each in caplog.records if each.message.startswith(("echo: waiting", "echo: serving"))]
    assert said[:2] == ["WARNING", "INFO"]  # the first failure only, and of one connection
    assert "WARNING" not in said[2:]


def test_a_worker_in_the_process_of_its_broker_says_that_it_serves(logged):
    context = zmq.Context()
    at = "inproc://broker"  # has no events
    with running_broker(at, context=context, limits=Limits(heartbeat=0.05, liveness=400)):
        with Worker("echo", list, broker=at, context=context):
            assert logged("echo: serving at inproc://broker")
    context.term()


def test_a_broker_that_takes_nothing(endpoint, logged):
    """It listens, and reads nothing: the worker gives it up, and does not wait for ever."""
    taken, ended = threading.Event(), threading.Event()

    def endless(request):
        taken.set()
        try:
            while True:
                yield b"x" * 100_000
        finally:
            ended.set()

    with Router() as blocked, Worker("endless", endless, broker=blocked.endpoint, heartbeat=0.05, liveness=10):
        peer = Peer(blocked)

        def gets_a_request():
            if isinstance(peer.next(), wire.Ready):  # it may have given up the connection before
                peer.send(work=[1])
            return taken.wait(0.1)

        eventually(gets_a_request)
        assert logged("connecting to")
        assert ended.wait(TIMEOUT_SECONDS)


def test_what_is_not_a_service_or_a_handler_is_named():
    def shout(request):
        return request

    hint = r"a service is <function .*>: it must be named by a text, such as 'echo': put the name first, as in Worker"
    with pytest.raises(SettingError, match=rf"{hint}\('shout', shout\)"):
        Worker(shout)
    for service in (None, 5):
        with pytest.raises(SettingError, match=f"a service is {service}: it must be named by a text"):
            Worker(service)
    with pytest.raises(SettingError, match="the handler of 'echo' is b'hello': it must be a function of a request"):
        Worker("echo", b"hello")


def test_a_worker_has_one_handler():
    worker = Worker("double")

    @worker
    def double(request):
        return request * 2

    with pytest.raises(SettingError, match=r"the worker of 'double' has the handler .*double: make another worker"):

        @worker
        def triple(request):
            return request * 3


def test_handlers_for_asyncio_are_refused():
    async def coroutine(request):
        return request

    async def generator(request):
        yield request

    class Called:
        async def __call__(self, request):
            return request

    for handler in (coroutine, generator, functools.partial(coroutine), Called(), functools.partial(Called())):
        with pytest.raises(SettingError, match="the handler of 'x' is for asyncio: it needs an AsyncWorker"):
            Worker("x", handler)
        with pytest.raises(SettingError, match="AsyncWorker"):
            Worker("x")(handler)
