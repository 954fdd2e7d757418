"""MDP/0.1 on the same socket (C24)."""

from collections.abc import Callable
from typing import Any

import pytest
from support.peers import Bench, Client, OldClient, OldWorker, Worker


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
