"""X1: what our workers say, seen by a broker made by hand (docs/x1.md)."""

import threading

import pytest
from support.router import Router

from zmdp.workers import RequestCancelled, ServiceError, Worker

BEAT = 0.05
"""The heartbeat interval here, in seconds."""
PATIENCE = 10.0
HEARTBEAT = [b"MDPWX1", b"\x05"]


@pytest.fixture
def router():
    with Router() as router:
        yield router


def command(router):
    """The next message that is no HEARTBEAT."""
    while (message := router.recv())[1:] == HEARTBEAT:
        pass
    return message


def registered(router, service=b"echo"):
    """The address of a worker that sends READY."""
    sender, *frames = command(router)
    assert frames == [b"MDPWX1", b"\x01", service]
    return sender


def counting(request):
    yield b"1"
    yield [b"2", b"more"]
    return b"end"


def test_a_worker_sends_ready_once_then_heartbeats(router):
    with Worker("echo", list, broker=router.endpoint, heartbeat=BEAT, liveness=100):
        sender, *frames = router.recv()
        assert frames == [b"MDPWX1", b"\x01", b"echo"]
        assert [router.recv() for _ in range(3)] == [[sender, *HEARTBEAT]] * 3


def test_a_function_sends_one_final(router):
    with Worker("echo", list, broker=router.endpoint):
        sender = registered(router)
        for options in (b"", b"{}", b'{"ttl":1,"key":[1]}'):
            router.send(sender, b"MDPWX1", b"\x02", b"\x00client", b"", options, b"a", b"")
            assert command(router) == [sender, b"MDPWX1", b"\x04", b"\x00client", b"", b"a", b""]


def test_a_generator_sends_partials_then_one_final(router):
    with Worker("count", counting, broker=router.endpoint):
        sender = registered(router, b"count")
        router.send(sender, b"MDPWX1", b"\x02", b"c", b"", b"", b"x")
        assert [command(router)[1:] for _ in range(3)] == [
            [b"MDPWX1", b"\x03", b"c", b"", b"1"],
            [b"MDPWX1", b"\x03", b"c", b"", b"2", b"more"],
            [b"MDPWX1", b"\x04", b"c", b"", b"end"],
        ]


def test_a_handler_sees_the_options(router):
    seen = []
    with Worker("echo", seen.append, broker=router.endpoint):
        sender = registered(router)
        for options in (b"", '{"ttl":60000,"headers":{"a":"ö"},"key":[1],"attempt":2}'.encode()):
            router.send(sender, b"MDPWX1", b"\x02", b"c", b"", options, b"x")
            assert command(router)[2] == b"\x04"
    plain, rich = seen
    assert (plain.body, plain.attempt, plain.deadline, dict(plain.headers), dict(plain.options)) == (
        [b"x"], 1, None, {}, {},
    )  # fmt: skip
    assert (rich.attempt, rich.headers["a"], rich.options["key"]) == (2, "ö", [1])
    assert rich.deadline is not None


def test_options_that_grew_on_their_way_are_taken(router):
    options = b'{"k":"' + b"\\u00e9" * 30_000 + b'"}'
    with Worker("echo", lambda request: request.options["k"].encode(), broker=router.endpoint):
        sender = registered(router)
        router.send(sender, b"MDPWX1", b"\x02", b"c", b"", options, b"x")
        assert command(router)[5:] == [("é" * 30_000).encode()]


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
    (has_no_detail, [b"007", b"seven"]),
]
each_failure = pytest.mark.parametrize(("handler", "told"), FAILURES, ids=[each[0].__name__ for each in FAILURES])


@each_failure
def test_a_handler_that_fails_ends_the_request_with_error(router, handler, told):
    with Worker("fails", handler, broker=router.endpoint):
        sender = registered(router, b"fails")
        for _ in range(2):  # and the worker goes on serving
            router.send(sender, b"MDPWX1", b"\x02", b"c", b"", b"", b"x")
            assert command(router) == [sender, b"MDPWX1", b"\x07", b"c", b"", *told]


def test_after_a_partial_too(router):
    def stream(request):
        yield b"1"
        raise ValueError("no good")

    with Worker("fails", stream, broker=router.endpoint):
        sender = registered(router, b"fails")
        router.send(sender, b"MDPWX1", b"\x02", b"c", b"", b"", b"x")
        assert command(router)[1:] == [b"MDPWX1", b"\x03", b"c", b"", b"1"]
        assert command(router)[1:] == [b"MDPWX1", b"\x07", b"c", b"", b"500", b"ValueError: no good"]


def test_no_traceback_leaves_the_worker(router):
    def secret_name_of_a_function(request):
        raise ValueError("x" * 100_000)

    with Worker("fails", secret_name_of_a_function, broker=router.endpoint):
        sender = registered(router, b"fails")
        router.send(sender, b"MDPWX1", b"\x02", b"c", b"", b"", b"x")
        *_, code, text = command(router)
        assert code == b"500"
        assert text.startswith(b"ValueError: xxx")
        assert len(text) <= 1000
        assert b"secret" not in text


def test_what_is_no_reply_is_the_handlers_failure(router):
    with Worker("fails", gives_a_number, broker=router.endpoint):
        sender = registered(router, b"fails")
        router.send(sender, b"MDPWX1", b"\x02", b"c", b"", b"", b"x")
        *head, text = command(router)
        assert head == [sender, b"MDPWX1", b"\x07", b"c", b"", b"500"]
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

    with Worker("fails", handler, broker=router.endpoint):
        sender = registered(router, b"fails")
        for _ in range(2):
            router.send(sender, b"MDPWX1", b"\x02", b"c", b"", b"", b"x")
            *head, told = command(router)
            assert head == [sender, b"MDPWX1", b"\x07", b"c", b"", b"500"]
            assert b"ServiceError" in told


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
            assert turns < PATIENCE / 0.01
        if self.raises and request.cancelled:
            raise RequestCancelled("nobody waits")
        return b"cancelled" if request.cancelled else b"let go"


