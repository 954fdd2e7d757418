"""The synchronous client, against a real broker and real workers in this process."""

import gc
import json
import logging
import signal
import socket
import sys
import threading
from contextlib import contextmanager, suppress
from itertools import count as count_up

import pytest
import zmq
from support.garbage import no_collector
from support.processes import TIMEOUT_SECONDS, eventually, eventually_raises
from support.router import Router

from zmdp.clients import (
    BrokerUnreachable,
    BusyError,
    Client,
    ClosedError,
    CodecError,
    RequestError,
    RequestRejected,
    RequestTimeout,
    ServiceError,
    ServiceNotFound,
    SettingError,
    StreamInterrupted,
)
from zmdp.clients.legacy import session as legacy_session
from zmdp.clients.x1.broker_connection import Call
from zmdp.testing import running_broker
from zmdp.workers import Worker

ALL = ["X1", "0.2", "0.1"]
NOBODY = "tcp://127.0.0.1:1"


@pytest.fixture(params=ALL)
def client(request, endpoint):
    """A client of each protocol."""
    with Client(endpoint, timeout=TIMEOUT_SECONDS, protocol=request.param) as client:
        yield client


@pytest.fixture
def x1(endpoint):
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        yield client


@pytest.fixture(params=["0.2", "0.1"])
def old(request, endpoint):
    """A client of each legacy protocol."""
    with Client(endpoint, timeout=TIMEOUT_SECONDS, protocol=request.param) as client:
        yield client


# ── whatever the protocol ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_reply_is_a_list_of_frames(client):
    reply = client.request("echo", b"a", bytearray(b"b"), memoryview(b"c"))
    assert (reply, reply.service, reply.final) == ([b"a", b"b", b"c"], "echo", True)


def test_values(client):
    assert client.call("sum", [1, 2, 3]) == 6
    assert client.call("sum", [1, 2, 3], codec="json", timeout=TIMEOUT_SECONDS) == 6
    with pytest.raises(CodecError, match="cannot be sent as json"):
        client.call("sum", object())
    with pytest.raises(CodecError, match="cannot be read as msgpack"):
        client.call("count", codec="msgpack")  # it replies with what is no MessagePack


def test_whether_a_service_is_available(client):
    assert client.available("echo")
    assert not client.available("nobody")


def test_send_and_recv_pipeline(client):
    for number in range(2000):
        client.send("echo", b"%d" % number)
    assert {client.recv()[0] for _ in range(2000)} == {b"%d" % number for number in range(2000)}
    with pytest.raises(BusyError, match="nothing was sent"):
        client.recv()
    assert client.request("echo", b"x") == [b"x"]


def test_recv_tells_partials_from_finals(client):
    client.send("count")
    parts = [client.recv()]
    while not parts[-1].final:
        parts.append(client.recv())
    assert [frame for part in parts for frame in part] == [b"0", b"1", b"2", b"end"]


def test_recv_times_out_and_can_be_called_again(client):
    client.send("nobody", b"x")
    with pytest.raises(RequestTimeout, match="outstanding requests: 1"):
        client.recv(timeout=0.05)
    client.reset()
    with pytest.raises(BusyError, match="nothing was sent"):
        client.recv()


def test_recv_raises_what_a_handler_raised(client):
    client.send("fail.0.2", b"x")
    with pytest.raises(ServiceError, match="no good"):
        client.recv()


