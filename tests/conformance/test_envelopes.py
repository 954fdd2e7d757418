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
