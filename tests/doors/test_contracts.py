"""What every door keeps to, with real brokers, workers and processes: one contract, many doors.

The machines prove the rules themselves (`tests/simulation`, `tests/conformance`); here, that no door loses them.  What
a door cannot do is checked as well: its adapter says what that is.
"""

import threading
from contextlib import ExitStack

import pytest
from doors.adapters import BEATS, DOORS, Failed, failure_of, offered
from support.holding import Holding
from support.processes import SHORT_TIMEOUTS, TIMEOUT_SECONDS, broker, eventually, free_endpoint

from zmdp.mdp.limits import Limits
from zmdp.testing import running_broker
from zmdp.workers import ServiceError

PROCESS = ("--heartbeat", "0.2", "--liveness", "600")
NOBODY = "tcp://127.0.0.1:1"


streaming = pytest.mark.parametrize("kind", [name for name, kind in DOORS.items() if kind.streams], indirect=True)
brokered = pytest.mark.parametrize("kind", [name for name, kind in DOORS.items() if kind.brokered], indirect=True)


def echo(request):
    return list(request)


@pytest.fixture
def holding():
    """A handler that holds its requests at most until the test has ended."""
    handler = Holding()
    yield handler
    handler.let_go()


class Parts(Holding):
    """The same, which sends a part before and a part after."""

    def __call__(self, request):
        yield b"first"
        super().__call__(request)
        yield b"last"


@pytest.fixture
def parts():
    handler = Parts()
    yield handler
    handler.let_go()


def is_usable(door):
    """Whether the door serves another request, with a worker that holds nothing."""
    return door.begin(b"again").outcome() == [b"again"]


def rest_of(stream):
    """Return the parts that a stream still has, and what it ends with: None, or how it failed."""
    found = []
    try:
        for part in stream:
            found += [part] if part != [b""] else []
    except Exception as error:  # noqa: BLE001 - the contract looks at it
        return found, failure_of(error).kind
    return found, None


# ── replies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_call_gets_its_own_reply(door):
    with offered(door, echo):
        calls = [door.begin(b"%d" % number) for number in range(door.many)]
        assert [call.outcome() for call in calls] == [[b"%d" % number] for number in range(door.many)]


def test_a_failure_has_the_code_and_the_text_of_its_handler(door):
    def fail(request):
        if request[0] == b"chosen":
            raise ServiceError(422, "no good")
        raise ValueError("out of order")

    with offered(door, fail):
        assert door.begin(b"chosen").outcome() == Failed("failed", 422, "no good")
        assert door.begin(b"raised").outcome() == Failed("failed", 500, "ValueError: out of order")


def test_parts_arrive_while_the_handler_goes_on(door, parts):
    with offered(door, parts):
        if door.streams:
            stream = door.stream(b"x")
            assert list(next(stream)) == [b"first"]
            parts.let_go()
            assert rest_of(stream) == ([[b"last"]], None)
        else:
            call = door.begin(b"x")
            parts.wait_taken()
            parts.let_go()
            assert call.outcome()[:2] == [b"first", b"last"]


# ── callers that do not want a reply any more ────────────────────────────────────────────────────────────────────────


def check_end(handler, cancelled):
    """Check that the handler learns that its request was cancelled, or is left to finish it."""
    if cancelled:
        handler.wait_cancelled()
    handler.let_go()
    assert bool(handler.cancelled) == cancelled


def test_cancel(door, holding):
    with offered(door, holding):
        assert door.cancelled_once(holding.wait_taken, b"x") == Failed("cancelled")
        check_end(holding, door.cancels)
        assert is_usable(door)


def test_timeout(door, holding):
    with offered(door, holding):
        for seconds in SHORT_TIMEOUTS:
            outcome = door.begin(b"x", timeout=seconds).outcome()
            if holding.taken:  # the time may be over before
                break
        assert outcome.kind in door.overdue
        check_end(holding, door.timeout_cancels)
        assert is_usable(door)


@streaming
def test_a_stream_that_is_left_early(door, parts):
    with offered(door, parts):
        stream = door.stream(b"x")
        assert list(next(stream)) == [b"first"]
        parts.wait_taken()
        stream.close()
        check_end(parts, door.leaving_cancels)
        assert rest_of(door.stream(b"x")) == ([[b"first"], [b"last"]], None)


