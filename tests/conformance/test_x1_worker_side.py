"""X1: what our workers say, seen by a broker made by hand (docs/reference/x1.md)."""

import json
import os
import struct
import threading
import time
from collections import deque
from contextlib import contextmanager

import pytest
from support.pace import BEAT, steadily
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


def test_a_handler_sees_the_options(router):
    seen = []
    with router.serve("echo", seen.append):
        sender = router.registered()
        router.give(sender, 1, b"x")
        assert router.reply()[:2] == (FINAL, 1)
        router.give(sender, 2, b"x", options='{"headers":{"a":"ö"},"key":[1]}'.encode(), ttl=60_000, attempt=2)
        assert router.reply()[:2] == (FINAL, 2)
    plain, rich = seen
    assert (plain.body, plain.attempt, plain.deadline, dict(plain.headers), dict(plain.options)) == (
        [b"x"], 1, None, {}, {},
    )  # fmt: skip
    assert (rich.attempt, rich.headers["a"], rich.options["key"]) == (2, "ö", [1])
    assert rich.deadline is not None


def test_large_frames_are_attachments(router):
    with router.serve("echo", list):
        sender = router.registered()
        large = b"x" * 10_000
        body = b"\0\x02" + b"\xff\xff\xff\xff" + b"\0\0\0\x01y"
        router.send(sender, *BATCH, record(2, 5, b"\0\0\0\0\x01\0\0" + body), large)
        assert router.recv() == [sender, *BATCH, record(4, 5, body), large]


# ── ERROR ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def fails(request):
    raise ValueError("no good")


def exits(request):
    raise SystemExit(3)


def gives_a_number(request):
    return 5


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


def test_after_a_partial_too(router):
    def stream(request):
        yield b"1"
        raise ValueError("no good")

    with router.serve("fails", stream):
        sender = router.registered(b"fails")
        router.give(sender, 7, b"x")
        assert router.reply() == (PARTIAL, 7, [b"1"])
        assert router.reply() == (ERROR, 7, [500, b"ValueError: no good"])


def test_no_traceback_leaves_the_worker(router):
    def secret_name_of_a_function(request):
        raise ValueError("x" * 100_000)

    with router.serve("fails", secret_name_of_a_function):
        sender = router.registered(b"fails")
        router.give(sender, 7, b"x")
        command, _, (code, text) = router.reply()
        assert (command, code) == (ERROR, 500)
        assert text.startswith(b"ValueError: xxx")
        assert len(text) <= 1000
        assert b"secret" not in text


def test_what_is_no_reply_is_the_handlers_failure(router):
    with router.serve("fails", gives_a_number):
        sender = router.registered(b"fails")
        router.give(sender, 7, b"x")
        command, address, (code, text) = router.reply()
        assert (command, address, code) == (ERROR, 7, 500)
        assert b"HandlerError" in text


