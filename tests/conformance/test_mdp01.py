"""MDP/0.1 on the same socket (C24)."""

from collections.abc import Callable
from typing import Any

import pytest
import zmq
from support.peers import Bench, Client, OldClient, OldWorker, Worker

Start = Callable[..., Bench]


def test_c24_the_layouts_of_mdp_01(bench: Bench) -> None:
    # C24
    client, worker = bench.peer(), bench.peer()
    worker.send(b"", b"MDPW01", b"\x01", b"echo")
    worker.sync()
    client.send(b"", b"MDPC01", b"echo", b"hello", b"", b"3")
    message = worker.recv()
    address = message[3]
    assert message == [b"", b"MDPW01", b"\x02", address, b"", b"hello", b"", b"3"]
    worker.send(b"", b"MDPW01", b"\x04")
    worker.send(b"", b"MDPW01", b"\x03", address, b"", b"world", b"")
    assert client.recv() == [b"", b"MDPC01", b"echo", b"world", b""]
    worker.send(b"", b"MDPW01", b"\x05")
    worker.nothing()
    assert bench.status(b"echo") == b"404"


@pytest.mark.parametrize("client_kind", [Client, OldClient])
@pytest.mark.parametrize("worker_kind", [Worker, OldWorker])
def test_c24_any_client_reaches_any_worker(
    bench: Bench, client_kind: Callable[..., Any], worker_kind: Callable[..., Any]
) -> None:
    # C24
    client, worker = bench.connect(client_kind), bench.connect(worker_kind)
    worker.ready(b"echo")
    worker.sync()
    for number in range(3):
        client.request(b"echo", b"hello", b"%d" % number)
        worker.final(worker.work(b"hello", b"%d" % number), b"world", b"%d" % number)
        client.final(b"echo", b"world", b"%d" % number)
    client.nothing()
    worker.nothing()


def test_c24_workers_of_both_dialects_serve_one_service(bench: Bench) -> None:
    # C24, C21
    new, old = bench.worker(b"echo"), bench.old_worker(b"echo")
    for client in (bench.client(), bench.old_client()):
        for worker in (new, old):
            client.request(b"echo", b"hello")
            worker.final(worker.work(b"hello"), b"world")
            client.final(b"echo", b"world")


def test_c24_a_request_goes_from_a_dead_worker_to_one_of_the_other_dialect(bench: Bench) -> None:
    # C24, C17
    client, old = bench.client(), bench.old_worker(b"echo")
    client.request(b"echo", b"hello")
    old.work(b"hello")
    old.disconnect()
    old.nothing()
    new = bench.worker(b"echo")
    new.work(b"hello")
    new.disconnect()
    new.nothing()
    last = bench.old_worker(b"echo")
    last.final(last.work(b"hello"), b"world")
    client.final(b"echo", b"world")


def test_c24_an_old_client_gets_the_partials_and_the_final_in_one_reply(bench: Bench) -> None:
    # C24
    client, worker = bench.old_client(), bench.worker(b"count")
    client.request(b"count", b"3")
    address = worker.work(b"3")
    worker.partial(address, b"1", b"one")
    worker.partial(address, b"2")
    worker.nothing()
    client.nothing()  # not yet
    worker.partial(address, b"")
    worker.final(address, b"3", b"end")
    assert client.recv() == [b"", b"MDPC01", b"count", b"1", b"one", b"2", b"", b"3", b"end"]
    client.nothing()
    client.request(b"count", b"0")  # nothing is left over for the next
    worker.final(worker.work(b"0"), b"end")
    client.final(b"count", b"end")


@pytest.mark.parametrize(
    ("limits", "parts"),
    [({"max_message": 100_000}, [b"x" * 30_000] * 4), ({"max_frames": 30}, [b"x"] * 31)],
    ids=["bytes", "frames"],
)
def test_c24_the_collected_reply_is_bounded_by_the_message_limit(
    start: Start, limits: dict[str, int], parts: list[bytes]
) -> None:
    # C24: the request is given up, and the worker is none the worse for it
    bench = start(**limits)
    client, worker = bench.old_client(), bench.worker(b"count")
    client.request(b"count", b"too much")
    address = worker.work(b"too much")
    for part in parts:
        worker.partial(address, part)
    worker.final(address, b"end")
    worker.nothing()
    client.nothing()
    assert bench.stats()["dropped"] == {"reply-too-large": 1}
    client.request(b"count", b"less")
    address = worker.work(b"less")
    worker.partial(address, parts[0])
    worker.final(address, b"end")
    client.final(b"count", parts[0], b"end")


