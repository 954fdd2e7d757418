"""The synchronous client, against a real broker and real workers in this process."""

import threading

import pytest
import zmq

from zmdp.clients import (
    BrokerUnreachable,
    BusyError,
    Client,
    ClosedError,
    RequestTimeout,
    ServiceError,
    SettingError,
    ZmdpError,
)
from zmdp.mdp.testing import running_broker
from zmdp.workers import Worker


def count(request):
    for number in range(3):
        yield b"%d" % number
    return b"end"


def fail(request):
    raise ValueError("no good")


def fail_late(request):
    yield b"first"
    raise KeyError("gone")


@pytest.fixture(scope="module")
def endpoint():
    with running_broker() as server:
        at = server.endpoints[0]
        with (
            Worker("echo", list, broker=at, concurrency=2),
            Worker("count", count, broker=at),
            Worker("fail", fail, broker=at),
            Worker("fail.late", fail_late, broker=at),
        ):
            yield at


@pytest.fixture
def client(endpoint):
    with Client(endpoint, timeout=10) as client:
        yield client


def test_a_reply_is_a_list_of_frames(client):
    reply = client.request("echo", b"a", bytearray(b"b"), memoryview(b"c"))
    assert (reply, reply.service, reply.final) == ([b"a", b"b", b"c"], "echo", True)


def test_frames_of_any_bytes_and_size(client):
    frames = [b"", bytes(range(256)), b"x" * 5_000_000]
    assert client.request("echo", *frames) == frames


def test_a_stream_is_an_iterator(client):
    assert list(client.stream("count")) == [[b"0"], [b"1"], [b"2"], [b"end"]]


def test_whether_a_service_is_available(client):
    assert client.available("echo")
    assert not client.available("nobody")


def test_a_handler_that_raises_is_told_by_type_and_text(client):
    with pytest.raises(ServiceError) as caught:
        client.request("fail", b"x")
    assert (caught.value.code, caught.value.text, caught.value.service) == (500, "ValueError: no good", "fail")
    assert client.request("echo", b"still usable") == [b"still usable"]


def test_a_handler_that_raises_within_a_stream(client):
    parts = client.stream("fail.late")
    assert next(parts) == [b"first"]
    with pytest.raises(ServiceError, match="KeyError"):
        next(parts)


def test_after_a_timeout_the_client_can_be_used(client):
    with pytest.raises(RequestTimeout, match="no reply from service 'nobody'"):
        client.request("nobody", timeout=0.05, retries=1)
    assert client.request("echo", b"x") == [b"x"]


