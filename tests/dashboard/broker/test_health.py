"""/livez and /readyz of real processes."""

import asyncio
import os
import signal
import sys
import threading

import httpx
import pytest
from support.processes import TIMEOUT_SECONDS, alive, eventually, process
from support.web import serving, web_broker, web_server_of

from zmdp.clients import Client
from zmdp.dashboard.broker.observer import Observer, Unavailable
from zmdp.dashboard.broker.pages import DEAD_SECONDS, BrokerSection
from zmdp.mdp.cli.web import WebProcess
from zmdp.testing import running_broker


@pytest.fixture
def broker():
    with web_broker() as running:
        yield running


def test_a_broker_is_ready_until_its_loop_stands_still(plain):
    assert plain.get("/livez").json() == {"live": True}
    eventually(lambda: plain.get("/readyz").json() == {"ready": True, "reasons": []})
    plain.process.send_signal(signal.SIGSTOP)
    answer = eventually(lambda: (got := plain.get("/readyz")).status_code == 503 and got)
    assert not answer.json()["ready"]
    assert answer.json()["reasons"]
    assert plain.get("/livez").status_code == 200  # not for long enough to restart it
    plain.process.send_signal(signal.SIGCONT)
    eventually(lambda: plain.get("/readyz").status_code == 200)


def test_a_broker_that_drains_is_not_ready_but_still_shown(broker):
    begun, go_on = threading.Event(), threading.Event()

    def work(request):
        begun.set()
        assert go_on.wait(TIMEOUT_SECONDS)
        return list(request)

    with serving(broker.endpoint, "slow", work), Client(broker.endpoint, timeout=TIMEOUT_SECONDS) as client:
        caller = threading.Thread(target=client.request, args=("slow", b"x"))
        caller.start()
        assert begun.wait(TIMEOUT_SECONDS)
        broker.process.send_signal(signal.SIGINT)
        answer = eventually(lambda: (got := broker.get("/readyz")).status_code == 503 and got)
        assert "draining" in answer.json()["reasons"][0]
        broker.shows("/", "The broker is draining")
        broker.shows("/requests", "slow")
        server = web_server_of(broker.process.pid)
        go_on.set()
        caller.join()
    assert broker.process.wait() == 0
    assert not alive(server)
    assert "Traceback" not in broker.process.stderr


def test_a_web_server_that_dies_is_started_again_and_the_broker_goes_on(plain):
    first = web_server_of(plain.process.pid)
    os.kill(first, signal.SIGKILL)
    plain.process.line("the web server has ended with code -9; it restarts in 1 s")
    with Client(plain.endpoint, timeout=TIMEOUT_SECONDS) as client:
        assert client.request("mmi.service", b"x") == [b"404"]
    eventually(lambda: plain.get("/readyz").status_code == 200)
    assert web_server_of(plain.process.pid) not in {None, first}


def test_a_web_server_that_cannot_be_started_is_tried_again(monkeypatch, caplog):
    with (
        WebProcess("127.0.0.1", 0, log_level="info", log_format="text") as web,
        running_broker("tcp://127.0.0.1:*", web.endpoint) as broker,
    ):
        web.start(broker)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/no/such/file")
            web._process.kill()
            eventually(lambda: "cannot start the web server" in caplog.text)
        eventually(lambda: reachable(f"{web.url}readyz"))
        last = web._process
    web._launch()
    assert web._process is last  # none is started at the end
    assert last.returncode is not None
    assert last.stdin.closed


def reachable(url):
    try:
        return httpx.get(url, timeout=TIMEOUT_SECONDS).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_web_server_does_not_outlive_its_broker(broker):
    server = web_server_of(broker.process.pid)
    broker.process.send_signal(signal.SIGKILL)
    eventually(lambda: not alive(server))


def test_a_killed_brokers_folder_is_removed_at_the_next_start(tmp_path):
    def folders():
        return set(tmp_path.iterdir())

    with web_broker(TMPDIR=str(tmp_path)):
        lives = folders()
        with web_broker(TMPDIR=str(tmp_path)) as killed:
            (left,) = folders() - lives
            killed.process.send_signal(signal.SIGKILL)
            killed.process.wait()
        with web_broker(TMPDIR=str(tmp_path)) as next_one:
            (new,) = folders() - lives
            assert lives < folders()
            assert new != left
            assert next_one.process.end() == 0
        assert folders() == lives


def test_a_port_in_use_is_one_line(plain):
    with process("mdp-broker", "--bind", "tcp://127.0.0.1:*", "--http", f"127.0.0.1:{plain.port}") as second:
        assert second.wait() == 1
        assert second.stderr.splitlines() == [
            f"mdp-broker: cannot listen on 127.0.0.1:{plain.port}: Address already in use: another program listens "
            "there; use another port, or 0 for a free one"
        ]


class Observed(Observer):
    """An observer that has not been answered for a long time, and the answer that it gets now."""

    def __init__(self, answers):
        super().__init__(None)
        self.answers = answers

    async def now(self, service):
        if not self.answers:
            raise Unavailable("no answer")
        return service


@pytest.mark.parametrize("answers", [True, False])
def test_a_web_server_that_was_held_up_asks_the_broker_before_it_says_that_it_is_dead(answers):
    section = BrokerSection(Observed(answers))
    section._started -= DEAD_SECONDS
    assert asyncio.run(section.section().is_alive()) == answers