@pytest.mark.parametrize("protocol", ALL)
@pytest.mark.parametrize("at", [NOBODY, "ipc:///nowhere/at/all"])
def test_broker_unreachable_says_that_nobody_listens(at, protocol):
    with Client(at, timeout=0.1, retries=0, protocol=protocol) as client:
        raised = eventually_raises(BrokerUnreachable, "nothing is listening there", lambda: client.request("echo"))
    assert isinstance(raised, TimeoutError)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.request("echo", "text"), "frame 0 is of type str: a frame is bytes"),
        (lambda c: c.request("echo", b"x", None), "frame 1 is of type NoneType"),
        (lambda c: c.request(""), "'' is not a valid service name"),
        (lambda c: c.request("a\nb"), "not a valid service name"),
        (lambda c: c.request(b"\xff"), "not a valid service name"),
        (lambda c: c.request("x" * 256), "not a valid service name"),
        (lambda c: c.request("echo", timeout=0), "timeout is 0: it must be a number of seconds above 0"),
        (lambda c: c.request("echo", timeout=float("inf")), "timeout is inf"),
        (lambda c: c.request("echo", retries=-1), "retries is -1: it must be a whole number, 0 or more"),
        (lambda c: c.call("echo", codec="pickle"), "codec is 'pickle': it must be one of json, msgpack, arrow"),
        (lambda c: Client(codec=None), "codec is None"),
        (lambda c: c.request(None), "a service is None: it must be named by a text, such as 'echo'"),
        (lambda c: c.request(5), "a service is 5: it must be named by a text"),
        (lambda c: Client(heartbeat="1"), "heartbeat is '1': it must be a number"),
        (lambda c: Client(liveness=2.5), "liveness is 2.5: it must be a whole number"),
        (lambda c: Client([]), "broker is empty"),
        (lambda c: Client(5), "broker is 5"),
        (lambda c: Client(b"tcp://127.0.0.1:5555"), "broker is b'tcp"),
        (lambda c: Client("nonsense"), "'nonsense' is not a valid endpoint"),
        (lambda c: Client("tcp://h:99999"), "'tcp://h:99999' is not a valid endpoint: its port is '99999'"),
        (lambda c: Client(protocol="3"), "protocol is '3': it must be one of X1, 0.2, 0.1"),
    ],
)
def test_invalid_arguments(client, call, message):
    with pytest.raises(SettingError, match=message):
        call(client)
    assert client.request("echo", b"x") == [b"x"]


@pytest.mark.parametrize("protocol", ALL)
def test_a_client_opens_one_connection(server, endpoint, protocol):
    """A broker would log others, over which nothing follows, as handshakes that failed."""
    before = server.connections.counts["accepted"]
    with Client([endpoint, NOBODY], timeout=TIMEOUT_SECONDS, protocol=protocol) as client:
        for _ in range(2):
            assert client.request("echo", b"x") == [b"x"]
    assert server.connections.counts["accepted"] == before + 1


@pytest.mark.parametrize("protocol", ALL)
def test_a_closed_client_says_so(endpoint, protocol):
    client = Client(endpoint, timeout=TIMEOUT_SECONDS, protocol=protocol)
    client.close()
    client.close()
    for use in (
        lambda: client.request("echo"),
        lambda: next(client.stream("echo")),
        lambda: client.send("echo"),
        lambda: client.available("echo"),
    ):
        with pytest.raises(ClosedError, match="was closed"):
            use()


@pytest.mark.parametrize("protocol", ALL)
def test_through_inproc_and_ipc_with_one_context(tmp_path, protocol):
    context = zmq.Context()
    binds = ("inproc://broker", f"ipc://{tmp_path}/broker")
    with running_broker(*binds, context=context) as server:
        assert server.endpoints == list(binds)
        with (
            Worker("echo", list, broker=binds[0], context=context),
            Client(binds[0], timeout=TIMEOUT_SECONDS, context=context, protocol=protocol) as near,
            Client(binds[1], timeout=TIMEOUT_SECONDS, context=context, protocol=protocol) as far,
        ):
            assert (near.request("echo", b"x"), far.request("echo", b"y")) == ([b"x"], [b"y"])
    context.term()


# ── 0.2 and 0.1: one request at a time, sent again after a silence ───────────────────────────────────────────────────


def test_each_outstanding_request_has_a_connection_of_its_own(old, holding, pool):
    """C4: so requests of many threads do not disturb each other."""
    old.send("nobody")
    assert old.request("echo", b"x") == [b"x"]
    asked = [pool.submit(old.request, "echo", b"%d" % number) for number in range(20)]
    futures = [old.submit("echo", b"%d" % number) for number in range(20)]
    expected = [[b"%d" % number] for number in range(20)]
    assert [each.result(TIMEOUT_SECONDS) for each in asked] == expected
    assert [each.result(TIMEOUT_SECONDS) for each in futures] == expected
    parts = old.stream("count")
    assert next(parts)[0] == b"0"
    assert old.request("echo", b"y") == [b"y"]


def test_the_largest_float_is_a_timeout(client):
    for timeout in (sys.float_info.max, 10**400):
        assert client.request("echo", b"x", timeout=timeout) == [b"x"]
        assert list(client.stream("echo", b"x", timeout=timeout)) == [[b"x"]]


def test_parts_that_are_collected_without_end_end_the_request(endpoint, monkeypatch):
    monkeypatch.setattr(legacy_session, "MAX_REPLY_BYTES", 1)
    with Client(endpoint, timeout=TIMEOUT_SECONDS, protocol="0.2") as client:
        for _ in range(2):
            with pytest.raises(RequestRejected, match="the parts of the reply of service 'count' exceed 1 bytes"):
                client.request("count")
        assert client.request("echo", b"x") == [b"x"]


