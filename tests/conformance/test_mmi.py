"""MMI: what the broker answers itself (C25, C26)."""

import json

import pytest
from support.peers import Bench, ready_of


def test_c26_service_is_200_while_a_worker_is_registered(bench: Bench) -> None:
    # C26
    client, worker = bench.client(), bench.worker()

    def asked(status: bytes) -> None:
        client.send(b"MDPC02", b"\x01", b"mmi.service", b"echo")
        # the reply is a FINAL whose service is the mmi name, with one frame
        assert client.recv() == [b"MDPC02", b"\x03", b"mmi.service", status]

    asked(b"404")
    worker.ready(b"echo")
    worker.sync()
    asked(b"200")
    worker.disconnect()
    worker.sync()
    asked(b"404")


def test_c26_a_busy_worker_counts(bench: Bench) -> None:
    # C26
    client, worker = bench.client(), bench.worker(b"echo")
    client.request(b"echo", b"hello")
    address = worker.work(b"hello")
    assert bench.status(b"echo") == b"200"
    worker.final(address, b"world")
    assert bench.status(b"echo") == b"200"


def test_c26_a_service_only_asked_for_is_404(bench: Bench) -> None:
    # C26
    client = bench.client()
    client.request(b"nobody", b"hello")
    client.sync()
    assert bench.stats()["queued"] == 1
    assert bench.status(b"nobody") == b"404"


@pytest.mark.parametrize(
    "name", [b"mmi.nope", b"mmi.", b"mmi.Service", b"mmi.service.", b"mmi.services.x", b"mmi.mmi."]
)
def test_c26_an_unknown_mmi_service_is_501(bench: Bench, name: bytes) -> None:
    # C26
    client = bench.client()
    client.request(name, b"echo")
    assert client.recv() == [b"MDPC02", b"\x03", name, b"501"]
    client.nothing()


@pytest.mark.parametrize("name", [b"mmi.service", b"mmi.nope", b"mmi.", b"mmi.stats"])
def test_c25_a_worker_that_registers_an_mmi_service_is_disconnected(bench: Bench, name: bytes) -> None:
    # C25
    client, worker = bench.client(), bench.worker()
    worker.ready(name)
    assert worker.recv() == [b"MDPW02", b"\x06"]
    worker.nothing()
    assert bench.stats()["workers"] == bench.stats()["services"] == 0
    client.request(b"mmi.service", name)
    client.final(b"mmi.service", b"404")
    worker.nothing()
    worker.ready(b"echo")
    worker.nothing()
    assert bench.status(b"echo") == b"200"


@pytest.mark.parametrize("name", [b"mmi.services", b"mmi.workers", b"mmi.stats", b"mmi.broker"])
def test_c25_mmi_services_beyond_the_rfc_reply_with_one_frame_of_json(bench: Bench, name: bytes) -> None:
    # C25
    client, worker = bench.client(), bench.worker("größer".encode())
    client.request(b"nobody", b"hello")
    client.request("größer".encode(), b"hello")
    worker.work(b"hello")
    for about in (b"", b"nobody", "größer".encode(), b"\xff\x00"):
        assert isinstance(json.loads(bench.mmi(name, about)), dict)


def test_c25_mmi_stats_reports_all_counts(bench: Bench) -> None:
    # C25, C15
    client, worker = bench.client(), bench.worker(b"echo")
    client.request(b"echo", b"1")
    client.request(b"echo", b"2")
    client.request(b"nobody", b"3")
    client.send(b"rubbish")
    client.sync()
    address = worker.work(b"1")
    worker.partial(address, b"part")
    worker.final(address, b"all")
    worker.work(b"2")
    bench.worker().heartbeat()
    bench.until(lambda: bench.stats()["disconnected"] == {"not-registered": 1})
    stats = bench.stats()
    told = {
        key: stats[key] for key in ("services", "workers", "queued", "running", "partials", "replies", "dispatched")
    }
    assert told == {
        "services": 2, "workers": 1, "queued": 1, "running": 1, "partials": 1, "replies": 1, "dispatched": 2
    }  # fmt: skip
    assert stats["invalid"] == {"no-header": 1}


def test_a_service_is_described_to_clients_of_any_dialect(bench: Bench) -> None:
    worker, client = bench.worker(), bench.client()
    about = b'{"version":"1.4","description":"Say \\u001b it."}'
    worker.send(b"", b"MDPWX1", b"\x09", ready_of(b"echo", 1, b'{"about":' + about + b"}"))
    worker.sync()
    client.send(b"MDPC02", b"\x01", b"mmi.describe", b"echo")
    *head, answer = client.recv()
    assert head == [b"MDPC02", b"\x03", b"mmi.describe"]
    described = json.loads(answer)
    assert (described["service"], described["workers"], described["brokers"]) == ("echo", 1, [])
    assert described["abouts"] == [{"workers": 1, "about": {"version": "1.4", "description": "Say ? it."}}]
    client.send(b"MDPC02", b"\x01", b"mmi.describe", b"nobody")
    assert client.recv() == [b"MDPC02", b"\x03", b"mmi.describe", b"404"]
