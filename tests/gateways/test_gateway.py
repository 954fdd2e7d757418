"""What the gateway does when a client disconnects, and what it still holds then."""

import contextlib

import pytest
from support.gateways import running_gateway
from support.processes import eventually

LONG = b"POST /services/hold HTTP/1.1\r\nhost: x\r\nrequest-timeout: 60\r\n"
"""The request would not end by itself while the test waits."""


def test_a_client_that_disconnects_after_a_late_and_large_body(gateway, services):
    """uvicorn pauses reading while much of a body has not been taken; the end is noticed all the same."""
    body = bytes(1_000_000)
    with gateway.connect() as client:
        client.send(LONG + b"content-length: %d\r\n\r\n" % len(body))
        eventually(lambda: gateway.server.outstanding == 1)
        client.send(body)
        eventually(lambda: body in services.begun)
    eventually(lambda: body in services.cancelled)
    eventually(lambda: gateway.gateway.memory == gateway.gateway.outstanding == 0)


def test_a_client_that_disconnects_within_the_body(gateway):
    with gateway.connect() as client:
        client.send(LONG + b"content-length: 100\r\n\r\nhalf")
        eventually(lambda: gateway.gateway.memory == len("half"))
    eventually(lambda: gateway.gateway.memory == gateway.server.outstanding == 0)


@pytest.mark.parametrize("limits", [{"body_timeout": 0.2}, {"max_memory": 1 << 20}], ids=["time", "memory"])
def test_a_reply_that_is_not_read_or_for_which_there_is_no_memory(endpoint, services, limits):
    with running_gateway(endpoint, **limits) as gateway, gateway.connect() as client:
        client.send(b"POST /services/large HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\n\r\n30000000")
        eventually(lambda: gateway.gateway.accepted == 1 and gateway.server.outstanding == 0)
        assert gateway.gateway.memory == 0
        with contextlib.suppress(ConnectionError):
            client.socket.shutdown(1)
        assert len(client.rest()) < 30_000_000
