"""The server's loop, what can be said of it without its clock."""

import ctypes
import math
import os
import socket
import threading
import time
from contextlib import ExitStack
from errno import EHOSTUNREACH
from itertools import pairwise
from types import MethodType

import pytest
import zmq
from support import turns
from support.peers import ready_of
from support.processes import TIMEOUT_MS, TIMEOUT_SECONDS
from support.x1_messages import request
from support.zmtp import RawPeer

from zmdp.mdp.broker.io.connections import default_max_connections
from zmdp.mdp.broker.io.dialer import LinkTo
from zmdp.mdp.broker.io.loop import Backlog, Server, ServerSettings, default_name
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits
from zmdp.mdp.transport.multipart import send


def test_it_sleeps_for_an_interval_at_most_while_something_is_due():
    """Else it would take a long sleep for its process having been held up, and be late with what is due."""
    with Server(("inproc://server",), ServerSettings(limits=Limits(heartbeat=2, expiry=60))) as server:
        server._tick_at = 0.0  # its clock has another beginning than this test's
        assert server._wait(0.0) is None
        turns.receive(server.broker, [b"c", b"MDPC02", b"\x01", b"nobody", b"x"], 0.0)
        assert server._wait(0.0) == 2000
        assert server._wait(59.0) in range(900, 1100)


def take_in(server, now):
    """Take in a turn's messages, and do what is due.  Return whether there may be more."""
    server._sockets.wait(0)
    more = server._receive(now)
    server.broker.tick(now, server._backlog.read_until)
    server._end_turn(now)
    return more


@pytest.mark.pure_only  # compiled code does not look up constants
def test_no_worker_is_dead_whose_messages_were_not_taken_in(monkeypatch):
    monkeypatch.setattr("zmdp.mdp.broker.io.loop.MAX_TURN_MESSAGES", 1)
    with Server(("inproc://server",), context=zmq.Context.instance()) as server, ExitStack() as stack:
        peers = [stack.enter_context(zmq.Context.instance().socket(zmq.DEALER)) for _ in range(5)]
        for peer in peers:
            peer.connect("inproc://server")
        peers[-1].send_multipart([b"MDPW02", b"\x01", b"echo"])
        while not server.broker.directory.workers:
            server._turn(0.0)
            server._sockets.wait(0)
        server._backlog = Backlog(0.0)
        server.connections.open = len(peers)  # inproc connections are not counted
        for peer in peers[:-1]:
            for _ in range(3):
                peer.send_multipart([b"MDPC02", b"\x01", b"other", b"x"])
        peers[-1].send_multipart([b"MDPW02", b"\x05"])
        for turn in range(13):
            take_in(server, 10.0 + turn)
            assert server.broker.directory.workers
        while take_in(server, 30.0):
            pass
        assert not server.broker.directory.workers