@streaming
def test_a_slow_reader(door, monkeypatch):
    """Its stream ends within bounds, or it gets everything: no other call suffers."""
    monkeypatch.setattr("zmdp.clients.calls.reply.MAX_UNREAD_BYTES", 10 * door.part_bytes)
    ended = threading.Event()
    many = 2000 if door.slow_reader == "interrupted" else 300

    def flood(request):
        try:
            for number in range(many):
                yield b"%d" % number + b"x" * door.part_bytes
        finally:
            ended.set()

    def read_late():
        """Read the first part, and the others when the worker has sent so much as it is to send."""
        ended.clear()
        stream = door.stream(b"x")
        next(stream)
        assert ended.wait(TIMEOUT_SECONDS)
        found, end = rest_of(stream)
        numbers = [int(part.rstrip(b"x")) for (part,) in found]
        assert numbers == list(range(1, len(numbers) + 1))
        return len(numbers), end

    with offered(door, flood):
        if door.slow_reader == "interrupted":
            read, _ = eventually(lambda: (found := read_late())[1] == "interrupted" and found)
            assert read < many / 2
        else:
            assert read_late() == (many - 1, None)


def test_closing_ends_what_is_outstanding(door, holding):
    with offered(door, holding):
        calls = [door.begin(b"%d" % number) for number in range(3)]
        holding.wait_taken(3)
        door.close()
        assert [call.outcome() for call in calls] == [Failed("closed")] * 3
        if door.closing_cancels:
            holding.wait_cancelled(3)
        holding.let_go()
        assert bool(holding.cancelled) == door.closing_cancels


# ── workers and brokers that are lost ────────────────────────────────────────────────────────────────────────────────


def test_a_request_outlives_its_worker(door):
    with door.worker() as lost:
        call = door.begin(b"x")
        assert lost.recv() == [b"x"]
        with offered(door, echo):
            lost.close()
            assert call.outcome() == [b"x"]


def test_the_last_worker_is_lost(kind, tmp_path):
    limits = Limits(max_attempts=1, **BEATS)
    with running_broker(limits=limits, drain_timeout=0.0) as server, kind(server.endpoints[0], tmp_path) as door:
        with door.worker() as lost:
            call = door.begin(b"x", timeout=TIMEOUT_SECONDS if door.last_loss.kind == "lost" else 1.0)
            assert lost.recv() == [b"x"]
            lost.close()
            assert call.outcome() == door.last_loss


@pytest.fixture
def killable(kind, tmp_path):
    """A door to a broker's process; `killable.restart` kills the broker and starts another at its endpoint."""
    at = free_endpoint()
    with ExitStack() as stack:
        process, _ = stack.enter_context(broker(*PROCESS, bind=at))
        door = stack.enter_context(kind(at, tmp_path))

        def restart():
            process.kill()
            stack.enter_context(broker(*PROCESS, bind=at))

        door.restart = restart
        yield door


@brokered
def test_a_request_outlives_its_broker(killable, holding):
    door = killable
    with offered(door, holding):
        call = door.begin(b"x", timeout=3.0 if door.protocol != "X1" else TIMEOUT_SECONDS, retries=100)
        holding.wait_taken()
        door.restart()
        holding.let_go()
        assert call.outcome() == [b"x"]


@streaming
def test_a_stream_does_not_repeat_what_it_has_delivered_when_its_broker_is_killed(killable, parts):
    door = killable
    with offered(door, parts):
        stream = door.stream(b"x", timeout=3.0 if door.protocol != "X1" else TIMEOUT_SECONDS)
        assert list(next(stream)) == [b"first"]
        door.restart()
        parts.let_go()
        expected = ([[b"last"]], None) if door.broken_stream == "continues" else ([], "interrupted")
        assert rest_of(stream) == expected


def test_nobody_listens(kind, tmp_path):
    with kind(NOBODY, tmp_path, served=False) as door:
        # It may take longer until that is known.
        eventually(lambda: door.begin(b"x", timeout=0.3).outcome() == Failed("unreachable"))
