"""FLP (C46) over real sockets, with frames written by hand on one side."""

import threading

import pytest
import zmq
from support.freelance import Caller, agent, plain_server
from support.processes import TIMEOUT_MS, TIMEOUT_SECONDS, eventually, free_endpoint

from zmdp.interop.freelance.client import FreelanceClient
from zmdp.interop.freelance.worker import FreelanceWorker
from zmdp.interop.freelance.worker import server_socket as module
from zmdp.mdp.limits import Limits

MARK = b"the end"


@pytest.fixture
def endpoint():
    return free_endpoint()


@pytest.fixture
def server(endpoint):
    with FreelanceWorker(endpoint, list) as worker:
        yield worker


def serving(endpoint, handler=list, **settings):
    return FreelanceWorker(endpoint, handler, **settings)


# ── our server, a caller by hand ─────────────────────────────────────────────────────────────────────────────────────


def test_ping_is_answered_by_pong_from_the_endpoint(server, endpoint):  # C46
    with Caller(endpoint) as caller:
        caller.send(endpoint, b"PING")
        assert caller.recv() == [endpoint.encode(), b"PONG"]


@pytest.mark.parametrize("control", [b"1", b"", b"PING", b"\x00\xff" * 50])
@pytest.mark.parametrize("body", [[b""], [b"x"], [b"a", b"", b"b"]])
def test_the_first_frame_returns_unmodified_before_the_reply(server, endpoint, control, body):  # C46
    with Caller(endpoint) as caller:
        caller.send(endpoint, control, *body)
        assert caller.recv() == [endpoint.encode(), control, *body]


def test_ping_is_answered_while_the_only_handler_runs(endpoint):  # C46
    running, go_on = threading.Event(), threading.Event()

    def wait(request):
        running.set()
        go_on.wait()
        return request

    with serving(endpoint, wait), Caller(endpoint) as caller:
        try:
            caller.send(endpoint, b"1", b"x")
            assert running.wait(TIMEOUT_SECONDS)
            for _ in range(3):
                caller.send(endpoint, b"PING")
                assert caller.recv() == [endpoint.encode(), b"PONG"]
        finally:
            go_on.set()
        assert caller.recv() == [endpoint.encode(), b"1", b"x"]


def test_a_frame_that_is_too_large_ends_the_connection_of_its_sender_only(server, endpoint):
    with Caller(endpoint) as caller, Caller(endpoint) as other:
        caller.send(endpoint, b"1", bytes(Limits().max_message + 1))
        other.send(endpoint, b"2", MARK)
        assert other.recv() == [endpoint.encode(), b"2", MARK]
        caller.send(endpoint, b"3", MARK)  # it has reconnected
        assert caller.recv() == [endpoint.encode(), b"3", MARK]


def test_a_plain_req_socket_can_call(server, endpoint):
    """Its empty delimiter is the control frame."""
    with zmq.Context() as context, context.socket(zmq.REQ) as req:
        req.set(zmq.LINGER, 0)
        req.connect(endpoint)
        req.send_multipart([b"a", b"b"])
        assert req.poll(TIMEOUT_MS)
        assert req.recv_multipart() == [b"a", b"b"]


def test_a_client_that_never_reads_does_not_hold_up_others(endpoint, monkeypatch):
    monkeypatch.setattr(module, "MAX_UNSENT_BYTES", 1 << 20)
    reply = bytes(1 << 20)
    with serving(endpoint, lambda request: reply) as worker:
        (server,) = worker._connections
        with Caller(endpoint, receive_limit=1) as lazy, Caller(endpoint) as other:
            for number in range(40):
                lazy.send(endpoint, b"%d" % number, b"x")
            eventually(lambda: server.session.dropped["slow-reader"])
            other.send(endpoint, b"1", b"x")
            assert other.recv()[1:] == [b"1", reply]
            assert server._server.unsent.bytes < 3 << 20
        other_drops = set(server.session.dropped) - {"slow-reader", "client-gone"}
        assert not other_drops


def test_a_client_cannot_abort_the_server_with_a_chosen_routing_id(server, endpoint):
    """C39: libzmq numbers peers from a start that must not be guessed."""
    with zmq.Context() as context, Caller(endpoint) as caller:
        sockets = []
        for number in range(64):
            socket = context.socket(zmq.DEALER)
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.ROUTING_ID, number.to_bytes(4, "big") + b"x")
            socket.connect(endpoint)
            socket.send_multipart([b"1", b"x"])
            sockets.append(socket)
        for socket in sockets:
            assert socket.poll(TIMEOUT_MS)
            assert socket.recv_multipart() == [b"1", b"x"]
            socket.close()
        caller.send(endpoint, b"2", MARK)
        assert caller.recv() == [endpoint.encode(), b"2", MARK]


def test_the_guides_client_calls_our_server(server, endpoint):
    """It sends a request again whenever something arrives, so the server may handle it more than once."""
    missing = free_endpoint()
    for number in (1, 2, 3):
        assert agent([endpoint], [b"random", b"name"], number) == [b"random", b"name"]
    assert agent([endpoint, missing], [b"x"], 4) == [b"x"]


# ── our client, a server by hand ─────────────────────────────────────────────────────────────────────────────────────


def test_our_client_calls_the_guides_server(endpoint):  # C46
    with plain_server(endpoint) as received, FreelanceClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
        for number in range(1, 101):
            assert client.request(b"random", b"name") == [b"OK"]
            assert [b"%d" % number, b"random", b"name"] in received
        assert client.ping()[endpoint] is not None
        assert client.servers()[0].alive
    assert [b"PING"] in received
    assert len([frames for frames in received if frames != [b"PING"]]) == 100


def test_our_client_has_no_routing_id_of_its_own(endpoint):  # C46
    """A server cannot reply after the client has left: its id is new with each connection."""
    ids = set()
    for _ in range(2):
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.set(zmq.ROUTING_ID, endpoint.encode())
            socket.set(zmq.LINGER, 0)
            eventually(lambda: bound(socket, endpoint))
            with FreelanceClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
                client.submit(b"x")
                assert socket.poll(TIMEOUT_MS)
                identity = socket.recv_multipart()[0]
                assert len(identity) == 5
                assert identity.startswith(b"\0")
                ids.add(identity)


def bound(socket, endpoint):
    try:
        socket.bind(endpoint)
    except zmq.ZMQError:
        return False
    return True
