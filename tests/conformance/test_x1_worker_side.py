"""X1: what our workers say, seen by a broker made by hand (docs/reference/x1.md)."""

import json
import os
import struct
import threading
import time
from collections import deque
from contextlib import contextmanager

import pytest
from support.pace import BEAT
from support.peers import record, records_of, take_body
from support.processes import TIMEOUT_SECONDS
from support.router import Router

from zmdp.workers import RequestCancelled, ServiceError, Worker

HEARTBEAT = [b"", b"MDPWX1"]
BATCH = [b"", b"MDPWX1", b"\x09"]
GOODBYE = [*BATCH, record(6, 0)]

READY, PARTIAL, FINAL, DISCONNECT, ERROR, CREDIT, RELEASE = 1, 3, 4, 6, 7, 10, 11


class Broker(Router):
    """A broker made by hand."""

    def __init__(self):
        super().__init__()
        self._heard = deque()

    def registered(self, service=b"echo"):
        """The address of a worker that sends READY."""
        sender, command, number, rest = self.said()
        length = rest[4]
        assert (command, number, rest[5 : 5 + length]) == (READY, 0, service)
        return sender

    def said(self):
        """The next record: sender, command, id, and the rest."""
        while not self._heard:
            sender, *frames = self.recv()
            if frames == HEARTBEAT:
                continue
            assert frames[:3] == BATCH
            attachments = deque(frames[4:])
            for command, number, rest in records_of(frames, 1):
                if command in {PARTIAL, FINAL}:
                    rest = take_body(rest, attachments)  # noqa: PLW2901
                elif command == ERROR:
                    code, length = struct.unpack_from(">HH", rest)
                    rest = [code, rest[4 : 4 + length], *take_body(rest[4 + length :], attachments)]  # noqa: PLW2901
                self._heard.append((sender, command, number, rest))
            assert not attachments
        return self._heard.popleft()

    def reply(self):
        """The next that is no CREDIT either, without its sender."""
        while (message := self.said())[1] == CREDIT:
            pass
        return message[1:]

    def give(self, sender, address, *body, options=b"", ttl=0, attempt=1):
        """Send REQUEST."""
        parts = [struct.pack(">I", len(frame)) + frame for frame in body]
        head = struct.pack(">IBH", ttl, attempt, len(options)) + options + struct.pack(">H", len(body))
        self.send(sender, *BATCH, record(2, address, head + b"".join(parts)))

    def cancel(self, sender, address):
        self.send(sender, *BATCH, record(8, address))

    @contextmanager
    def serve(self, service, handler, **settings):
        """Run a worker; at its end, answer its DISCONNECT, unless the test has done that."""
        with Worker(service, handler, broker=self.endpoint, **settings) as worker:
            yield worker
            worker.stop()
            while not worker.wait(timeout=0):
                if (message := self.said())[1] == DISCONNECT:
                    self.send(message[0], *GOODBYE)
                    assert worker.wait(timeout=TIMEOUT_SECONDS)


@pytest.fixture
def router():
    with Broker() as router:
        yield router


def counting(request):
    yield b"1"
    yield [b"2", b"more"]
    return b"end"


def test_a_worker_sends_ready_once_then_heartbeats(router):
    with router.serve("echo", list, heartbeat=BEAT, liveness=1000, name="resize"):
        sender, *frames = router.recv()
        assert frames[:3] == BATCH
        ((command, number, rest),) = records_of(frames, 1)
        assert (command, number, rest[:9]) == (READY, 0, b"\0\0\0\x01\x04echo")
        (length,) = struct.unpack_from(">H", rest, 9)
        assert len(rest) == 11 + length
        told = json.loads(rest[11:])
        assert (told["name"], told["pid"]) == ("resize", os.getpid())
        assert told["host"]
        assert told["version"]
        assert [router.recv() for _ in range(3)] == [[sender, *HEARTBEAT]] * 3


