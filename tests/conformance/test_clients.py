"""The client's side of MDP/0.2 (C1 to C4), and the one socket for all (C11)."""

import pytest
from support.peers import Bench


def test_c01_a_dealer_speaks_without_a_leading_empty_frame(bench: Bench) -> None:
    # C1
    client, worker = bench.client(), bench.worker(b"echo")
    client.send(b"MDPC02", b"\x01", b"echo", b"hello")
    worker.final(worker.work(b"hello"), b"world")
    assert client.recv() == [b"MDPC02", b"\x03", b"echo", b"world"]


@pytest.mark.parametrize("body", [[b"one"], [b""], [b"a", b"", b"c"], [b"", b""], [b"x" * 200_000, b"\x00\xff"]])
def test_c02_the_body_is_opaque_frames_in_any_number(bench: Bench, body: list[bytes]) -> None:
    # C2, C7
    client, worker = bench.client(), bench.worker(b"echo")
    client.send(b"MDPC02", b"\x01", b"echo", *body)
    worker.final(worker.work(*body), *body)
    client.final(b"echo", *body)


def test_c03_any_number_of_partials_then_one_final_then_nothing(bench: Bench) -> None:
    # C3, C8
    client, worker = bench.client(), bench.worker(b"count")
    client.request(b"count", b"100")
    address = worker.work(b"100")
    for number in range(100):
        worker.partial(address, b"%d" % number, b"")
    worker.final(address, b"end")
    for number in range(100):
        assert client.recv() == [b"MDPC02", b"\x02", b"count", b"%d" % number, b""]
    assert client.recv() == [b"MDPC02", b"\x03", b"count", b"end"]
    worker.nothing()
    client.nothing()


def test_c03_partials_are_passed_on_at_once(bench: Bench) -> None:
    # C3
    client, worker = bench.client(), bench.worker(b"count")
    client.request(b"count", b"")
    address = worker.work(b"")
    for number in (b"1", b"2", b"3"):
        worker.partial(address, number)
        client.partial(b"count", number)
    worker.final(address, b"end")
    client.final(b"count", b"end")


def test_c04_one_request_after_the_other_on_one_connection(bench: Bench) -> None:
    # C4
    client, worker = bench.client(), bench.worker(b"echo")
    for number in range(50):
        client.request(b"echo", b"%d" % number)
        worker.final(worker.work(b"%d" % number), b"reply %d" % number)
        client.final(b"echo", b"reply %d" % number)


def test_c05_a_client_that_resends_on_a_new_socket_is_answered_there(bench: Bench) -> None:
    # C5, as far as the broker is concerned: the request of the closed socket harms nobody.
    first, worker = bench.client(), bench.worker(b"echo")
    first.request(b"echo", b"again")
    lost = worker.work(b"again")
    first.close()
    second = bench.client()
    second.request(b"echo", b"again")
    second.sync()
    worker.final(lost, b"too late")
    worker.final(worker.work(b"again"), b"here")
    second.final(b"echo", b"here")
    second.nothing()


def test_c11_clients_and_workers_share_one_socket(bench: Bench) -> None:
    # C11
    assert len(bench.server.endpoints) == 1
    one, other = bench.client(), bench.client()
    worker = bench.worker(b"echo")
    one.request(b"echo", b"1")
    one.sync()
    other.request(b"echo", b"2")
    worker.final(worker.work(b"1"), b"reply to 1")
    worker.final(worker.work(b"2"), b"reply to 2")
    one.final(b"echo", b"reply to 1")
    other.final(b"echo", b"reply to 2")


def test_c11_one_connection_may_be_client_and_worker_at_once(bench: Bench) -> None:
    # C11
    both, client = bench.worker(b"front"), bench.client()
    behind = bench.worker(b"back")
    client.request(b"front", b"question")
    address = both.work(b"question")
    both.send(b"MDPC02", b"\x01", b"back", b"sub-question")
    behind.final(behind.work(b"sub-question"), b"sub-answer")
    assert both.recv() == [b"MDPC02", b"\x03", b"back", b"sub-answer"]
    both.final(address, b"answer")
    client.final(b"front", b"answer")
