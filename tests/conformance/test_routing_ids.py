"""Routing ids that peers choose themselves (C39): nobody inherits anything with them, and nobody aborts the broker."""

import subprocess
import sys

from support.peers import Bench
from support.processes import process
from support.zmtp import RawPeer

FIRST_ID = """
import zmq

with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
    router.bind("inproc://router")
    dealer.connect("inproc://router")
    dealer.send(b"")
    print(router.recv().hex())
"""
"""Print the id that a ROUTER generates first, in a process that has not seeded libc's `rand`."""
ME = b"me"
REQUEST, FINAL = [b"MDPC02", b"\x01"], [b"MDPC02", b"\x03"]


def fence(bench: Bench) -> None:
    """Have libzmq and the broker exchange whatever they need to forget a connection that has ended."""
    client = bench.client()
    for _ in range(3):
        client.sync()
    client.close()


def leave(bench: Bench, peer: RawPeer) -> None:
    """Close a connection, and wait until its routing id is free."""
    peer.close()
    bench.until(lambda: ME not in bench.server._sockets.main.chosen)
    fence(bench)


def test_ids_claimed_in_advance_do_not_abort_the_broker() -> None:  # C39
    first = bytes.fromhex(subprocess.check_output([sys.executable, "-c", FIRST_ID], text=True))
    start = int.from_bytes(first[1:], "big")
    with process("mdp-broker", "--bind", "tcp://127.0.0.1:*") as broker:
        endpoint = broker.line("tcp://", "stdout")
        claims = [b"\0" + (start + i).to_bytes(4, "big") for i in range(100)]
        peers = [RawPeer(endpoint, claim) for claim in claims]
        peers += [RawPeer(endpoint) for _ in claims]
        for peer in peers:
            assert peer.send(*REQUEST, b"mmi.service", b"x").recv() == [*FINAL, b"mmi.service", b"404"]
        for peer in peers:
            peer.close()
        assert broker.end() == 0


def test_the_reply_for_a_client_that_left_reaches_nobody_else(bench: Bench) -> None:  # C39
    worker = bench.worker(b"echo")
    victim = RawPeer(bench.endpoint, ME).send(*REQUEST, b"echo", b"a secret")
    address = worker.work(b"a secret")
    leave(bench, victim)
    with RawPeer(bench.endpoint, ME) as thief:
        worker.final(address, b"the reply")
        worker.sync()
        assert thief.send(*REQUEST, b"mmi.service", b"x").recv() == [*FINAL, b"mmi.service", b"404"]
    assert bench.stats()["dropped"] == {"client-gone": 1}


def test_the_requests_for_a_worker_that_left_reach_nobody_else(bench: Bench) -> None:  # C39
    victim = RawPeer(bench.endpoint, ME).send(b"MDPW02", b"\x01", b"echo")
    bench.until(lambda: bench.status(b"echo") == b"200")
    leave(bench, victim)
    with RawPeer(bench.endpoint, ME) as thief:
        client = bench.client()
        client.request(b"echo", b"a secret")
        client.sync()
        assert thief.send(*REQUEST, b"mmi.service", b"echo").recv() == [*FINAL, b"mmi.service", b"404"]
        worker = bench.worker(b"echo")
        worker.final(worker.work(b"a secret"), b"the reply")
        client.final(b"echo", b"the reply")


def test_a_peer_that_comes_back_with_its_id_loses_nothing(bench: Bench) -> None:  # C39
    worker = bench.worker(b"echo")
    for turn in range(5):
        client = RawPeer(bench.endpoint, ME)
        for number in range(3):
            client.send(*REQUEST, b"echo", b"%d.%d" % (turn, number))
        for number in range(3):
            worker.final(worker.work(b"%d.%d" % (turn, number)), b"done %d.%d" % (turn, number))
            assert client.recv() == [*FINAL, b"echo", b"done %d.%d" % (turn, number)]
        client.send(*REQUEST, b"echo", b"of no further interest")
        address = worker.work(b"of no further interest")
        leave(bench, client)
        worker.final(address, b"for nobody")
    returned = RawPeer(bench.endpoint, ME).send(b"MDPW02", b"\x01", b"upper")
    bench.until(lambda: bench.status(b"upper") == b"200")
    returned.close()


def test_a_live_peer_keeps_its_id(bench: Bench) -> None:  # C39
    worker = bench.worker(b"echo")
    with RawPeer(bench.endpoint, ME) as client:
        client.send(*REQUEST, b"echo", b"a secret")
        address = worker.work(b"a secret")
        with RawPeer(bench.endpoint, ME):
            fence(bench)
            worker.final(address, b"the reply")
            assert client.recv() == [*FINAL, b"echo", b"the reply"]
