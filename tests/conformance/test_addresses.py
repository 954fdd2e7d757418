"""Addresses (C32): one for each dispatch, so that a reply counts once, and for the request that it is a reply to."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import zmq
from support.peers import Bench, Client, OldClient, OldWorker, Worker, X1Client, X1Worker

each_worker = pytest.mark.parametrize("worker_kind", [OldWorker, Worker, X1Worker])
each_client = pytest.mark.parametrize("client_kind", [OldClient, Client, X1Client])


def registered(bench: Bench, kind: Callable[..., Any], service: bytes = b"echo") -> Any:
    worker = bench.connect(kind)
    worker.ready(service)
    worker.sync()
    return worker


@each_worker
@each_client
def test_c32_a_second_final_does_not_answer_the_next_request(
    bench: Bench, worker_kind: Callable[..., Any], client_kind: Callable[..., Any]
) -> None:
    client, worker = bench.connect(client_kind), registered(bench, worker_kind)
    client.request(b"echo", b"1")
    first = worker.work(b"1")
    worker.final(first, b"reply to 1")
    client.final(b"echo", b"reply to 1")
    client.request(b"echo", b"2")
    second = worker.work(b"2")
    assert second != first
    worker.final(first, b"reply to 1")
    worker.nothing()
    client.nothing()
    assert bench.stats()["running"] == 1
    worker.final(second, b"reply to 2")
    client.final(b"echo", b"reply to 2")
    assert bench.stats()["late"] == 1


@each_worker
def test_c32_a_worker_that_repeats_every_message_misleads_none_of_twenty_callers(
    bench: Bench, worker_kind: Callable[..., Any]
) -> None:
    # Seen: 7 of 20 callers received somebody else's reply.
    clients = [bench.client() for _ in range(20)]
    worker = registered(bench, worker_kind)
    for number, client in enumerate(clients):
        client.request(b"echo", b"%d" % number)
        client.sync()
    for number in range(20):
        address = worker.work(b"%d" % number)
        for _ in range(2):
            worker.final(address, b"reply to %d" % number)
    worker.nothing()
    for number, client in enumerate(clients):
        client.final(b"echo", b"reply to %d" % number)
        client.nothing()
    assert bench.stats()["late"] == 20


@each_worker
def test_c32_a_late_final_is_dropped_after_the_request_went_to_another_worker(
    bench: Bench, worker_kind: Callable[..., Any]
) -> None:
    client, slow = bench.client(), registered(bench, worker_kind)
    client.request(b"echo", b"hello")
    address = slow.work(b"hello")
    slow.break_rules()
    other = bench.worker(b"echo")
    anew = other.work(b"hello")
    assert anew != address
    slow.ready(b"echo")
    for body in (b"too late", b"and again"):
        slow.final(address, body)
    slow.nothing()
    client.nothing()
    other.final(anew, b"in time")
    client.final(b"echo", b"in time")
    client.nothing()
    assert bench.stats()["late"] == 2


def test_c32_addresses_are_printable_and_never_repeat(bench: Bench) -> None:
    client, seen = bench.client(), set()
    kinds = [OldWorker, Worker, X1Worker]
    for kind in kinds * 2:
        worker = registered(bench, kind)
        for _ in range(25):
            client.request(b"echo", b"hello")
        client.sync()
        for _ in range(25):
            address = worker.work(b"hello")
            assert address.isascii()
            assert address.decode().isprintable()
            assert 1 <= len(address) <= 255
            assert address not in seen
            seen.add(address)
            worker.final(address, b"world")
            client.final(b"echo", b"world")
        worker.break_rules()
        worker.close()


SECRET = b"routing-id-of-somebody"


@each_worker
@each_client
def test_c32_no_worker_sees_a_routing_id(
    bench: Bench, worker_kind: Callable[..., Any], client_kind: Callable[..., Any]
) -> None:
    client = bench.connect(client_kind, options={zmq.IDENTITY: SECRET})
    worker = registered(bench, worker_kind)
    client.request(b"echo", b"hello")
    message = worker.command()
    assert not any(SECRET in frame for frame in message)
    (peer,) = bench.server.broker.directory.clients
    assert peer == SECRET  # or nothing was proved


@each_worker
def test_c32_no_peer_learns_a_workers_routing_id(bench: Bench, worker_kind: Callable[..., Any]) -> None:
    client, worker = bench.client(), bench.connect(worker_kind, options={zmq.IDENTITY: SECRET})
    worker.ready(b"echo")
    worker.sync()
    for name in (b"mmi.workers", b"mmi.services", b"mmi.stats", b"mmi.broker"):
        told = bench.mmi(name, b"")
        assert SECRET not in told
        assert SECRET.hex().encode() not in told
    (row,) = json.loads(bench.mmi(b"mmi.workers", b"echo"))["workers"]
    assert isinstance(row["id"], int)
    client.request(b"echo", b"hello")
    worker.final(worker.work(b"hello"), b"world")
    assert client.recv() == [b"MDPC02", b"\x03", b"echo", b"world"]


def test_c18_a_partial_to_undefined_after_each_final_costs_no_caller_its_reply(bench: Bench) -> None:
    # Seen: nodejs-mdp02's worker with an asynchronous handler.  Told to go, it reconnects with a handler pending, and
    # answers the next request with the old body: 13 of 160 callers received somebody else's reply.
    clients = [bench.client() for _ in range(160)]
    worker = bench.worker(b"echo")
    for number, client in enumerate(clients):
        client.request(b"echo", b"%d" % number)
        client.sync()
    for number in range(160):
        worker.final(worker.work(b"%d" % number), b"reply to %d" % number)
        worker.partial(b"undefined", b"reply to %d" % number)
    worker.nothing()
    for number, client in enumerate(clients):
        client.final(b"echo", b"reply to %d" % number)
        client.nothing()
    assert bench.stats()["invalid"] == {"bad-address": 160}
    assert bench.stats()["disconnected"] == bench.stats()["lost"] == {}


@pytest.mark.parametrize("worker_kind", [OldWorker, Worker])
def test_c18_only_a_flood_of_such_addresses_ends_the_workers_registration(
    bench: Bench, worker_kind: Callable[..., Any]
) -> None:
    worker = registered(bench, worker_kind)
    for _ in range(100):
        worker.final(b"undefined", b"x")
    worker.nothing()
    worker.final(b"undefined", b"x")
    worker.disconnected()
    assert bench.stats()["disconnected"] == {"reply-without-request": 1}
    assert bench.status(b"echo") == b"404"
    worker.ready(b"echo")
    worker.sync()
    assert bench.status(b"echo") == b"200"
