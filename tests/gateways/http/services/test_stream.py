"""Replies as server-sent events."""

import asyncio
import gc
import json
import threading

import httpx
import pytest
from support.garbage import no_collector
from support.gateways import running_gateway
from support.processes import SHORT_TIMEOUTS, TIMEOUT_SECONDS, eventually

from zmdp.clients.calls.reply import Reply
from zmdp.gateways.gateway import Gateway, Settings
from zmdp.gateways.http.services import stream
from zmdp.mdp.errors import ServiceError
from zmdp.mdp.http.problems import TYPE_BASE, Problem
from zmdp.workers import Worker

EVENTS = {"accept": "text/event-stream"}
ASK = b"POST /services/%s HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\ncontent-length: %d\r\n\r\n%s"
MIB = 1 << 20


def part(*frames, final=False):
    return Reply(frames, service="x", final=final)


def parsed(text):
    """Return the events in a stream as a browser reads them."""
    found = []
    for block in text.split("\n\n")[:-1]:
        fields = [line.partition(": ")[::2] for line in block.split("\n") if not line.startswith(":")]
        data = "\n".join(value for name, value in fields if name == "data")
        if fields:
            found.append((dict(fields).get("event"), data))
    return found


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([b""], b"event: partial\ndata: \n\n"),
        ([b"a\n\nb"], b"event: partial\ndata: a\ndata: \ndata: b\n\n"),
        (["é".encode()], "event: partial\ndata: é\n\n".encode()),
        ([b" :\x00"], b"event: partial\ndata:  :\x00\n\n"),
        ([b"\r"], b'event: partial-base64\ndata: ["DQ=="]\n\n'),
        ([b"\xff"], b'event: partial-base64\ndata: ["/w=="]\n\n'),
        ([b"a", b""], b'event: partial-base64\ndata: ["YQ==", ""]\n\n'),
    ],
)
def test_an_event(frames, expected):
    assert stream.event("partial", frames) == expected


class _Client:
    """Notes what is cancelled."""

    def __init__(self):
        self.client = self
        self.cancelled = []

    def cancel(self, call):
        self.cancelled.append(call)


class TestEvents:
    def events(self, max_unread=1000):
        self.client = _Client()
        self.gateway = Gateway(self.client, Settings(max_unread=max_unread, max_memory=5000))
        found = stream.Events(self.gateway, "x", 10.0)
        found.call = "call"
        return found

    def test_an_error_after_a_part_is_the_last_event(self):
        events = self.events()
        events.put(part(b"1"))
        events.put(ServiceError(409, "taken"))
        (_, (name, data)) = parsed(asyncio.run(events.take()).decode())
        assert name == "error"
        assert json.loads(data)["detail"] == "taken"

    def test_a_reader_that_is_too_slow(self):
        events = self.events(max_unread=1000)
        for _ in range(10):
            events.put(part(b"x" * 200))
        assert self.client.cancelled == ["call"]
        found = parsed(asyncio.run(events.take()).decode())
        assert [name for name, _ in found] == ["partial"] * (len(found) - 1) + ["error"]
        assert json.loads(found[-1][1])["type"] == TYPE_BASE + "slow-reader"
        assert len(found) < 10

    def test_all_readers_together_are_too_slow(self):
        events = self.events(max_unread=10_000)
        self.gateway.memory = 4900
        events.put(part(b"x" * 200))
        assert self.client.cancelled == ["call"]
        found = parsed(asyncio.run(events.take()).decode())
        assert json.loads(found[-1][1])["type"] == TYPE_BASE + "overloaded"
        assert self.gateway.memory == 4900

    def test_a_final_is_never_too_much(self):
        events = self.events(max_unread=1000)
        events.put(part(b"x" * 2000, final=True))
        assert parsed(asyncio.run(events.take()).decode()) == [("final", "x" * 2000)]
        assert self.client.cancelled == []

    def test_comments_only_while_nothing_else_waits(self):
        events = self.events()
        events.remind()
        events.remind()
        assert asyncio.run(events.take()) == b":\n\n"
        events.fail(Problem("slow-reader", "x"))
        events.remind()
        assert asyncio.run(events.take()).count(b":\n\n") == 0


def test_parts_arrive_as_events(http):
    with http.stream("POST", "/services/binary", headers=EVENTS) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        text = response.read().decode()
    assert parsed(text) == [
        ("partial-base64", '["/wA="]'),
        ("partial-base64", '["dHdv", "ZnJhbWVz"]'),
        ("partial", "lines\nof\n\ntext"),
        ("final", ""),
    ]


def test_an_error_in_the_middle_is_an_event(http):
    for timeout in SHORT_TIMEOUTS:
        answer = http.post("/services/endless", content=b"1", headers={**EVENTS, "request-timeout": f"{timeout:g}"})
        if answer.status_code == 200:  # there was time for a first part
            break
    *parts, (name, data) = parsed(answer.text)
    assert {name for name, _ in parts} == {"partial"}
    assert (name, json.loads(data)["status"]) == ("error", 504)


def test_comments_keep_a_silent_stream_alive(endpoint, services, monkeypatch):
    monkeypatch.setattr(stream, "KEEP_ALIVE_SECONDS", 0.05)
    with running_gateway(endpoint) as gateway, gateway.connect() as client:
        client.send(ASK % (b"hold", 6, b"silent"))
        client.until(b":\n\n")
        client.until(b":\n\n")
    eventually(lambda: b"silent" in services.cancelled)


def test_nothing_is_left_of_a_stream(endpoint, services):
    """The request's body may be large: it is freed with the last reference, without the garbage collector."""
    with no_collector():
        with running_gateway(endpoint) as gateway:
            assert httpx.post(f"{gateway.url}/services/parts", content=b"2", headers=EVENTS).text.count("event: ") == 3
            eventually(lambda: not any(type(each) is stream.Events for each in gc.get_objects()))


def largest_queue():
    """Watch the queues of events; return a function that stops and returns the largest size seen."""
    sizes = [0]
    original = stream.Events._add

    def add(self, data):
        original(self, data)
        sizes.append(self._unread)

    stream.Events._add = add

    def stop():
        stream.Events._add = original
        return max(sizes)

    return stop


def test_ten_thousand_parts_take_no_memory(endpoint, services):
    room = threading.Semaphore(100)

    def paced(request):
        for _ in range(10_000):
            assert room.acquire(timeout=TIMEOUT_SECONDS)
            yield b"x" * 10_000

    stop = largest_queue()
    try:
        head = b"POST /services/paced HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\nconnection: close\r\n"
        with (
            Worker("paced", paced, broker=endpoint),
            running_gateway(endpoint, max_unread=64 * MIB) as gateway,
            gateway.connect() as client,
        ):
            client.send(head + b"prefer: wait=600\r\n\r\n")
            received = bytearray(MIB)
            count = size = 0
            rest = b""
            while read := client.socket.recv_into(received):
                text = rest + received[:read]
                for _ in range(text.count(b"event: partial\n")):
                    count += 1
                    room.release()
                size += read
                rest = bytes(text[text.rfind(b"\n") + 1 :])
        assert size > 100_000_000
        assert b"event: error" not in text
        assert count == 10_000
    finally:
        largest = stop()
    assert largest < 4 * MIB  # of 100: those that the reader has not read yet
