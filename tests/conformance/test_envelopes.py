"""Envelopes (C22): what stands before the header comes back, unchanged, in front of every reply."""

import pytest
import zmq
from support.peers import Bench

ENVELOPES = {
    "none": [],
    "empty frame": [b""],
    "one address": [b"id", b""],
    "three addresses": [b"a", b"\x00\x80\xff", b"c" * 255, b""],
    "15 addresses": [b"%d" % number for number in range(15)] + [b""],
}


@pytest.mark.parametrize("envelope", ENVELOPES.values(), ids=ENVELOPES)
def test_c22_it_is_put_back_in_front_of_every_reply(bench: Bench, envelope: list[bytes]) -> None:
    # C22
    peer, worker = bench.peer(), bench.worker(b"echo")
    peer.send(*envelope, b"MDPC02", b"\x01", b"echo", b"hello", b"")
    address = worker.work(b"hello", b"")  # the worker sees nothing of it
    worker.partial(address, b"1")
    worker.partial(address, b"2")
    worker.final(address, b"3")
    assert peer.recv() == [*envelope, b"MDPC02", b"\x02", b"echo", b"1"]
    assert peer.recv() == [*envelope, b"MDPC02", b"\x02", b"echo", b"2"]
    assert peer.recv() == [*envelope, b"MDPC02", b"\x03", b"echo", b"3"]
    peer.send(*envelope, b"MDPC02", b"\x01", b"mmi.service", b"echo")
    assert peer.recv() == [*envelope, b"MDPC02", b"\x03", b"mmi.service", b"200"]


def test_c22_seventeen_frames_are_too_many(bench: Bench) -> None:
    # C22, C15
    peer = bench.peer()
    for addresses in (16, 17, 100):
        peer.send(*[b"id"] * addresses, b"", b"MDPC02", b"\x01", b"mmi.service", b"echo")
    peer.nothing()
    assert bench.stats()["invalid"] == {"envelope-too-deep": 3}
    peer.send(*[b"id"] * 15, b"", b"MDPC02", b"\x01", b"mmi.service", b"echo")
    assert peer.recv() == [*[b"id"] * 15, b"", b"MDPC02", b"\x03", b"mmi.service", b"404"]


def test_c22_each_request_has_its_own(bench: Bench) -> None:
    # C22: one connection, several requesters behind it; the answers come in another order
    peer = bench.peer()
    workers = {name: bench.worker(name) for name in (b"one", b"two", b"three")}
    envelopes = {b"one": [b"amy", b""], b"two": [b"bob", b"via", b""], b"three": []}
    for name, envelope in envelopes.items():
        peer.send(*envelope, b"MDPC02", b"\x01", name, b"hello")
    addresses = {name: worker.work(b"hello") for name, worker in workers.items()}
    for name in (b"three", b"one", b"two"):
        workers[name].final(addresses[name], b"from " + name)
        assert peer.recv() == [*envelopes[name], b"MDPC02", b"\x03", name, b"from " + name]


def test_c22_a_workers_too(bench: Bench) -> None:
    # C22
    client, peer = bench.client(), bench.peer()
    peer.send(b"id", b"", b"MDPW02", b"\x01", b"echo")
    peer.sync()
    client.request(b"echo", b"hello")
    message = peer.recv()
    address = message[4]
    assert message == [b"id", b"", b"MDPW02", b"\x02", address, b"", b"hello"]
    peer.send(b"id", b"", b"MDPW02", b"\x04", address, b"", b"world")
    client.final(b"echo", b"world")
    peer.send(b"id", b"", b"MDPW02", b"\x04", b"7", b"", b"misled")
    assert peer.recv() == [b"id", b"", b"MDPW02", b"\x06"]


def test_c22_a_req_socket(bench: Bench) -> None:
    # C22: it puts an empty frame in front, and takes a reply only with it
    peer, worker = bench.peer(kind=zmq.REQ), bench.worker(b"echo")
    for number in (b"1", b"2"):
        peer.send(b"MDPC02", b"\x01", b"echo", number)
        worker.final(worker.work(number), b"reply " + number)
        assert peer.recv() == [b"MDPC02", b"\x03", b"echo", b"reply " + number]
    peer.send(b"MDPC02", b"\x01", b"mmi.service", b"echo")
    assert peer.recv() == [b"MDPC02", b"\x03", b"mmi.service", b"200"]
    peer.send(b"MDPC01", b"mmi.service", b"echo")
    assert peer.recv() == [b"MDPC01", b"mmi.service", b"200"]


def test_c22_clients_behind_a_proxy(bench: Bench, proxy: str) -> None:
    # C22: to the broker they are one peer, told apart by their envelopes only
    one, two = (bench.peer(endpoint=proxy, kind=zmq.REQ) for _ in range(2))
    first, second = bench.worker(b"echo"), bench.worker(b"echo")
    one.send(b"MDPC02", b"\x01", b"echo", b"from one")
    to_one = first.work(b"from one")
    two.send(b"MDPC02", b"\x01", b"echo", b"from two")
    second.final(second.work(b"from two"), b"to two")
    assert two.recv() == [b"MDPC02", b"\x03", b"echo", b"to two"]
    first.final(to_one, b"to one")
    assert one.recv() == [b"MDPC02", b"\x03", b"echo", b"to one"]


def test_c22_a_dealer_behind_a_proxy(bench: Bench, proxy: str) -> None:
    # C22
    peer, worker = bench.peer(endpoint=proxy), bench.worker(b"echo")
    peer.send(b"", b"MDPC02", b"\x01", b"echo", b"hello")
    address = worker.work(b"hello")
    worker.partial(address, b"half")
    worker.final(address, b"done")
    assert peer.recv() == [b"", b"MDPC02", b"\x02", b"echo", b"half"]
    assert peer.recv() == [b"", b"MDPC02", b"\x03", b"echo", b"done"]


def test_c22_an_old_client_and_an_old_worker_behind_a_proxy(bench: Bench, proxy: str) -> None:
    # C22, C24
    client, worker = bench.old_client(endpoint=proxy), bench.old_worker(endpoint=proxy)
    worker.ready(b"echo")
    bench.until(lambda: bench.status(b"echo") == b"200")
    client.request(b"echo", b"hello")
    worker.final(worker.work(b"hello"), b"world")
    client.final(b"echo", b"world")
    worker.final(b"7", b"once more")
    worker.disconnected()
