"""The pages of gateways, with real ones."""

import json
import socket
from contextlib import ExitStack
from threading import Event

import pytest
from support import browser as browsers
from support.flux_client import FluxClient
from support.processes import TIMEOUT_SECONDS, eventually, process, run
from support.screen import Screen
from support.web import serving, web_broker

from zmdp.clients import Client
from zmdp.mdp.control import GATEWAY
from zmdp.mdp.errors import ServiceError

MARKUP = "<b>bold</b>"


@pytest.fixture(scope="module")
def broker():
    with web_broker() as broker:
        yield broker


@pytest.fixture(scope="module")
def gateway(broker):
    """An HTTP gateway, and where it listens."""
    at = ("--bind", "127.0.0.1:0", "--broker", broker.endpoint, "--name", "shop")
    patient = ("--keep-alive", "3600", "--header-timeout", "3600")  # idle connections stay until they have been seen
    with process("mdp-gateway", "http", *at, *patient) as it:
        url = it.line("http://", "stdout")
        eventually(lambda: "shop" in broker.text_of("/gateways").split())
        yield url


def test_connections_and_requests_of_an_http_gateway(broker, gateway):
    port, release = int(gateway.rpartition(":")[2]), Event()
    with ExitStack() as stack, Client(broker.endpoint, timeout=TIMEOUT_SECONDS) as client:
        stack.enter_context(serving(broker.endpoint, "hold", lambda request: release.wait(TIMEOUT_SECONDS) and b""))
        stack.callback(release.set)
        eventually(lambda: client.available("hold"))
        idle = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        asking = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        asking.sendall(b"POST /services/hold HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx")

        def status():
            return json.loads(client.request(f"{GATEWAY}shop", b'{"op": "status"}')[0])

        told = eventually(lambda: (told := status())["outstanding"] == 1 and told)
        assert {key: told[key] for key in ("kind", "name", "listen", "connections", "requests", "more")} == {
            "kind": "http", "name": "shop", "listen": gateway.strip(), "connections": 2, "requests": 1, "more": 0,
        }  # fmt: skip
        rows = {each["peer"]: each["outstanding"] for each in told["listed"]}
        peers = [f"127.0.0.1:{each.getsockname()[1]}" for each in (asking, idle)]
        assert rows == dict(zip(peers, (1, 0), strict=True))
        page = eventually(
            lambda: (page := broker.get("/gateway?name=shop").text).count('<tr id="connection-') == 2 and page
        )
        assert page.index(peers[0]) < page.index(peers[1])
        broker.shows("/gateways", f"shop http {gateway.strip()}")
    eventually(lambda: "Nobody is connected" in broker.get("/gateway?name=shop").text)


@pytest.mark.parametrize("question", [b"", b"{", b"[]", b'{"op": "drain"}', b"[" * 100_000])
def test_other_questions_are_refused(broker, gateway, question):
    with Client(broker.endpoint, timeout=TIMEOUT_SECONDS) as client, pytest.raises(ServiceError, match="op") as raised:
        client.request(f"{GATEWAY}shop", question)
    assert raised.value.code == 422


def test_connections_of_a_flux_gateway(broker, tmp_path):
    path = tmp_path / "flux"
    with process("mdp-gateway", "flux", "--socket", str(path), "--broker", broker.endpoint) as it:
        it.line("local://", "stdout")
        eventually(lambda: f"local://{path}" in broker.text_of("/gateways"))
        (name,) = {each for each in broker.shows("/gateways", "flux-").split() if each.startswith("flux-")}
        with FluxClient(str(path)):
            eventually(lambda: "user " in broker.text_of(f"/gateway?name={name}"))
        assert it.end() == 0
    eventually(lambda: f"local://{path}" not in broker.text_of("/gateways"))


def test_names():
    ended = run("mdp-gateway", "http", "--bind", "127.0.0.1:0", "--name", "a b")
    assert (ended.returncode, b"not a valid name" in ended.stderr) == (2, True)


def test_hostile_answers_are_shown_as_text_or_not_at_all(broker):
    answers = [
        b"", b"[]", b'{"kind": 5}',
        json.dumps({"kind": MARKUP, "listen": MARKUP, "connections": "x", "memory": 1e999, "listed": {"a": 1}}
                   ).encode(),
        json.dumps({"kind": "http", "listed": [1, {}, {"peer": MARKUP, "user": ["x"], "outstanding": -1}],
                    "up_seconds": "x", "pid": 10**300, "host": "\ud800"}).encode(),
    ]  # fmt: skip
    with ExitStack() as stack:
        for number, answer in enumerate(answers):
            stack.enter_context(serving(broker.endpoint, f"{GATEWAY}bad-{number}", lambda request, it=answer: it))
        names = {f"bad-{number}" for number in range(len(answers))}
        eventually(
            lambda: (
                names <= set((text := broker.text_of("/gateways")).split()) and "it has not answered yet" not in text
            )
        )
        eventually(lambda: "&lt;b&gt;bold" in broker.get("/gateways").text)
        for path in ["/gateways", *(f"/gateway?name={name}" for name in names)]:
            page = broker.get(path)
            assert page.status_code == 200
            assert MARKUP not in page.text
    assert "Traceback" not in broker.process.stderr


@pytest.mark.skipif(browsers.PROGRAM is None, reason="needs the browser Chromium: apt-get install chromium")
def test_in_a_browser(broker, gateway, tmp_path):
    port = int(gateway.rpartition(":")[2])
    with browsers.browser(tmp_path) as page, ExitStack() as stack:
        screen = Screen(page, tmp_path)
        screen.open(f"{broker.url}gateway?name=shop")
        eventually(lambda: screen.texts("#live") == ["live"])
        for _ in range(60):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        eventually(lambda: len(screen.texts("tbody tr")) == 50)
        screen.click("a[rel=next]")
        eventually(lambda: len(screen.texts("tbody tr")) == 10)
        screen.shortcut("ga", lambda: "shop" in screen.texts("tbody td:first-child"))
        eventually(lambda: screen.texts("#live") == ["live"])
        screen.screenshot("gateways")
        screen.click("tbody a")
        eventually(lambda: len(screen.texts("tbody tr")) == 50)
        screen.scheme("dark")
        screen.size(390, 844)
        for path in ("gateways", "gateway?name=shop"):
            screen.open(broker.url + path)
            eventually(lambda: screen.texts("#live") == ["live"])
            assert screen.script("return document.documentElement.scrollWidth <= 390"), path
        screen.screenshot("gateway-narrow-dark")
        assert screen.complaints() == []
