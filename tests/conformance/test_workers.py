"""The worker's side of MDP/0.2: its commands (C7, C8, C10), what is unexpected (C14, C16), and addresses (C18, C23)."""

from collections.abc import Callable

import pytest
import zmq
from support.peers import Bench, Worker


def test_c07_ready_is_not_answered(bench: Bench) -> None:
    # C7
    worker = bench.worker()
    worker.send(b"MDPW02", b"\x01", b"echo")
    worker.nothing()
    assert bench.status(b"echo") == b"200"


def test_c07_a_request_is_header_command_client_empty_body(bench: Bench) -> None:
    # C7, C8: exactly one address frame, then one empty frame
    client, worker = bench.client(), bench.worker(b"echo")
    client.request(b"echo", b"1", b"2")
    message = worker.recv()
    address = message[2]
    assert message == [b"MDPW02", b"\x02", address, b"", b"1", b"2"]
    worker.send(b"MDPW02", b"\x03", address, b"", b"3")
    worker.send(b"MDPW02", b"\x04", address, b"", b"4", b"5")
    assert client.recv() == [b"MDPC02", b"\x02", b"echo", b"3"]
    assert client.recv() == [b"MDPC02", b"\x03", b"echo", b"4", b"5"]


def test_c06_a_worker_has_one_request_at_a_time(bench: Bench) -> None:
    # C6
    client, worker = bench.client(), bench.worker(b"echo")
    for number in (b"1", b"2", b"3"):
        client.request(b"echo", number)
    client.sync()
    for number in (b"1", b"2", b"3"):
        address = worker.work(number)
        worker.nothing()
        worker.partial(address, b"part of " + number)
        worker.nothing()
        worker.final(address, b"reply to " + number)
        client.partial(b"echo", b"part of " + number)
        client.final(b"echo", b"reply to " + number)


def test_c08_two_address_frames_are_not_taken_for_one(bench: Bench) -> None:
    # C8
    client, worker = bench.client(), bench.worker(b"echo")
    client.request(b"echo", b"")
    address = worker.work(b"")
    worker.send(b"MDPW02", b"\x04", address, b"other", b"", b"body")
    worker.nothing()
    client.nothing()
    worker.final(address, b"body")
    client.final(b"echo", b"body")


def test_c10_disconnect_before_ready_is_taken_without_a_word(bench: Bench) -> None:
    # C10
    worker = bench.worker()
    worker.disconnect()
    worker.nothing()
    worker.ready(b"echo")
    worker.nothing()
    assert bench.status(b"echo") == b"200"


def test_c16_a_worker_that_disconnected_is_sent_nothing(bench: Bench) -> None:
    # C16
    client, worker = bench.client(), bench.worker(b"echo")
    worker.disconnect()
    worker.sync()
    client.request(b"echo", b"anybody?")
    client.sync()
    worker.nothing()
    client.nothing()


Unexpected = Callable[[Worker], None]

STRANGERS: dict[str, Unexpected] = {
    "heartbeat": lambda worker: worker.heartbeat(),
    "partial": lambda worker: worker.partial(b"7", b"body"),
    "final": lambda worker: worker.final(b"7", b"body"),
}


@pytest.mark.parametrize("unexpected", STRANGERS.values(), ids=STRANGERS)
def test_c14_a_stranger_is_disconnected_and_may_register_afterwards(bench: Bench, unexpected: Unexpected) -> None:
    # C14
    client, worker = bench.client(), bench.worker()
    unexpected(worker)
    assert worker.recv() == [b"MDPW02", b"\x06"]
    worker.nothing()
    worker.ready(b"echo")
    worker.nothing()
    client.request(b"echo", b"hello")
    worker.final(worker.work(b"hello"), b"world")
    client.final(b"echo", b"world")


IDLE: dict[str, Unexpected] = {
    "second READY": lambda worker: worker.ready(b"echo"),
    "READY for another service": lambda worker: worker.ready(b"other"),
    "partial": lambda worker: worker.partial(b"7", b"body"),
    "final": lambda worker: worker.final(b"7", b"body"),
}


