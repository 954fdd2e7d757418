"""HTTP that is slow, huge or malformed: the broker does not notice."""

import socket
import time
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest
from support.processes import TIMEOUT_SECONDS, eventually

from zmdp.clients import Client
from zmdp.dashboard.broker.observer import MAX_QUESTIONS, Observer, Unavailable
from zmdp.gateways.upstream import raise_descriptor_limit


@pytest.fixture(scope="module")
def client(plain):
    with Client(plain.endpoint, timeout=TIMEOUT_SECONDS) as client:
        yield client


@pytest.fixture
def broker(plain):
    return plain


@pytest.fixture(autouse=True)
def unharmed(broker, client):
    """After each test, both the broker and its web server are as before."""
    before = broker.process.stderr.count("the web server has ended")
    yield
    assert client.request("mmi.service", b"x") == [b"404"]
    eventually(lambda: broker.get("/readyz").status_code == 200)
    assert "Traceback" not in broker.process.stderr
    assert broker.process.stderr.count("the web server has ended") == before


def connect(broker, stack=None):
    connection = socket.create_connection(("127.0.0.1", broker.port), timeout=TIMEOUT_SECONDS)
    return connection if stack is None else stack.enter_context(connection)


def answer_to(broker, *pieces):
    """Send bytes; return what comes back until the connection ends."""
    with connect(broker) as connection:
        answer = b""
        with suppress(ConnectionResetError, BrokenPipeError):
            for piece in pieces:
                connection.sendall(piece)
            while data := connection.recv(65536):
                answer += data
        return answer


GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\x00\xff" * 100, b"400"),
        (GET + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
        (GET + b"Content-Length: -1\r\n\r\n", b"400"),
        (GET + b"Host: two\r\n\r\n", b"400"),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", b"4"),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"4"),
        (b"GET /\xff\xfe%00%zz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"4"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc", b"405"),
        (GET + b'Cookie: zmdp_1="; \x01=; ====\r\nConnection: close\r\n\r\n', b""),
        (GET + b"Authorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n", b"200"),
    ],
    ids=range(10),
)
def test_malformed_requests_are_refused(broker, request_bytes, status):
    answer = answer_to(broker, request_bytes)
    assert answer.startswith(b"HTTP/1.1 " + status)


def test_a_websocket_is_not_opened(broker):
    with connect(broker) as connection:
        connection.sendall(
            GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )  # fmt: skip
        assert connection.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("length", [b"Content-Length: 1000000000", b"Transfer-Encoding: chunked"])
def test_a_huge_form_is_refused(broker, length):
    head = b"POST /requests/cancel HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + length + b"\r\n\r\n"
    pieces = [b"10000\r\n" + bytes(65536) + b"\r\n"] * 100
    answer = answer_to(broker, head, *pieces)
    assert answer[:12] in {b"HTTP/1.1 413", b"HTTP/1.1 403", b""}  # empty if it was still sending when it was refused


@pytest.mark.parametrize(
    "data", [b"", GET, GET + b"\r\n", b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx"],
    ids=["silent", "a fragment", "idle", "a fragment of a form"],
)  # fmt: skip
def test_probes_are_answered_whatever_waits(broker, client, data):
    raise_descriptor_limit(1500)
    with ExitStack() as stack:
        for number in range(1500):
            connect(broker, stack).sendall(data)
            if number % 500 == 499:
                assert [broker.get(path).status_code for path in ("/livez", "/readyz")] == [200, 200]
        assert client.request("mmi.service", b"x") == [b"404"]


def test_pages_that_stay_open_are_limited(broker):
    with ExitStack() as stack:
        statuses = []
        for _ in range(60):
            connection = connect(broker, stack)
            connection.sendall(b"GET /live/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
            statuses.append(connection.recv(12))
        assert statuses.count(b"HTTP/1.1 200") == 50
        assert statuses.count(b"HTTP/1.1 503") == 10
    eventually(lambda: opens(broker))


def test_visitors_cause_few_questions_to_the_broker(broker, client):
    before, began = client.call("mmi.stats")["mmi"], time.monotonic()
    with broker.client() as person:
        for number in range(200):
            assert person.get(f"/workers?service=unknown.{number}").status_code == 200
    took = time.monotonic() - began
    # Within a second so many about single services, and what snapshots and the lists take.
    assert client.call("mmi.stats")["mmi"] - before < (MAX_QUESTIONS + 10) * (took + 1)


def test_questions_about_single_services_are_limited(monkeypatch):
    now = 0.0
    monkeypatch.setattr("zmdp.dashboard.broker.observer.time", SimpleNamespace(monotonic=lambda: now))
    observer = Observer(None)
    for _ in range(MAX_QUESTIONS):
        observer.count_question()
    now = 0.9
    with pytest.raises(Unavailable, match="too many different pages are looked at"):
        observer.count_question()
    now = 1.1
    observer.count_question()


def opens(broker):
    with connect(broker) as connection:
        connection.sendall(b"GET /live/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return connection.recv(12) == b"HTTP/1.1 200"


def test_a_reader_that_never_reads_costs_no_memory(broker):
    with ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", broker.port))
            connection.sendall((GET + b"\r\n") * 80)
        eventually(lambda: broker.get("/readyz").status_code == 200)


def test_the_broker_has_loaded_nothing_of_this(broker):
    with open(f"/proc/{broker.process.pid}/maps") as maps:
        assert "uvloop" not in maps.read()