@pytest.mark.parametrize("raises", [False, True])
def test_cancel_is_told_to_the_handler_which_still_ends_the_request(router, raises):
    held = Held(raises=raises)
    with Worker("slow", held, broker=router.endpoint, heartbeat=BEAT, liveness=200):
        sender = registered(router, b"slow")
        for _ in range(2):
            router.send(sender, b"MDPWX1", b"\x02", b"c", b"", b"", b"x")
            router.send(sender, b"MDPWX1", b"\x08", b"c", b"")
            message = command(router)
            if raises:
                assert message[:6] == [sender, b"MDPWX1", b"\x07", b"c", b"", b"499"]
            else:
                assert message == [sender, b"MDPWX1", b"\x04", b"c", b"", b"cancelled"]
        assert [request.cancelled for request in held.requests] == [True, True]


def test_a_stream_ends_at_the_part_after_cancel(router):
    go_on = threading.Event()

    def stream(request):
        yield b"1"
        turns = 0
        while not (request.cancelled or go_on.wait(0.01)):
            turns += 1
            assert turns < PATIENCE / 0.01
        yield b"2"
        raise AssertionError("it is not asked for more")

    with Worker("slow", stream, broker=router.endpoint, heartbeat=BEAT, liveness=200):
        sender = registered(router, b"slow")
        router.send(sender, b"MDPWX1", b"\x02", b"c", b"", b"", b"x")
        assert command(router)[2:] == [b"\x03", b"c", b"", b"1"]
        router.send(sender, b"MDPWX1", b"\x08", b"c", b"")
        assert command(router)[2:6] == [b"\x07", b"c", b"", b"499"]


@pytest.mark.parametrize(
    "cancel",
    [[b"MDPWX1", b"\x08", b"other", b""], [b"MDPWX1", b"\x08", b"c"], [b"MDPWX1", b"\x08", b"c", b"", b"more"]],
    ids=["another client", "no delimiter", "more"],
)
def test_cancel_that_is_not_for_this_request_is_ignored(router, cancel):
    held = Held()
    with Worker("slow", held, broker=router.endpoint, heartbeat=BEAT, liveness=200):
        sender = registered(router, b"slow")
        router.send(sender, b"MDPWX1", b"\x08", b"c", b"")  # it holds none
        router.send(sender, b"MDPWX1", b"\x02", b"c", b"", b"", b"x")
        assert held.taken.wait(PATIENCE)
        router.send(sender, *cancel)
        router.send(sender, b"MDPWX1", b"\x05")
        while router.recv() != [sender, *HEARTBEAT]:
            pass
        held.let_go.set()
        assert command(router)[2:] == [b"\x04", b"c", b"", b"let go"]


# ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_on_disconnect_it_registers_again_on_a_new_connection(router):
    with Worker("echo", list, broker=router.endpoint):
        first = registered(router)
        router.send(first, b"MDPWX1", b"\x05")
        router.send(first, b"MDPWX1", b"\x06")
        assert registered(router) != first


def test_a_request_that_disconnect_took_away_is_cancelled_and_not_ended(router):
    held = Held()
    with Worker("slow", held, broker=router.endpoint, heartbeat=BEAT, liveness=200):
        first = registered(router, b"slow")
        router.send(first, b"MDPWX1", b"\x02", b"c", b"", b"", b"x")
        assert held.taken.wait(PATIENCE)
        router.send(first, b"MDPWX1", b"\x06")
        assert registered(router, b"slow") != first
        assert held.requests[0].cancelled


def test_when_the_broker_is_silent_it_registers_again_on_a_new_connection(router):
    with Worker("echo", list, broker=router.endpoint, heartbeat=BEAT, liveness=2):
        assert registered(router) != registered(router)


def test_cancel_is_a_sign_of_life(router):
    with Worker("echo", list, broker=router.endpoint, heartbeat=BEAT, liveness=10):
        sender = registered(router)
        for _ in range(20):  # twice as long as its patience
            assert router.recv() == [sender, *HEARTBEAT]
            router.send(sender, b"MDPWX1", b"\x08", b"c", b"")


def test_it_ends_with_disconnect(router):
    with Worker("echo", list, broker=router.endpoint):
        sender = registered(router)
    assert command(router) == [sender, b"MDPWX1", b"\x06"]


@pytest.mark.parametrize(
    "noise",
    [
        [b"MDPWX1"],
        [b"MDPWX1", b"\x02", b"c", b"", b""],
        [b"MDPWX1", b"\x02", b"c", b"", b"no JSON", b"x"],
        [b"MDPWX1", b"\x02", b"c", b"no delimiter", b"", b"x"],
        [b"MDPWX1", b"\x07", b"c", b"", b"500", b"x"],
        [b"MDPWX1", b"\x09"],
        [b"MDPW02", b"\x02", b"c", b"", b"x"],
        [b"MDPW02", b"\x06"],
        [b"", b"MDPW01", b"\x05"],
        [b"1", b"", b"MDPCX1", b"\x04", b"echo", b"500", b"x"],
        [b"junk"],
        [b""],
    ],
)
def test_what_is_no_command_is_ignored(router, noise):
    with Worker("echo", list, broker=router.endpoint):
        sender = registered(router)
        router.send(sender, *noise)
        router.send(sender, b"MDPWX1", b"\x02", b"d", b"", b"", b"y")
        assert command(router)[1:] == [b"MDPWX1", b"\x04", b"d", b"", b"y"]
