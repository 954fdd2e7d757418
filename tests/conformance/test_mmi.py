"""MMI: what the broker answers itself (C25, C26)."""

import pytest
from support.peers import Bench


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
