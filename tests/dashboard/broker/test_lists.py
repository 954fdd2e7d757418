"""Lists that are longer than one answer of the broker, with a real one."""

import re
from contextlib import contextmanager

import pytest
import zmq
from support.peers import ready_of
from support.processes import TIMEOUT_SECONDS, eventually
from support.web import form_token, web_broker

from zmdp.clients import Client
from zmdp.mdp.errors import RequestCancelled

WORKERS = 10_000
REQUESTS = 600


@contextmanager
def workers(endpoint, count):
    """Register many workers, of 100 services, over one connection."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.LINGER, 0)
        socket.connect(endpoint)
        for number in range(count):
            ready = ready_of(b"tenant.%02d" % (number % 100), 1, b'{"name":"worker-%05d"}' % number)
            socket.send_multipart([b"%d" % number, b"", b"MDPWX1", b"\x09", ready])
        yield


def shown(page, kind):
    """Return the rows of a table, as texts of their cells."""
    rows = re.findall(rf'<tr id="{kind}-[^"]*">(.*?)</tr>', page.text, re.DOTALL)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in rows]
    return [[" ".join(re.sub(r"<[^>]*>", " ", cell).split()) for cell in row] for row in cells]


@pytest.fixture(scope="module")
def broker():
    with web_broker("--heartbeat", "60") as broker, Client(broker.endpoint, timeout=TIMEOUT_SECONDS) as client:
        with workers(broker.endpoint, WORKERS):
            eventually(lambda: client.call("mmi.stats")["workers"] == WORKERS)
            yield broker


def names(page):
    return [row[2] for row in shown(page, "worker")]


def complete(broker, path, text):
    """Wait until a page contains `text`: it shows a list when the broker has answered all questions about it."""
    return eventually(lambda: text in (page := broker.get(path)).text and page)


def test_all_workers_are_listed(broker):
    page = complete(broker, "/workers?sort=name", "1–50 of 10\N{THIN SPACE}000 connections")
    assert "not listed" not in page.text
    assert names(page) == [f"worker-{number:05}" for number in range(50)]
    assert names(complete(broker, "/workers?sort=name&page=200", "worker-"))[-1] == "worker-09999"
    assert names(complete(broker, "/workers?sort=-name", "worker-"))[0] == "worker-09999"


def test_workers_beyond_the_first_answer_are_found(broker):
    assert names(complete(broker, "/workers?q=WORKER-0987&sort=name", "worker-")) == [
        f"worker-{number:05}" for number in range(9870, 9880)
    ]
    page = complete(broker, "/workers?service=tenant.42", "of 100 connections")
    assert {row[3] for row in shown(page, "worker")} == {"tenant.42"}


def test_requests_beyond_the_first_answer_are_listed_and_cancelled(broker):
    with Client(broker.endpoint, timeout=TIMEOUT_SECONDS) as client:
        waiting = [client.submit(f"nobody.{number:03}", b"x") for number in range(REQUESTS)]
        page = eventually(
            lambda: f"of {REQUESTS} requests" in (page := broker.get("/requests?sort=-service")).text and page
        )
        assert next(row[1] for row in shown(page, "request")) == f"nobody.{REQUESTS - 1}"
        found = complete(broker, "/requests?q=nobody.59&sort=service", "nobody.599")
        assert [row[1] for row in shown(found, "request")] == [f"nobody.{number}" for number in range(590, 600)]
        with broker.client(follow_redirects=True) as http:
            token = form_token(http.get("/requests").text)
            id_ = shown(complete(broker, "/requests?q=nobody.599", 'id="request-'), "request")[0][9]
            after = http.post("/requests/cancel", data={"form_token": token, "id": id_, "service": ""})
            assert after.status_code == 200
            complete(broker, "/requests", f"of {REQUESTS - 1} requests")
        with pytest.raises(RequestCancelled):
            waiting.pop().result(TIMEOUT_SECONDS)
        for each in waiting:
            each.cancel()