def test_legacy_protocols_refuse_what_only_x1_can_carry(old):
    for settings in ({"wait": False}, {"headers": {"a": "b"}}, {"options": {"key": 1}}):
        with pytest.raises(SettingError, match="require protocol X1"):
            old.request("echo", **settings)
        with pytest.raises(SettingError, match="require protocol X1"):
            old.stream("echo", **settings)
    with pytest.raises(SettingError, match="require protocol X1"):
        old.stream("echo", deadline=1)
    with pytest.raises(SettingError, match="require protocol X1"):
        old.submit("echo", wait=False)
    assert old.request("echo", b"x", headers={}, options={}) == [b"x"]


def test_a_failure_of_an_x1_worker_is_not_reported(old, server):
    before = server.broker.stats.dropped["handler-failed"]
    with pytest.raises(RequestTimeout):
        old.request("fail", timeout=0.2, retries=0)
    eventually(lambda: server.broker.stats.dropped["handler-failed"] == before + 1)


# ── X1: what travels with a request, and what it can end with ────────────────────────────────────────────────────────


def test_headers_and_options_reach_the_handler(x1):
    (found,) = x1.request("look", headers={"tenant": "größer"}, options={"precision": 2, "deep": [{"er": None}]})
    assert json.loads(found)["headers"] == {"tenant": "größer"}
    assert json.loads(found)["options"] == {"precision": 2, "deep": [{"er": None}]}
    (part,) = x1.stream("look", headers={"a": "b"}, options={"c": "d"})
    assert json.loads(part[0])["headers"] == {"a": "b"}
    assert json.loads(part[0])["options"] == {"c": "d"}


def test_timeout_and_retries_make_the_ttl(x1):
    left = [json.loads(x1.request("look", timeout=100, retries=retries)[0])["left"] for retries in (0, 2)]
    assert 0 < left[0] < 100.01  # it travels in whole milliseconds
    assert 100.01 < left[1] < 300.01
    assert 0 < json.loads(x1.submit("look", timeout=100).result()[0])["left"] < 300.01


def test_a_stream_has_a_deadline_only_if_it_is_given_one(x1):
    ((without,),) = x1.stream("look", timeout=100)
    ((given,),) = x1.stream("look", timeout=100, deadline=1000)
    assert json.loads(without)["left"] is None
    assert 100.01 < json.loads(given)["left"] < 1000.01


def test_without_wait_it_fails_at_once_if_nobody_offers_the_service(x1):
    for ask in (
        lambda: x1.request("nobody", wait=False),
        lambda: next(x1.stream("nobody", wait=False)),
        lambda: x1.submit("nobody", wait=False).result(),
        lambda: x1.call("nobody", wait=False),
    ):
        with pytest.raises(ServiceNotFound, match="nobody") as caught:
            ask()
        assert (caught.value.code, caught.value.service) == (404, "nobody")
    assert x1.request("echo", b"x", wait=False) == [b"x"]


def test_values_in_a_stream(x1):
    assert list(x1.call_stream("numbers", 3)) == [0, 1, 2]
    assert x1.call("numbers", 3) is None
    values = x1.call_stream("numbers", 1000)
    assert next(values) == 0
    values.close()
    with pytest.raises(RequestRejected, match="cannot be read as json") as caught:
        x1.request("sum", b"{")
    assert caught.value.code == 400


@pytest.mark.parametrize(
    "ask",
    [
        lambda client, body: client.request("echo", body),
        lambda client, body: client.submit("echo", body).result(TIMEOUT_SECONDS),
        lambda client, body: client.submit("echo", body).add_done_callback(repr),
        lambda client, body: list(client.stream("count", body)),
        lambda client, body: (client.send("echo", body), client.recv()),
        lambda client, body: client.request("fail", body),
        lambda client, body: client.submit("fail", body).result(TIMEOUT_SECONDS),
        lambda client, body: list(client.stream("fail.late", body)),
        lambda client, body: (client.send("fail", body), client.recv()),
    ],
    ids=[
        "request", "submit", "callback", "stream", "send", "failing request", "failing submit", "failing stream",
        "failing send",
    ],
)  # fmt: skip
def test_nothing_is_left_of_a_request(x1, ask):
    """Its bodies may be large: they are freed with the last reference, without the garbage collector."""
    body = b"nothing is left of this"
    with no_collector():
        with suppress(RequestError):
            ask(x1, body)
        eventually(lambda: not any(type(each) is Call and body in each.body for each in gc.get_objects()))


