"""C1 to C5: what a client says, seen by a broker made by hand."""

import pytest
from support.processes import TIMEOUT_SECONDS

from zmdp.clients import Client


def test_a_request_has_no_leading_empty_frame(router, pool):
    with Client(router.endpoint, timeout=TIMEOUT_SECONDS, protocol="0.2") as client:
        reply = pool.submit(client.request, "echo", b"one", b"two")
        sender, *frames = router.recv()
        assert frames == [b"MDPC02", b"\x01", b"echo", b"one", b"two"]  # C1, C2
        router.send(sender, b"MDPC02", b"\x03", b"echo", b"done")  # C3
        assert reply.result() == [b"done"]


def test_partials_are_streamed_until_the_final(router, pool):  # C3
    with Client(router.endpoint, timeout=TIMEOUT_SECONDS, protocol="0.2") as client:
        parts = client.stream("count", b"x")
        first = pool.submit(next, parts)
        sender, *_ = router.recv()
        router.send(sender, b"MDPC02", b"\x02", b"count", b"1")
        assert (first.result(), first.result().final) == ([b"1"], False)
        router.send(sender, b"MDPC02", b"\x02", b"count", b"2", b"more")
        router.send(sender, b"MDPC02", b"\x03", b"count", b"end")
        assert [(list(part), part.final) for part in parts] == [([b"2", b"more"], False), ([b"end"], True)]


@pytest.mark.parametrize(
    "noise",
    [
        [b"MDPC02"],
        [b"MDPC02", b"\x03", b"other", b"x"],
        [b"MDPC02", b"\x09", b"echo", b"x"],
        [b"MDPC01", b"echo", b"x"],
        [b"MDPW02", b"\x06"],
        [b"", b""],
        [b"\xff" * 300],
    ],
)
def test_a_message_that_is_not_a_reply_to_the_request_is_ignored(router, pool, noise):  # C4
    with Client(router.endpoint, timeout=TIMEOUT_SECONDS, protocol="0.2") as client:
        reply = pool.submit(client.request, "echo", b"x")
        sender, *_ = router.recv()
        router.send(sender, *noise)
        router.send(sender, b"MDPC02", b"\x03", b"echo", b"done")
        assert reply.result() == [b"done"]


def test_a_silent_broker_gets_the_request_again_on_a_new_connection(router, pool):  # C5
    with Client(router.endpoint, timeout=0.1, retries=2, protocol="0.2") as client:
        reply = pool.submit(client.request, "echo", b"x")
        first, *frames = router.recv()
        second, *again = router.recv()
        assert (second != first, again) == (True, frames)
        router.send(second, b"MDPC02", b"\x03", b"echo", b"done")
        assert reply.result() == [b"done"]


def test_a_late_reply_is_not_taken_for_the_next_requests(router, pool):  # C5
    with Client(router.endpoint, timeout=0.05, retries=0, protocol="0.2") as client:
        given_up = pool.submit(client.request, "echo", b"one")
        first, *_ = router.recv()
        with pytest.raises(TimeoutError):
            given_up.result()
        reply = pool.submit(client.request, "echo", b"two", timeout=TIMEOUT_SECONDS)
        second, *_ = router.recv()
        router.send(first, b"MDPC02", b"\x03", b"echo", b"to one")
        router.send(second, b"MDPC02", b"\x03", b"echo", b"to two")
        assert reply.result() == [b"to two"]


def test_a_0_1_client_sends_and_takes_the_leading_empty_frame(router, pool):  # C24
    with Client(router.endpoint, timeout=TIMEOUT_SECONDS, protocol="0.1") as client:
        reply = pool.submit(client.request, "echo", b"x")
        sender, *frames = router.recv()
        assert frames == [b"", b"MDPC01", b"echo", b"x"]
        router.send(sender, b"", b"MDPC01", b"echo", b"done")
        assert reply.result() == [b"done"]