def test_it_has_as_many_connections_as_the_limit_of_open_files_allows():
    room = default_max_connections()
    with Server(("inproc://server",)) as server:
        assert (server.limits.max_connections, server.limits.max_connections_per_address) == (room, room // 2)
        assert server.broker.limits is server.limits
    with Server(("inproc://server",), ServerSettings(limits=Limits(max_connections=7))) as server:
        assert (server.limits.max_connections, server.limits.max_connections_per_address) == (7, 3)


def test_its_default_name_is_valid_however_long_that_of_its_host_is(monkeypatch):
    host = "zmdp-broker-of-the-team-for-image-processing-6c9f7d8b5-x2v4q.eu"  # the longest of a pod has 63 characters
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert default_name(["ipc://x", "tcp://127.0.0.1:5555"]) == f"{host[-59:]}:5555"
    with Server(["tcp://127.0.0.1:*"]) as server:
        assert host.endswith(server.broker.name.partition(f"-{os.getpid()}")[0])
    monkeypatch.setattr(socket, "gethostname", lambda: "left")
    assert default_name(["tcp://127.0.0.1:5555"]) == "left:5555"
    assert default_name(["tcp://127.0.0.1:*"]) == f"left-{os.getpid()}"


def test_it_warns_if_there_are_not_enough_descriptors(caplog):
    room = default_max_connections()
    with Server(("inproc://server",), ServerSettings(limits=Limits(max_connections=room + 1))):
        pass
    text = "max_connections is %d, but the limit of open files leaves room for %d: raise it (ulimit -n)"
    assert caplog.messages == [text % (room + 1, room)]


@pytest.mark.pure_only  # compiled methods cannot be replaced
@pytest.mark.parametrize("method", ["_settle", "_tick"])
def test_a_bug_neither_ends_the_loop_nor_loses_requests(method, monkeypatch):
    right, failed = getattr(Broker, method), threading.Event()

    def fails_once(self, *arguments):
        if not failed.is_set() and self.directory.unsettled + list(self.directory.workers.values()):
            failed.set()
            raise RuntimeError("a bug")
        return right(self, *arguments)

    with (
        Server(("tcp://127.0.0.1:*",), ServerSettings(limits=Limits(heartbeat=0.05, liveness=1000))) as server,
        zmq.Context() as context,
    ):
        monkeypatch.setattr(server.broker, method, MethodType(fails_once, server.broker))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            with context.socket(zmq.DEALER) as client, context.socket(zmq.DEALER) as worker:
                for each in (client, worker):
                    each.linger, each.rcvtimeo = 0, TIMEOUT_MS
                    each.connect(server.endpoints[0])
                client.send_multipart([b"MDPC02", b"\x01", b"echo", b"x"])
                worker.send_multipart([b"MDPW02", b"\x01", b"echo"])
                assert failed.wait(TIMEOUT_SECONDS)
                while (message := worker.recv_multipart())[1] == b"\x05":
                    worker.send_multipart([b"MDPW02", b"\x05"])
                worker.send_multipart([b"MDPW02", b"\x04", *message[2:]])
                assert client.recv_multipart() == [b"MDPC02", b"\x03", b"echo", b"x"]
        finally:
            server.stop()
            thread.join()
        assert server.broker.stats.internal_errors == 1


def turn(server):
    assert router(server).poll(TIMEOUT_MS)
    server._sockets.main.ready = True
    server._turn(time.monotonic())


def router(server):
    return server._sockets.main.socket


def leave(server, peer, fence):
    """Close the connection of the peer `me`, and wait until its routing id is free; the monitor is not read."""
    peer.close()
    while send(router(server), [b"me", b""]) != EHOSTUNREACH:
        router(server).poll(1)
    for _ in range(3):
        fence.send(b"MDPC02", b"\x01", b"mmi.fence", b"")
        turn(server)
        fence.recv()


@pytest.mark.parametrize("slow", [False, True], ids=["at once", "later"])
def test_c39_a_reply_does_not_reach_a_peer_that_has_just_taken_the_id(slow):
    """Nothing has read the monitor since the peer left, and the socket would send it."""
    with (
        Server(("tcp://127.0.0.1:*",)) as server,
        RawPeer(server.endpoints[0], b"me") as victim,
        RawPeer(server.endpoints[0]) as worker,
        RawPeer(server.endpoints[0]) as fence,
    ):
        worker.send(b"MDPW02", b"\x01", b"echo")
        turn(server)
        victim.send(b"MDPC02", b"\x01", b"echo", b"a secret")
        turn(server)
        address = worker.recv()[2]
        fence.send(b"MDPC02", b"\x01", b"mmi.fence", b"")
        turn(server)
        fence.recv()
        if slow:
            assert server._delivery.outbox.add([b"me", b"another secret"], 0)
        leave(server, victim, fence)
        assert not server._delivery.gone
        with RawPeer(server.endpoints[0], b"me") as thief:
            worker.send(b"MDPW02", b"\x04", address, b"", b"the reply")
            turn(server)
            if slow:
                server._delivery.retry(math.inf)
            thief.send(b"MDPC02", b"\x01", b"mmi.service", b"echo")
            turn(server)
            assert thief.recv() == [b"MDPC02", b"\x03", b"mmi.service", b"200"]


def test_c39_a_reply_of_the_same_turn_does_not_reach_a_peer_that_has_taken_the_id():
    with (
        Server(("tcp://127.0.0.1:*",)) as server,
        RawPeer(server.endpoints[0], b"me") as victim,
        RawPeer(server.endpoints[0]) as worker,
        RawPeer(server.endpoints[0]) as fence,
    ):
        fence.send(b"MDPC02", b"\x01", b"mmi.fence", b"")
        turn(server)
        fence.recv()
        worker.send(b"MDPW02", b"\x01", b"echo")
        turn(server)
        victim.send(b"MDPC02", b"\x01", b"echo", b"a secret")
        turn(server)
        address = worker.recv()[2]
        leave(server, victim, fence)
        worker.send(b"MDPW02", b"\x04", address, b"", b"the reply")
        receive_in_turn(server)
        with RawPeer(server.endpoints[0], b"me") as thief:
            thief.send(b"MDPC02", b"\x01", b"mmi.service", b"echo")
            receive_in_turn(server)
            server._end_turn(time.monotonic())
            assert thief.recv() == [b"MDPC02", b"\x03", b"mmi.service", b"200"]


def receive_in_turn(server):
    """Have the machine take in what arrives, without ending its turn."""
    assert router(server).poll(TIMEOUT_MS)
    server._sockets.main.ready = True
    server._receive(time.monotonic())


@pytest.mark.pure_only  # compiled methods cannot be replaced
def test_c17_a_worker_that_dies_within_a_turn_has_tried_what_it_received(monkeypatch):
    """Otherwise a request that kills its workers would get one more."""
    with (
        Server(("tcp://127.0.0.1:*",), ServerSettings(limits=Limits(max_attempts=1))) as server,
        RawPeer(server.endpoints[0], b"me") as victim,
    ):
        victim.send(b"", b"MDPWX1", b"\x09", ready_of(b"echo", 2))
        turn(server)
        port = server._sockets.main
        sends = port.send

        def dies_of_it(message):
            errno = sends(message)
            victim.close()
            while send(router(server), [b"me", b""]) != EHOSTUNREACH:
                router(server).poll(1)
            return errno

        monkeypatch.setattr(port, "send", dies_of_it)
        for number in (1, 2):  # so large that each is a message of its own
            server.broker.receive(request(number, body=bytes(600_000)), time.monotonic())
        server._end_turn(time.monotonic())
        server._delivery.report_gone(time.monotonic(), drained=True, rounds=1)
        assert server.broker.stats.dropped == {"workers-lost": 2}


def test_c39_a_request_is_not_tried_by_whoever_has_taken_the_id_of_a_worker():
    """It is not counted as an attempt either."""
    with (
        Server(("tcp://127.0.0.1:*",), ServerSettings(limits=Limits(max_attempts=1))) as server,
        RawPeer(server.endpoints[0], b"me") as victim,
        RawPeer(server.endpoints[0]) as client,
    ):
        client.send(b"MDPC02", b"\x01", b"mmi.fence", b"")
        turn(server)
        client.recv()
        victim.send(b"MDPW02", b"\x01", b"echo")
        turn(server)
        leave(server, victim, client)
        assert b"me" in server._sockets.main.chosen
        assert not server._delivery.gone
        with RawPeer(server.endpoints[0], b"me") as thief:
            client.send(b"MDPC02", b"\x01", b"echo", b"a secret")
            turn(server)
            assert server._delivery.report_gone(time.monotonic(), drained=True, rounds=1)
            server._end_turn(time.monotonic())
            registry = server.broker.registry
            assert (registry.running, registry.queued, server.broker.stats.dropped) == (0, 1, {})
            thief.send(b"MDPC02", b"\x01", b"mmi.service", b"echo")
            turn(server)
            assert thief.recv() == [b"MDPC02", b"\x03", b"mmi.service", b"404"]


def test_c39_generated_ids_start_anywhere():
    """Also in a context that was there before, and for the next socket in it."""
    starts = set()
    with zmq.Context() as context:
        for given in (None, None, context, context):
            ctypes.CDLL(None).srand(1)  # the state in which every process starts
            with (
                Server(("tcp://127.0.0.1:*",), context=given) as server,
                RawPeer(server.endpoints[0]).send(b"MDPC02", b"\x01", b"mmi.fence", b""),
            ):
                turn(server)
                starts |= server._sockets.main.known.keys()
    assert len(starts) == 4
    numbers = sorted(int.from_bytes(each, "big") for each in starts)
    assert min(later - earlier for earlier, later in pairwise(numbers)) > 10


def test_what_a_peer_sent_before_it_left_is_taken_in_however_much_others_send():
    """A broker that was held up finds thousands of messages; the end of a connection is reported before they are."""
    parts = 500
    with (
        Server(("tcp://127.0.0.1:*",)) as server,
        RawPeer(server.endpoints[0], b"me") as worker,
        RawPeer(server.endpoints[0]) as client,
        ExitStack() as stack,
    ):
        others = [stack.enter_context(RawPeer(server.endpoints[0])) for _ in range(4)]
        worker.send(b"MDPW02", b"\x01", b"parts")
        turn(server)
        client.send(b"MDPC02", b"\x01", b"parts", b"")
        turn(server)
        address = worker.recv()[2]
        for other in others:
            for _ in range(parts):
                other.send(b"MDPC02", b"\x01", b"mmi.fence", b"")
        for _ in range(parts):
            worker.send(b"MDPW02", b"\x03", address, b"", b"part")
        worker.send(b"MDPW02", b"\x04", address, b"", b"last")
        worker.close()
        while send(router(server), [b"me", b""]) != EHOSTUNREACH:
            router(server).poll(1)
        while b"me" not in server._delivery.gone:
            server._sockets.wait(0)
            server._end_turn(time.monotonic())
        while server._delivery.gone:
            server._turn(time.monotonic())
        assert [client.recv() for _ in range(parts)] == [[b"MDPC02", b"\x02", b"parts", b"part"]] * parts
        assert client.recv() == [b"MDPC02", b"\x03", b"parts", b"last"]


def test_the_machine_is_asked_what_to_send_until_it_was_told_nothing():
    """Opening a connection tells it something, so the request for the link goes out though nothing else happens."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.linger = 0
        port = other.bind_to_random_port("tcp://127.0.0.1")
        links = [LinkTo("peer", f"tcp://127.0.0.1:{port}")]
        with Server(("inproc://server",), ServerSettings(links=links), context=context) as server:
            while server._turn(server.broker.started + 0.001):
                pass
            assert other.poll(TIMEOUT_MS)


# ── the backlog ────────────────────────────────────────


def test_when_nothing_is_left_everything_has_been_read():
    backlog = Backlog(1.0)
    assert backlog.read_until == 1.0
    backlog.turn(2.0, turns=0)
    assert backlog.read_until == 2.0


def test_while_something_is_left_a_round_takes_as_many_turns_as_there_are_peers_to_read():
    backlog = Backlog(1.0)
    read = []
    for now in range(2, 10):
        backlog.turn(now, turns=3)
        read.append(backlog.read_until)
    assert read == [1.0, 1.0, 1.0, 2, 2, 2, 2, 6]


def test_a_round_ends_early_when_nothing_is_left():
    backlog = Backlog(1.0)
    backlog.turn(2.0, turns=3)
    backlog.turn(3.0, turns=0)
    assert backlog.read_until == 3.0
    for now in (4.0, 5.0, 6.0):
        backlog.turn(now, turns=3)
        assert backlog.read_until == 3.0