# ── X1: many at once ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_requests_within_a_stream(x1):
    seen = []
    for part in x1.stream("count"):
        seen += part + x1.request("echo", b"within")
        with pytest.raises(ServiceError):
            x1.request("fail")
    assert seen == [b"0", b"within", b"1", b"within", b"2", b"within", b"end", b"within"]


def test_threads_that_send_and_recv(x1, pool):
    for number in range(400):
        x1.send("echo", b"%d" % number)
    takers = [pool.submit(lambda: [x1.recv()[0] for _ in range(100)]) for _ in range(4)]
    assert sorted(int(one) for taker in takers for one in taker.result()) == list(range(400))


def test_send_and_recv_do_not_disturb_requests(x1, holding):
    x1.send("hold", b"held")
    x1.send("count")
    assert x1.request("echo", b"x") == [b"x"]
    assert [x1.recv() for _ in range(4)] == [[b"0"], [b"1"], [b"2"], [b"end"]]
    holding.let_go()
    assert x1.recv() == [b"held"]


def test_reset_cancels(x1, holding):
    x1.send("hold")
    holding.wait_taken()
    x1.reset()
    holding.wait_cancelled()
    with pytest.raises(BusyError):
        x1.recv()


def test_max_outstanding_is_respected(endpoint, pool):
    guard, active, most = threading.Lock(), [0], [0]

    def work(request):
        with guard:
            active[0] += 1
            most[0] = max(most[0], active[0])
        threading.Event().wait(0.005)
        with guard:
            active[0] -= 1
        return request

    with (
        Worker("work", work, broker=endpoint, concurrency=6),
        Client(endpoint, timeout=TIMEOUT_SECONDS, max_outstanding=2) as few,
    ):
        replies = [pool.submit(few.request, "work", b"%d" % number) for number in range(30)]
        assert [reply.result() for reply in replies] == [[b"%d" % number] for number in range(30)]
        assert [few.submit("work").result(TIMEOUT_SECONDS) for _ in range(10)] == [[b""]] * 10
        for _ in range(5):
            few.send("work")  # each waits for a place
        assert [few.recv() for _ in range(5)] == [[b""]] * 5
    assert most[0] == 2


# ── X1: futures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_callback_may_close_the_client(endpoint, holding):
    client = Client(endpoint, timeout=TIMEOUT_SECONDS)
    held, closed = client.submit("hold"), threading.Event()
    holding.wait_taken()

    def close(future):
        client.close()
        closed.set()

    client.submit("echo").add_done_callback(close)
    assert closed.wait(TIMEOUT_SECONDS)
    assert isinstance(held.exception(TIMEOUT_SECONDS), ClosedError)
    holding.wait_cancelled()


# ── X1: the end of a client ──────────────────────────────────────────────────────────────────────────────────────────


def test_close_ends_every_outstanding_request(endpoint, begun, holding, pool):
    client = Client(endpoint, timeout=TIMEOUT_SECONDS)
    futures = [client.submit("hold") for _ in range(3)]
    client.send("hold")
    parts = client.stream(begun)
    next(parts)
    waiting = [
        pool.submit(client.request, "hold"),
        pool.submit(next, client.stream("hold")),
        pool.submit(client.recv),
        pool.submit(client.request, "nobody"),
    ]
    holding.wait_taken(6)
    client.close()
    for each in (*futures, *waiting):
        assert isinstance(each.exception(TIMEOUT_SECONDS), ClosedError)
    with pytest.raises(ClosedError):
        for _ in parts:
            pass
    holding.wait_cancelled(6)
    for use in (lambda: client.submit("echo"), client.recv):
        with pytest.raises(ClosedError):
            use()
    client.reset()


def test_ctrl_c_while_waiting(x1, holding):
    """The request is cancelled, and the client remains usable, also for other threads."""
    other = x1.submit("hold", b"other")

    def interrupt():
        holding.wait_taken(2)
        while not interrupted.wait(0.05):  # Python may be just about to sleep: then it does not notice
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupted = threading.Event()
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        x1.request("hold", b"interrupted")
    except KeyboardInterrupt:
        interrupted.set()
    interrupting.join()
    holding.wait_cancelled()
    assert holding.cancelled == [[b"interrupted"]]
    assert x1.request("echo", b"x") == [b"x"]
    holding.let_go()
    assert other.result(TIMEOUT_SECONDS) == [b"other"]


# ── X1: streams that are read slowly ─────────────────────────────────────────────────────────────────────────────────


