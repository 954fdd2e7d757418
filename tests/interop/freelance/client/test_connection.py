"""The sockets of a Freelance client: what happens when a connection ends."""

import time

import pytest
import zmq
from support.processes import TIMEOUT_SECONDS, free_endpoint

from zmdp.interop.freelance.client.connection import FreelanceConnection
from zmdp.interop.freelance.client.session import FreelanceSession


@pytest.fixture
def endpoint():
    return free_endpoint()


@pytest.fixture
def connection(endpoint):
    with zmq.Context() as context:
        connection = FreelanceConnection(FreelanceSession([endpoint]), [endpoint], context)
        yield connection
        connection.close()


def serve(context, endpoint):
    server = context.socket(zmq.ROUTER)
    server.set(zmq.ROUTING_ID, endpoint.encode())
    server.bind(endpoint)
    return server


def step_until(connection, condition):
    until = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < until
        connection.step(time.monotonic())
        connection._socket.poll(1)


def begin(connection, body):
    return connection.session.request([body], time.monotonic(), timeout=TIMEOUT_SECONDS, receiver=body)


def arrive(server, body):
    """Wait for the request, past PINGs; return its first two frames."""
    while True:
        assert server.poll(1000 * TIMEOUT_SECONDS)
        message = server.recv_multipart()
        if message[2:] == [body]:
            return message[:2]


def asked(connection, context, endpoint, *, heard):
    """Return a server that has a request, the call, and its route; with `heard`, the server has been heard."""
    server = serve(context, endpoint)
    call = begin(connection, b"x")
    step_until(connection, lambda: call.sent and not connection.step(time.monotonic()))
    route = arrive(server, b"x")
    if heard:
        server.send_multipart([route[0], b"PONG"])
        step_until(connection, lambda: connection._descriptors.known)
    return server, call, route


@pytest.mark.parametrize("heard", [False, True])
def test_a_reply_that_arrives_just_before_the_connection_ends_counts(connection, context, endpoint, heard):
    server, _, route = asked(connection, context, endpoint, heard=heard)
    for _ in range(500):
        server.send_multipart([route[0], b"0", b"another"])
    server.send_multipart([*route, b"y"])
    server.close(linger=10_000)
    events = []
    # The client does nothing until it could know that the connection has ended.
    wait_for_end(connection)
    step_until(connection, lambda: events.extend(connection.session.take_events()) or events)
    assert events == [(b"x", [b"y"])]
    assert connection.session.dropped["unknown-number"] == 500


def wait_for_end(connection):
    while True:
        assert connection._monitor.poll(1000 * TIMEOUT_SECONDS)
        event = connection._monitor.recv_multipart()
        number = int.from_bytes(event[0][:2], "little")
        if number == zmq.Event.DISCONNECTED:
            connection._ended.append(int.from_bytes(event[0][2:6], "little"))
            return


@pytest.mark.parametrize("heard", [False, True])
def test_nothing_is_kept_for_a_server_that_is_gone(connection, context, endpoint, heard):
    server, call, _ = asked(connection, context, endpoint, heard=heard)
    server.close(linger=0)
    step_until(connection, connection.session.unusable)
    connection.session.forget(call)
    forgotten = begin(connection, b"forgotten")
    step_until(connection, lambda: not connection.step(time.monotonic()))
    connection.session.forget(forgotten)
    events = []
    # Another server under this name gets what is outstanding now, and nothing else.
    wanted = begin(connection, b"wanted")
    server = serve(context, endpoint)
    step_until(connection, lambda: wanted.sent and not connection.step(time.monotonic()))
    while True:
        assert server.poll(1000 * TIMEOUT_SECONDS)
        route, *frames = server.recv_multipart()
        if frames != [b"PING"]:
            break
    assert frames == [wanted.control, b"wanted"]
    server.send_multipart([route, wanted.control, b"y"])
    step_until(connection, lambda: events.extend(connection.session.take_events()) or events)
    assert events == [(b"wanted", [b"y"])]
    server.close(linger=0)