@pytest.mark.parametrize("unexpected", IDLE.values(), ids=IDLE)
def test_c14_an_idle_worker_is_disconnected_and_forgotten(bench: Bench, unexpected: Unexpected) -> None:
    # C14
    client, worker = bench.client(), bench.worker(b"echo")
    unexpected(worker)
    assert worker.recv() == [b"MDPW02", b"\x06"]
    worker.nothing()
    assert bench.status(b"echo") == bench.status(b"other") == b"404"
    assert bench.stats()["workers"] == 0
    client.request(b"echo", b"hello")
    client.sync()
    worker.nothing()
    worker.ready(b"echo")  # a later READY from the same identity is accepted
    worker.final(worker.work(b"hello"), b"world")
    client.final(b"echo", b"world")


@pytest.mark.parametrize("more", ["partial", "final"])
def test_c32_what_comes_after_the_final_is_late(bench: Bench, more: str) -> None:
    # C32, C8, C3: after the FINAL, nothing reaches the client
    client, worker = bench.client(), bench.worker(b"echo")
    client.request(b"echo", b"")
    address = worker.work(b"")
    worker.final(address, b"all")
    getattr(worker, more)(address, b"more")
    worker.nothing()
    client.final(b"echo", b"all")
    client.nothing()
    assert bench.stats()["late"] == 1
    assert bench.status(b"echo") == b"200"


NEVER_DISPATCHED = [b"0", b"1", b"18446744073709551615", None]
NO_ADDRESSES = [b"amy", b"bob", b"-1", b"1.0", b"+7", b"\x00", b"9" * 255]


@pytest.mark.parametrize("address", NEVER_DISPATCHED)
@pytest.mark.parametrize("kind", [b"\x03", b"\x04"], ids=["partial", "final"])
def test_c18_an_address_that_was_not_dispatched_is_unexpected(bench: Bench, kind: bytes, address: bytes | None) -> None:
    # C18, C14, C17: nobody gets what was sent to the wrong address
    amy, bob = bench.client(options={zmq.IDENTITY: b"amy"}), bench.client(options={zmq.IDENTITY: b"bob"})
    worker = bench.worker(b"echo")
    bob.sync()
    amy.request(b"echo", b"hello")
    dispatched = worker.work(b"hello")
    worker.send(b"MDPW02", kind, b"%d" % (int(dispatched) - 1) if address is None else address, b"", b"misled")
    worker.disconnected()
    amy.nothing()
    bob.nothing()
    other = bench.worker(b"echo")
    other.final(other.work(b"hello"), b"world")
    amy.final(b"echo", b"world")
    bob.nothing()


@pytest.mark.parametrize("address", NO_ADDRESSES)
@pytest.mark.parametrize("kind", [b"\x03", b"\x04"], ids=["partial", "final"])
def test_c18_what_cannot_be_an_address_makes_a_reply_invalid(bench: Bench, kind: bytes, address: bytes) -> None:
    # C18, C15: not even the routing id of a client is an address
    amy, bob = bench.client(options={zmq.IDENTITY: b"amy"}), bench.client(options={zmq.IDENTITY: b"bob"})
    worker = bench.worker(b"echo")
    bob.sync()
    amy.request(b"echo", b"hello")
    dispatched = worker.work(b"hello")
    worker.send(b"MDPW02", kind, address, b"", b"misled")
    worker.nothing()
    amy.nothing()
    bob.nothing()
    worker.final(dispatched, b"world")
    amy.final(b"echo", b"world")
    bob.nothing()
    assert bench.stats()["invalid"] == {"bad-address": 1}


NAMES = [b"e", b"x" * 255, b"with a space", "größer-als-✓".encode(), b"../../etc/passwd", b"MDPC02", b"0", b"'; DROP"]


@pytest.mark.parametrize("name", NAMES)
def test_c23_a_service_name_is_1_to_255_printable_bytes(bench: Bench, name: bytes) -> None:
    # C23
    client, worker = bench.client(), bench.worker(name)
    assert bench.status(name) == b"200"
    client.request(name, b"hello")
    worker.final(worker.work(b"hello"), b"world")
    client.final(name, b"world")