def until_interrupted(take):
    """Return how many parts of the flood are taken before it ends because it is read too slowly."""
    for taken in count_up():
        try:
            assert take() == [b"x" * 100]
        except StreamInterrupted as error:
            assert "arrives faster than it is read" in str(error)  # noqa: PT017 - that it comes is what counts the parts
            return taken
    raise AssertionError


def test_replies_to_send_that_are_received_too_slowly(x1, monkeypatch):
    monkeypatch.setattr("zmdp.clients.calls.reply.MAX_UNREAD_BYTES", 10_000)
    x1.send("flood", b"200")
    x1.request("flood", b"0")
    x1.send("echo", b"another's")
    x1.request("echo")
    assert 0 < until_interrupted(x1.recv) <= 100
    assert x1.recv() == [b"another's"]
    with pytest.raises(BusyError):
        x1.recv()
    x1.send("flood", b"2")
    assert [x1.recv().final for _ in range(3)] == [False, False, True]


# ── X1: connections that are lost ────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def silent_listener(answer=None):
    """The endpoint of a TCP server that does not speak ZeroMQ: it is silent, or sends `answer` and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(answer)

        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def test_a_server_that_does_not_speak_x1():
    with Router() as other, Client(other.endpoint, timeout=0.5, retries=0, heartbeat=0.05, liveness=2) as client:
        text = r"silent for 0\.1 s; if it is not zmdp's broker, try protocol 0\.2"
        eventually_raises(BrokerUnreachable, text, lambda: client.request("echo"))
        future = client.submit("echo")
        assert isinstance(future.exception(TIMEOUT_SECONDS), BrokerUnreachable)


def test_a_server_that_does_not_speak_zeromq():
    with silent_listener() as at, Client(at, timeout=0.5, retries=0, heartbeat=0.05, liveness=2) as client:
        text = r"if it is not zmdp's broker, try protocol 0\.2"
        eventually_raises(BrokerUnreachable, text, lambda: client.request("echo"))
    with silent_listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as at, Client(at, timeout=0.5, retries=0) as client:
        text = "is it a broker"
        eventually_raises(BrokerUnreachable, text, lambda: client.request("echo"))


def test_a_client_may_be_created_before_its_broker():
    with Router() as here:
        at = here.endpoint
    with Client(at, timeout=TIMEOUT_SECONDS) as client:
        future = client.submit("echo", b"x")
        with running_broker(at), Worker("echo", list, broker=at):
            assert future.result(TIMEOUT_SECONDS) == [b"x"]


def test_a_client_that_cannot_open_a_socket_tries_again(monkeypatch, endpoint):
    with Router() as dying:
        client = Client([dying.endpoint, endpoint], timeout=TIMEOUT_SECONDS)
        future = client.submit("echo", b"x")
        dying.recv()

        def fail(*arguments):
            monkeypatch.undo()
            raise zmq.ZMQError(24)

        monkeypatch.setattr("zmdp.mdp.transport.monitored.MonitoredDealer.__init__", fail)
    assert future.result(TIMEOUT_SECONDS) == [b"x"]
    client.close()


def test_a_client_without_a_broker_says_so_while_it_waits(caplog):
    with Client(NOBODY, timeout=TIMEOUT_SECONDS) as client:
        asked = [client.submit("echo") for _ in range(2)]
        eventually(lambda: caplog.messages)
        assert not any(each.done() for each in asked)
    (warning,) = caplog.messages
    assert warning.startswith(f"still no connection to a broker at {NOBODY}: nothing is listening there. Is the broker")
    assert warning.endswith(". Until the timeout, 2 requests wait for one")


def test_a_client_says_that_nobody_answers(caplog):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with Client(at, timeout=TIMEOUT_SECONDS, heartbeat=0.2) as client:
            client.submit("echo")
            eventually(lambda: caplog.messages)
    assert f"no connection to a broker at {at}: the program that listens there has been silent for" in caplog.text


def test_the_log_tells_when_the_broker_goes_and_comes_back(caplog):
    with caplog.at_level(logging.INFO, "zmdp.client"):
        with running_broker() as broker, Client(broker.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
            endpoint = broker.endpoints[0]
            client.available("echo")
            assert not caplog.messages
        caplog.clear()
        with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
            asked = client.submit("mmi.service", b"echo")
            eventually(lambda: caplog.messages)
            with running_broker(endpoint):
                asked.result(TIMEOUT_SECONDS)
    lost, found, *_ = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert lost.startswith(f"no connection to the broker at {endpoint}: nothing is listening there")
    assert found == f"connected to the broker at {endpoint}"