def test_after_any_exception_the_client_can_be_used(client, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("zmdp.clients.mdclient.receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.request("echo", b"whose reply comes late")
    assert client.request("echo", b"x") == [b"x"]


def test_a_stream_that_is_left_early_does_not_disturb_the_next_request(client):
    for part in client.stream("count"):
        assert part == [b"0"]
        break
    assert client.request("echo", b"x") == [b"x"]


def test_one_request_at_a_time(client):
    parts = client.stream("count")
    next(parts)
    with pytest.raises(BusyError, match="in the middle of another request"):
        client.request("echo", b"x")
    with pytest.raises(BusyError):
        client.send("echo", b"x")
    parts.close()
    assert client.request("echo", b"x") == [b"x"]


def test_send_and_recv_pipeline(client):
    for number in range(5000):
        client.send("echo", b"%d" % number)
    with pytest.raises(BusyError, match="5000 replies"):
        client.request("echo", b"x")
    assert {client.recv()[0] for _ in range(5000)} == {b"%d" % number for number in range(5000)}
    assert client.request("echo", b"x") == [b"x"]


def test_recv_tells_partials_from_finals(client):
    client.send("count")
    assert [client.recv().final for _ in range(4)] == [False, False, False, True]


def test_recv_times_out_and_can_be_called_again(client):
    client.send("nobody", b"x")
    with pytest.raises(RequestTimeout, match="1 requests are outstanding"):
        client.recv(timeout=0.05)
    client.reset()
    with pytest.raises(BusyError, match="nothing was sent"):
        client.recv()


def test_recv_raises_what_a_handler_raised(client):
    client.send("fail", b"x")
    with pytest.raises(ServiceError, match="no good"):
        client.recv()


@pytest.mark.parametrize("at", ["tcp://127.0.0.1:1", "ipc:///nowhere/at/all"])
def test_nobody_listening_is_told(at):
    with Client(at, timeout=0.05, retries=0) as client:
        with pytest.raises(BrokerUnreachable, match="nobody listens there") as caught:
            client.request("echo")
    assert isinstance(caught.value, TimeoutError)


def test_with_several_brokers_the_first_that_answers_is_kept(endpoint):
    with Client(["tcp://127.0.0.1:1", endpoint], timeout=0.2) as client:
        assert client.request("echo", b"x", timeout=0.2) == [b"x"]
        assert client.request("echo", b"y", retries=0, timeout=10) == [b"y"]


def test_without_retries_the_next_request_goes_to_the_next_broker(endpoint):
    with Client(["tcp://127.0.0.1:1", endpoint], timeout=0.1, retries=0) as client:
        with pytest.raises(BrokerUnreachable):
            client.request("echo", b"x")
        assert client.request("echo", b"y", timeout=10) == [b"y"]


def test_a_reply_that_ends_like_a_failure_is_none(client):
    assert client.request("echo", b"row", b"zmdp.error", b"500", b"x") == [b"row", b"zmdp.error", b"500", b"x"]


def test_a_timeout_of_months(client):
    assert client.request("echo", b"x", timeout=1e7) == [b"x"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.request("echo", "text"), "frame 0 is of type str: a frame is bytes"),
        (lambda c: c.request("echo", b"x", None), "frame 1 is of type NoneType"),
        (lambda c: c.request(""), "'' is no service name"),
        (lambda c: c.request("a\nb"), "no service name"),
        (lambda c: c.request(b"\xff"), "no service name"),
        (lambda c: c.request("x" * 256), "no service name"),
        (lambda c: c.request("echo", timeout=0), "timeout is 0: it takes a number of seconds above 0"),
        (lambda c: c.request("echo", timeout=float("inf")), "timeout is inf"),
        (lambda c: c.request("echo", retries=-1), "retries is -1: it takes a whole number, 0 or more"),
        (lambda c: Client([]), "broker is empty"),
        (lambda c: Client("nonsense"), "'nonsense' is no endpoint"),
        (lambda c: Client(protocol="3"), "protocol is '3': it is one of 0.2, 0.1"),
    ],
)
def test_wrong_arguments_are_told(client, call, message):
    with pytest.raises(SettingError, match=message):
        call(client)
    assert client.request("echo", b"x") == [b"x"]


def test_a_closed_client_says_so(endpoint):
    client = Client(endpoint)
    client.close()
    client.close()
    with pytest.raises(ClosedError):
        client.request("echo")


def test_everything_raised_has_one_root():
    for error in (BrokerUnreachable, BusyError, ClosedError, RequestTimeout, ServiceError, SettingError):
        assert issubclass(error, ZmdpError)


def test_through_inproc_and_ipc_with_one_context(tmp_path):
    context = zmq.Context()
    binds = ("inproc://broker", f"ipc://{tmp_path}/broker")
    with running_broker(*binds, context=context) as server:
        assert server.endpoints == list(binds)
        with (
            Worker("echo", list, broker=binds[0], context=context),
            Client(binds[0], context=context) as near,
            Client(binds[1], context=context) as far,
        ):
            assert (near.request("echo", b"x"), far.request("echo", b"y")) == ([b"x"], [b"y"])
    context.term()


def test_each_thread_with_a_client_of_its_own(endpoint):
    wrong = []

    def call(name):
        with Client(endpoint, timeout=10) as client:
            wrong.extend(
                n for n in range(100) if client.request("echo", b"%s %d" % (name, n)) != [b"%s %d" % (name, n)]
            )

    threads = [threading.Thread(target=call, args=(name,)) for name in (b"a", b"b", b"c", b"d")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