@pytest.mark.parametrize(
    ("code", "text", "detail"),
    [
        (1000, "x", None), (-1, "x", None), ("422", "x", None), (4.5, "x", None), (422, 5, None), (422, "x", "text"),
        (422, "x", b"x" * (65 << 20)),
    ],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_an_error_that_cannot_be_sent_is_a_failure_of_the_handler(router, code, text, detail):
    def handler(request):
        raise ServiceError(code, text, detail)

    with router.serve("fails", handler):
        sender = router.registered(b"fails")
        for address in (1, 2):
            router.give(sender, address, b"x")
            command, number, told = router.reply()
            assert (command, number, told[0]) == (ERROR, address, 500)
            assert b"ServiceError" in told[1]


@each_failure
@pytest.mark.parametrize("protocol", ["0.2", "0.1"])
def test_other_protocols_have_a_final_in_its_place(router, handler, told, protocol):
    head, final = ([b"MDPW02"], b"\x04") if protocol == "0.2" else ([b"", b"MDPW01"], b"\x03")
    with Worker("fails", handler, broker=router.endpoint, protocol=protocol):
        sender, *ready = router.recv()
        assert ready == [*head, b"\x01", b"fails"]
        router.send(sender, *head, b"\x02", b"c", b"", b"x")
        assert router.recv() == [sender, *head, final, b"c", b"", b"zmdp.error", *told[:2]]


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


def test_a_request_that_is_cancelled_before_it_began_is_ended_without_its_handler(router):
    held = Held()
    with router.serve("slow", held, heartbeat=BEAT, liveness=1000):
        sender = router.registered(b"slow")
        router.give(sender, 1, b"x")
        assert held.taken.wait(TIMEOUT_SECONDS)
        router.give(sender, 2, b"x")
        router.cancel(sender, 2)
        command, number, told = router.reply()
        if command != RELEASE:  # it may have been returned before
            assert (command, number, told[0]) == (ERROR, 2, 499)
        held.let_go.set()
        assert router.reply() == (FINAL, 1, [b"let go"])
        assert len(held.requests) == 1


def test_a_stream_ends_at_the_part_after_cancel(router):
    go_on = threading.Event()

    def stream(request):
        yield b"1"
        turns = 0
        while not (request.cancelled or go_on.wait(0.01)):
            turns += 1
            assert turns < TIMEOUT_SECONDS / 0.01
        yield b"2"
        raise AssertionError("it is not asked for more")

    with router.serve("slow", stream, heartbeat=BEAT, liveness=1000):
        sender = router.registered(b"slow")
        router.give(sender, 7, b"x")
        assert router.reply() == (PARTIAL, 7, [b"1"])
        router.cancel(sender, 7)
        command, number, told = router.reply()
        assert (command, number, told[0]) == (ERROR, 7, 499)


@pytest.mark.parametrize("cancel", [record(8, 6), record(8, 7, b"more")], ids=["another address", "more"])
def test_cancel_that_is_not_for_this_request_is_ignored(router, cancel):
    held = Held()
    with router.serve("slow", held, heartbeat=BEAT, liveness=1000):
        sender = router.registered(b"slow")
        router.cancel(sender, 7)  # it holds none
        router.give(sender, 7, b"x")
        assert held.taken.wait(TIMEOUT_SECONDS)
        router.send(sender, *BATCH, cancel)
        router.send(sender, *HEARTBEAT)
        while router.recv() != [sender, *HEARTBEAT]:
            pass
        held.let_go.set()
        assert router.reply() == (FINAL, 7, [b"let go"])


# ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_on_disconnect_it_registers_again_on_a_new_connection(router):
    with router.serve("echo", list):
        first = router.registered()
        router.send(first, *HEARTBEAT)
        router.send(first, *GOODBYE)
        assert router.registered() != first


def test_a_request_that_disconnect_took_away_is_cancelled_and_not_ended(router):
    held = Held()
    with router.serve("slow", held, heartbeat=BEAT, liveness=1000):
        first = router.registered(b"slow")
        router.give(first, 7, b"x")
        assert held.taken.wait(TIMEOUT_SECONDS)
        router.send(first, *GOODBYE)
        assert router.registered(b"slow") != first
        assert held.requests[0].cancelled


def test_when_the_broker_is_silent_it_registers_again_on_a_new_connection(router):
    with router.serve("echo", list, heartbeat=BEAT, liveness=2):
        assert router.registered() != router.registered()


@pytest.mark.parametrize("sign", [[*BATCH, record(8, 7)], HEARTBEAT])
def test_what_the_broker_says_is_a_sign_of_life(sign):
    def play(liveness, pace):
        with Broker() as broker, broker.serve("echo", list, heartbeat=BEAT, liveness=liveness):
            sender = broker.registered()
            for _ in range(2 * liveness):  # twice as long as its patience
                assert broker.recv() == [sender, *HEARTBEAT]
                pace()
                broker.send(sender, *sign)

    steadily(play, 10)


def test_it_ends_with_disconnect(router):
    with router.serve("echo", list) as worker:
        sender = router.registered()
        worker.stop()
        assert router.said() == (sender, DISCONNECT, 0, b"")
        router.send(sender, *GOODBYE)
        assert worker.wait(timeout=TIMEOUT_SECONDS)


def test_it_does_not_wait_for_ever_for_a_broker_that_does_not_answer(router):
    with Worker("echo", list, broker=router.endpoint):
        sender = router.registered()
    assert router.said() == (sender, DISCONNECT, 0, b"")


def test_it_finishes_what_it_has_begun_and_waits_for_the_answer(router):
    held = Held()
    with router.serve("slow", held) as worker:
        sender = router.registered(b"slow")
        for address in (1, 2, 3):
            router.give(sender, address, b"%d" % address)
        assert held.taken.wait(TIMEOUT_SECONDS)
        worker.stop()
        said = [router.said() for _ in range(3)]  # what has not begun is returned, perhaps before that already
        assert {message[2] for message in said if message[1] == RELEASE} == {2, 3}
        assert (sender, DISCONNECT, 0, b"") in said
        held.let_go.set()
        assert router.said()[1:] == (FINAL, 1, [b"let go"])
        assert not worker.wait(timeout=0)
        router.send(sender, *GOODBYE)
        assert worker.wait(timeout=TIMEOUT_SECONDS)
    assert [request.body for request in held.requests] == [[b"1"]]


def test_what_crosses_its_disconnect_is_returned(router):
    held = Held()
    with router.serve("slow", held) as worker:
        sender = router.registered(b"slow")
        router.give(sender, 1, b"x")
        assert held.taken.wait(TIMEOUT_SECONDS)
        worker.stop()
        assert router.said() == (sender, DISCONNECT, 0, b"")
        router.give(sender, 2, b"x")
        assert router.said()[1:3] == (RELEASE, 2)
        held.let_go.set()
        assert router.said()[1:] == (FINAL, 1, [b"let go"])
        router.send(sender, *GOODBYE)
        assert worker.wait(timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize(
    "noise",
    [
        [b"", b"MDPWX1", b"\x02", b"7", b"", b"", b"x"],
        [b"", b"MDPWX1", b"\x06"],
        BATCH,
        [*BATCH, b""],
        [*BATCH, b"junk"],
        [*BATCH, b"\xff" * 100, b"attachment"],
        [*BATCH, record(99, 7)],
        [*BATCH, record(2, 7)],
        [*BATCH, record(2, 7, b"\0\0\0\0\x01\0\0" + b"\0\0")],
        [*BATCH, record(2, 7, b"\0\0\0\0\x01\0\0" + b"\0\x01" + b"\xff\xff\xff\xff")],
        [*BATCH, record(2, 7, b"\0\0\0\0\x01\0\x01x" + b"\0\x01" + b"\0\0\0\0")],
        [b"", b"MDPCX1", b"\x09", record(3, 7, b"\0\x01" + b"\0\0\0\0")],
        [b"MDPW02", b"\x02", b"c", b"", b"x"],
        [b"MDPW02", b"\x06"],
        [b"", b"MDPW01", b"\x05"],
        [b"", b"MDPCX1", b"\x09", record(7, 0)],
        [b"junk"],
        [b""],
    ],
)
def test_what_is_no_command_is_ignored(router, noise):
    with router.serve("echo", list):
        sender = router.registered()
        router.send(sender, *noise)
        router.give(sender, 8, b"y")
        assert router.reply() == (FINAL, 8, [b"y"])