def test_c35_a_broker_that_answers_every_heartbeat_gets_no_more_of_them(router):
    # C35
    began = time.monotonic()
    with router.serve("echo", list, heartbeat=BEAT, liveness=1000):
        sender = router.registered()
        for _ in range(6):
            assert router.recv() == [sender, *HEARTBEAT]
            router.send(sender, *HEARTBEAT)
        assert time.monotonic() - began > 5 * BEAT


def test_a_function_sends_one_final(router):
    with router.serve("echo", list):
        sender = router.registered()
        for address, options in ((2**64 - 1, b""), (0, b"{}"), (7, b'{"ttl":60000,"key":[1]}')):
            router.give(sender, address, b"a", b"", options=options)
            assert router.reply() == (FINAL, address, [b"a", b""])


def test_a_generator_sends_partials_then_one_final(router):
    with router.serve("count", counting):
        sender = router.registered(b"count")
        router.give(sender, 7, b"x")
        assert [router.reply() for _ in range(3)] == [
            (PARTIAL, 7, [b"1"]),
            (PARTIAL, 7, [b"2", b"more"]),
            (FINAL, 7, [b"end"]),
        ]


# ── ERROR ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def fails(request):
    raise ValueError("no good")


def exits(request):
    raise SystemExit(3)


def chooses(request):
    raise ServiceError(422, "größer als", b"\x00detail")


def has_no_detail(request):
    raise ServiceError(7, "seven")


FAILURES = [
    (fails, [b"500", b"ValueError: no good"]),
    (exits, [b"500", b"SystemExit: 3"]),
    (chooses, [b"422", "größer als".encode(), b"\x00detail"]),
    (has_no_detail, [b"007", b"seven", b""]),  # a detail shows that the error is the service's own
]
each_failure = pytest.mark.parametrize(("handler", "told"), FAILURES, ids=[each[0].__name__ for each in FAILURES])


@each_failure
def test_a_handler_that_fails_ends_the_request_with_error(router, handler, told):
    with router.serve("fails", handler):
        sender = router.registered(b"fails")
        for address in (1, 2):  # and the worker goes on serving
            router.give(sender, address, b"x")
            assert router.reply() == (ERROR, address, [int(told[0]), *told[1:]])


# ── CANCEL ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Held:
    """A handler that holds its request until it is cancelled, or let go."""

    def __init__(self, *, raises=False):
        self.taken = threading.Event()
        self.let_go = threading.Event()
        self.requests = []
        self.raises = raises

    def __call__(self, request):
        self.requests.append(request)
        self.taken.set()
        turns = 0
        while not (request.cancelled or self.let_go.wait(0.01)):
            turns += 1
            assert turns < TIMEOUT_SECONDS / 0.01
        if self.raises and request.cancelled:
            raise RequestCancelled("nobody waits")
        return b"cancelled" if request.cancelled else b"let go"


@pytest.mark.parametrize("raises", [False, True])
def test_cancel_is_told_to_the_handler_which_still_ends_the_request(router, raises):
    held = Held(raises=raises)
    with router.serve("slow", held, heartbeat=BEAT, liveness=1000):
        sender = router.registered(b"slow")
        for address in (1, 2):
            held.taken.clear()
            router.give(sender, address, b"x")
            assert held.taken.wait(TIMEOUT_SECONDS)
            router.cancel(sender, address)
            command, number, told = router.reply()
            assert number == address
            assert (command, told[0]) == ((ERROR, 499) if raises else (FINAL, b"cancelled"))
        assert [request.cancelled for request in held.requests] == [True, True]


# ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_on_disconnect_it_registers_again_on_a_new_connection(router):
    with router.serve("echo", list):
        first = router.registered()
        router.send(first, *HEARTBEAT)
        router.send(first, *GOODBYE)
        assert router.registered() != first


def test_it_ends_with_disconnect(router):
    with router.serve("echo", list) as worker:
        sender = router.registered()
        worker.stop()
        assert router.said() == (sender, DISCONNECT, 0, b"")
        router.send(sender, *GOODBYE)
        assert worker.wait(timeout=TIMEOUT_SECONDS)