def test_c24_streamed_partials_are_not_bounded_as_a_whole(start: Start) -> None:
    # C3, C24
    bench = start(max_message=100_000, max_frames=30)
    client, worker = bench.client(), bench.worker(b"count")
    client.request(b"count", b"much")
    address = worker.work(b"much")
    for _ in range(50):
        worker.partial(address, b"x" * 30_000)
        client.partial(b"count", b"x" * 30_000)
    worker.final(address, b"end")
    client.final(b"count", b"end")


UNEXPECTED: dict[str, list[bytes]] = {
    "HEARTBEAT": [b"", b"MDPW01", b"\x04"],
    "REPLY": [b"", b"MDPW01", b"\x03", b"7", b"", b"body"],
}


@pytest.mark.parametrize("frames", UNEXPECTED.values(), ids=UNEXPECTED)
def test_c24_an_unregistered_0_1_worker_gets_a_0_1_disconnect(bench: Bench, frames: list[bytes]) -> None:
    # C24, C14
    worker = bench.old_worker()
    worker.send(*frames)
    assert worker.recv() == [b"", b"MDPW01", b"\x05"]
    worker.ready(b"echo")
    worker.nothing()
    assert bench.status(b"echo") == b"200"


def test_c24_a_second_ready_disconnects_a_0_1_worker(bench: Bench) -> None:
    # C24, C14, C17
    client, worker = bench.old_client(), bench.old_worker(b"echo")
    client.request(b"echo", b"hello")
    worker.work(b"hello")
    worker.ready(b"echo")
    worker.disconnected()
    worker.nothing()
    other = bench.old_worker(b"echo")
    other.final(other.work(b"hello"), b"world")
    client.final(b"echo", b"world")


def test_c24_a_req_socket_is_a_client_of_mdp_01(bench: Bench) -> None:
    # C24: as in many of the Guide's examples
    client, worker = bench.peer(kind=zmq.REQ), bench.old_worker(b"echo")
    for _ in range(2):
        client.send(b"MDPC01", b"echo", b"hello")
        worker.final(worker.work(b"hello"), b"world")
        assert client.recv() == [b"MDPC01", b"echo", b"world"]


def test_c24_mmi_in_mdp_01(bench: Bench) -> None:
    # C24, C25, C26
    client, worker = bench.old_client(), bench.old_worker(b"echo")
    for service, status in ((b"echo", b"200"), (b"nobody", b"404")):
        client.request(b"mmi.service", service)
        client.final(b"mmi.service", status)
    client.request(b"mmi.nope", b"")
    client.final(b"mmi.nope", b"501")
    intruder = bench.old_worker()
    intruder.ready(b"mmi.service")
    intruder.disconnected()
    worker.nothing()


@pytest.mark.parametrize("body", [[b"world"], [b"world", b""], [b"two", b"frames"]], ids=len)
def test_c33_a_reply_without_the_empty_frame_is_accepted(bench: Bench, body: list[bytes]) -> None:
    # C33: so does the Guide's PHP worker
    for client in (bench.client(), bench.old_client(), bench.x1_client()):
        worker = bench.old_worker(b"echo")
        client.request(b"echo", b"hello")
        worker.send(b"", b"MDPW01", b"\x03", worker.work(b"hello"), *body)
        client.final(b"echo", *body)
        worker.nothing()
        worker.disconnect()
    assert bench.stats()["invalid"] == {}


def test_c33_a_reply_without_the_empty_frame_must_have_a_valid_address(bench: Bench) -> None:
    # C33, C18, C32
    client, worker = bench.client(), bench.old_worker(b"echo")
    client.request(b"echo", b"hello")
    address = worker.work(b"hello")
    worker.send(b"", b"MDPW01", b"\x03", address, b"world")
    worker.send(b"", b"MDPW01", b"\x03", address, b"world")
    client.final(b"echo", b"world")
    worker.nothing()
    assert bench.stats()["late"] == 1
    worker.send(b"", b"MDPW01", b"\x03", b"7", b"world")
    worker.disconnected()
    client.nothing()


def test_c33_only_0_1_may_omit_the_empty_frame(bench: Bench) -> None:
    # C33, C15
    client, worker = bench.client(), bench.worker(b"echo")
    client.request(b"echo", b"hello")
    address = worker.work(b"hello")
    worker.send(*worker.head, b"\x04", address, b"world", b"more")
    worker.nothing()
    worker.final(address, b"world")
    client.final(b"echo", b"world")
    assert bench.stats()["invalid"] == {"no-delimiter": 1}
