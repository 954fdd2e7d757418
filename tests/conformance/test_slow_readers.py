"""Peers that do not read what they are sent, or are gone before it is sent: nobody else waits (C12, C17)."""

from collections.abc import Callable

import pytest
import zmq
from support.peers import Bench, Peer

Start = Callable[..., Bench]

INPROC = "inproc://broker"
"""Between threads nothing is buffered but what the two high-water marks allow: 1000 messages of the broker's, and …"""
TIGHT: dict[int, int | bytes] = {zmq.RCVHWM: 1}


def test_a_slow_reader_gets_delayed_messages_in_order(start: Start) -> None:
    # C3: what the socket does not take is kept for it, and what comes after that waits behind it
    bench = start(INPROC)
    client, worker = bench.client(options=TIGHT), bench.worker(b"stream")
    client.request(b"stream", b"6000")
    address = worker.work(b"6000")
    for number in range(2000):
        worker.partial(address, b"%d" % number)
    worker.nothing()
    for number in range(2000, 6000):
        worker.partial(address, b"%d" % number)
        client.partial(b"stream", b"%d" % (number - 2000))
    worker.final(address, b"end")
    worker.nothing()
    for number in range(4000, 6000):
        client.partial(b"stream", b"%d" % number)
    client.final(b"stream", b"end")
    client.nothing()


@pytest.mark.parametrize(
    ("limits", "least", "most"),
    [({"max_outbox": 50}, 900, 1200), ({"max_outbox_bytes": 200_000}, 100, 300)],
    ids=["messages", "bytes"],
)
def test_a_client_that_does_not_read_is_dropped_and_others_are_served(
    start: Start, limits: dict[str, int], least: int, most: int
) -> None:
    # C12, C3, C40: what it was sent is a beginning of the stream, without a gap, and it ends there; bytes count in the
    # socket too
    bench = start(INPROC, **limits)
    slow, stream = bench.client(options=TIGHT), bench.worker(b"stream")
    client, worker = bench.client(), bench.worker(b"echo")
    slow.request(b"stream", b"5000")
    address = stream.work(b"5000")
    for number in range(5000):
        stream.partial(address, b"%d" % number, b"x" * 1000)
        if number % 100 == 0:
            client.request(b"echo", b"%d" % number)
            worker.final(worker.work(b"%d" % number), b"reply")
            client.final(b"echo", b"reply")
    stream.final(address, b"end")
    stream.nothing()
    assert bench.stats()["dropped"] == {"client-gone": 1}
    client.request(b"stream", b"next")  # the worker is free for the next
    stream.final(stream.work(b"next"), b"done")
    client.final(b"stream", b"done")
    slow.request(b"echo", b"I am back")
    worker.final(worker.work(b"I am back"), b"welcome")
    came = 0
    while (message := slow.recv())[1] == b"\x02":
        assert message == [b"MDPC02", b"\x02", b"stream", b"%d" % came, b"x" * 1000]
        came += 1
    assert message == [b"MDPC02", b"\x03", b"echo", b"welcome"]
    assert least < came < most
    slow.nothing()


def test_a_client_that_sends_and_never_reads_is_dropped(start: Start) -> None:
    # C12: the answers of the broker itself are bounded too
    bench = start(INPROC, max_outbox=50)
    client, worker = bench.client(), bench.worker(b"echo")
    slow = bench.peer(options=TIGHT)
    for _ in range(5000):
        slow.send(b"MDPC02", b"\x01", b"mmi.broker", b"")
    client.request(b"echo", b"hello")
    worker.final(worker.work(b"hello"), b"world")
    client.final(b"echo", b"world")
    handled(bench, slow, 1)


def handled(bench: Bench, peer: Peer, rubbish: int) -> None:
    """Wait until the broker has handled all that `peer` sent, although `peer` reads nothing."""
    peer.send(b"rubbish")
    bench.until(lambda: bench.stats()["invalid"] == {"no-header": rubbish})


def fill(bench: Bench, peer: Peer, rubbish: int) -> None:
    """More answers than the socket takes, so that some wait in the broker."""
    for _ in range(1100):
        peer.send(b"MDPC02", b"\x01", b"mmi.service", b"nobody")
    handled(bench, peer, rubbish)


def test_the_request_of_a_slow_worker_that_dies_goes_to_another(start: Start) -> None:
    # C17: it is noticed when what waits for it cannot be sent any more
    bench = start(INPROC)
    client, slow = bench.client(), bench.worker(b"echo", options=TIGHT)
    client.request(b"echo", b"hello")
    slow.work(b"hello")
    fill(bench, slow, 1)
    slow.close()
    bench.until(lambda: bench.status(b"echo") == b"404")
    other = bench.worker(b"echo")
    other.final(other.work(b"hello"), b"world")
    client.final(b"echo", b"world")


def test_a_request_is_passed_on_until_a_worker_has_room_for_it(start: Start) -> None:
    # C17: two workers that do not read; one dies, and its request is more than may be kept for the other
    bench = start(INPROC, max_outbox_bytes=500_000)
    client = bench.client()
    dies, full = bench.worker(b"echo", options=TIGHT), bench.worker(b"echo", options=TIGHT)
    large = b"x" * 1_000_000
    client.request(b"echo", large)
    dies.work(large)
    fill(bench, dies, 1)
    fill(bench, full, 2)
    dies.close()
    bench.until(lambda: bench.status(b"echo") == b"404")
    other = bench.worker(b"echo")
    other.final(other.work(large), b"done")
    client.final(b"echo", b"done")


ENVELOPES = {"no": [], "a deep": [b"%d" % number for number in range(10)] + [b""]}


@pytest.mark.parametrize("envelope", ENVELOPES.values(), ids=ENVELOPES)
@pytest.mark.parametrize("attempts", [1, 2])
def test_a_worker_that_dies_while_it_is_a_client_too(start: Start, attempts: int, envelope: list[bytes]) -> None:
    # C17, C22: what shows that it is gone is a PARTIAL for it as a client, and it had the request all the same
    bench = start(max_attempts=attempts)
    client, both, stream = bench.client(), bench.peer(), bench.worker(b"stream")
    both.send(*envelope, b"MDPW02", b"\x01", b"echo")
    both.sync()
    client.request(b"echo", b"hello")
    message = both.recv()
    assert message == [*envelope, b"MDPW02", b"\x02", message[len(envelope) + 2], b"", b"hello"]
    both.send(b"MDPC02", b"\x01", b"stream", b"")
    address = stream.work(b"")
    both.close()

    def gone() -> bool:
        stream.partial(address, b"anybody?")
        return bench.status(b"echo") == b"404"

    bench.until(gone)
    other = bench.worker(b"echo")
    if attempts == 1:
        other.nothing()
        client.nothing()
        assert bench.stats()["dropped"] == {"client-gone": 1, "workers-lost": 1}
    else:
        other.final(other.work(b"hello"), b"world")
        client.final(b"echo", b"world")
    stream.final(address, b"end")
    stream.nothing()
