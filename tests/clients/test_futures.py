"""The futures of `Client.submit`: real futures, which no thread has to lock."""

import asyncio
import threading
from concurrent.futures import (
    FIRST_EXCEPTION,
    CancelledError,
    Future,
    InvalidStateError,
    as_completed,
    wait,
)
from dataclasses import dataclass

import pytest
import zmq
from support.processes import TIMEOUT_SECONDS, eventually
from support.x1_broker import X1Router, requests

from zmdp.clients import Client, ClosedError, RequestTimeout
from zmdp.mdp.errors import CodecError
from zmdp.mdp.services import Service


@pytest.fixture
def router():
    with X1Router() as router:
        yield router


@pytest.fixture
def client(router):
    with Client(router.endpoint, timeout=TIMEOUT_SECONDS) as client:
        yield client


def submit(client, router, many=1):
    """Return futures whose requests have reached the broker, and these requests."""
    futures = [client.submit("echo", b"%d" % number) for number in range(many)]
    return futures, router.requests(many)


def answer(router, asked):
    router.reply(*((each, each.body) for each in asked))


async def awaited(future):
    return await asyncio.wrap_future(future)


# ── a Future ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_life_of_a_future(client, router):
    (future,), asked = submit(client, router)
    assert isinstance(future, Future)
    assert (future.done(), future.running(), future.cancelled()) == (False, False, False)
    assert "state=pending" in repr(future)
    for ask in (future.result, future.exception):
        with pytest.raises(TimeoutError) as caught:
            ask(0.01)
        assert not isinstance(caught.value, RequestTimeout)  # it is not over
    answer(router, asked)
    assert future.result(TIMEOUT_SECONDS) == [b"0"]
    assert (future.done(), future.cancelled(), future.exception()) == (True, False, None)
    assert not future.cancel()
    assert "state=finished returned Reply" in repr(future)


@pytest.mark.parametrize(
    "ask",
    [
        lambda future: future.result(0),
        lambda future: wait([future], 0).done.pop().result(0),
        lambda future: next(as_completed([future], 0)).result(0),
        lambda future: future.exception(0) or future.result(0),
        lambda future: future.cancel() or future.cancelled() or future.running() or future.result(0),
        lambda future: asyncio.run(awaited(future)),
    ],
    ids=["result", "wait", "as_completed", "exception", "cancel", "asyncio"],
)
def test_a_future_that_was_done_before_anyone_asked(client, router, ask):
    (future,), asked = submit(client, router)
    answer(router, asked)
    eventually(future.done)
    assert ask(future) == [b"0"]
    assert future.done()
    assert "state=finished returned Reply" in repr(future)
    assert not hasattr(future, "other")


def test_an_error_that_came_before_anyone_asked(client):
    future = client.submit("echo", timeout=0.05, retries=0)
    eventually(future.done)
    for _ in range(2):
        with pytest.raises(RequestTimeout) as caught:
            future.result(0)
    assert future.exception(0) is caught.value


def test_threads_that_ask_first_while_the_reply_arrives(client, router, pool):
    for _ in range(50):
        futures, asked = submit(client, router, 8)
        asking = [pool.submit(ask, TIMEOUT_SECONDS) for each in futures for ask in (each.result, each.exception)]
        answer(router, asked)
        expected = [found for number in range(8) for found in ([b"%d" % number], None)]
        assert [each.result(TIMEOUT_SECONDS) for each in asking] == expected


def test_a_value_that_cannot_be_made_concerns_its_own_future_only(client, router):
    @dataclass
    class Failing:
        x: int

        def __post_init__(self):
            raise KeyError(self.x)

    futures = [client.submit(Service("echo", int, Failing), 1), client.submit("echo", b"{}")]
    asked = router.requests(2)
    router.reply((asked[0], [b'{"x": 1}']), (asked[1], [b"other"]))
    with pytest.raises(CodecError, match="KeyError: 1"):
        futures[0].result(TIMEOUT_SECONDS)
    assert futures[1].result(TIMEOUT_SECONDS) == [b"other"]


def test_only_the_client_settles_a_future(client, router):
    (future,), asked = submit(client, router)
    answer(router, asked)
    eventually(future.done)
    with pytest.raises(InvalidStateError):
        future.set_result([b"another"])
    assert future.result(TIMEOUT_SECONDS) == [b"0"]


def test_wait_and_as_completed(client, router):
    futures, asked = submit(client, router, 10)
    answer(router, asked[5:])
    assert set(wait(futures[5:], TIMEOUT_SECONDS).done) == set(futures[5:])
    assert wait(futures, 0).not_done == set(futures[:5])
    failing = client.submit("echo", timeout=0.05, retries=0)
    assert wait([*futures[:5], failing], TIMEOUT_SECONDS, FIRST_EXCEPTION).done == {failing}
    futures[0].cancel()
    answer(router, asked[1:5])
    assert set(as_completed(futures, TIMEOUT_SECONDS)) == set(futures)


def test_many_threads_wait_for_one_future(client, router, pool):
    (future, other), asked = submit(client, router, 2)
    waiting = [pool.submit(future.result, TIMEOUT_SECONDS) for _ in range(6)]
    eventually(lambda: len(future._gates) == 6)
    answer(router, asked[:1])
    assert [each.result(TIMEOUT_SECONDS) for each in waiting] == [[b"0"]] * 6
    waiting = [pool.submit(other.result, TIMEOUT_SECONDS) for _ in range(6)]
    eventually(lambda: len(other._gates) == 6)
    assert other.cancel()
    for each in waiting:
        assert isinstance(each.exception(TIMEOUT_SECONDS), CancelledError)


def test_a_cancelled_future(client, router):
    called = []
    (future,), asked = submit(client, router)
    future.add_done_callback(called.append)
    assert future.cancel()
    assert future.cancel()
    assert (future.cancelled(), future.done(), called) == (True, True, [future])
    for ask in (future.result, future.exception):
        with pytest.raises(CancelledError):
            ask()
    message = router.recv()
    assert message[3:] == [b"\x09", b"\0\0\0\x09\x05" + asked[0].number.to_bytes(8, "big")]
    future.add_done_callback(called.append)
    assert called == [future] * 2


def test_cancelled_by_many_threads(client, router, pool):
    for _ in range(20):
        futures, asked = submit(client, router, 8)
        cancelling = [pool.submit(future.cancel) for future in futures for _ in range(2)]
        answer(router, asked)
        outcomes = [each.result(TIMEOUT_SECONDS) for each in cancelling]
        for number, future in enumerate(futures):
            assert future.cancelled() == outcomes[2 * number] == outcomes[2 * number + 1]
            assert future.cancelled() or future.result(TIMEOUT_SECONDS) == [b"%d" % number]
    eventually(lambda: client._dialog._dialog._session.outstanding == 0)


# ── callbacks ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_callbacks_are_called_in_order_by_one_thread(client, router):
    called, done = [], threading.Event()

    def note(future):
        called.append((future.result(0), threading.current_thread().name))
        if len(called) == 40:
            done.set()

    futures, asked = submit(client, router, 20)
    for future in futures:
        future.add_done_callback(note)
        future.add_done_callback(note)
    answer(router, asked)
    assert done.wait(TIMEOUT_SECONDS)
    assert called == [([b"%d" % (number // 2)], "zmdp-client-callbacks") for number in range(40)]


@pytest.mark.parametrize(
    "wait_for",
    [
        lambda future: future.result(TIMEOUT_SECONDS),
        lambda future: wait([future], TIMEOUT_SECONDS).done.pop().result(0),
        lambda future: next(as_completed([future], TIMEOUT_SECONDS)).result(0),
    ],
    ids=["result", "wait", "as_completed"],
)
def test_a_callback_may_wait_for_another_future(client, router, wait_for):
    waited, waits, done = [], threading.Event(), threading.Event()
    (first, second), asked = submit(client, router, 2)

    def wait_for_other(_):
        waits.set()
        waited.append(wait_for(second))
        done.set()

    first.add_done_callback(wait_for_other)
    answer(router, asked[:1])
    assert waits.wait(TIMEOUT_SECONDS)
    answer(router, asked[1:])
    assert done.wait(TIMEOUT_SECONDS)
    assert waited == [[b"1"]]


def test_a_blocking_callback_does_not_delay_a_thread_that_waits(client, router):
    blocked, go_on = threading.Event(), threading.Event()

    def block(_):
        blocked.set()
        assert go_on.wait(TIMEOUT_SECONDS)

    (first, second), asked = submit(client, router, 2)
    first.add_done_callback(block)
    answer(router, asked[:1])
    assert blocked.wait(TIMEOUT_SECONDS)
    answer(router, asked[1:])
    assert second.result(TIMEOUT_SECONDS) == [b"1"]
    go_on.set()


# ── what goes out together, and that everything goes out ─────────────────────────────────────────────────────────────


def test_requests_submitted_in_a_row_share_messages(client, router):
    router.reply((submit(client, router)[1][0], [b"x"]))
    submitted = [client.submit("echo", b"%d" % number) for number in range(200)]
    taken, messages = [], 0
    while len(taken) < 200:
        taken += requests(router.recv())
        messages += 1
    assert [asked.body for asked in taken] == [[b"%d" % number] for number in range(200)]
    assert messages < 200
    answer(router, taken)
    assert [future.result(TIMEOUT_SECONDS) for future in submitted] == [[b"%d" % number] for number in range(200)]


def test_every_submitted_request_is_sent(client, router):
    """Whether or not a thread waits for it."""
    for number in range(30):
        for _ in range(3):
            client.submit("echo", b"more")
        assert len(router.requests(3)) == 3, number


def test_requests_of_threads_whose_replies_arrive_together_share_messages(client, router, pool):
    asking = [pool.submit(lambda: [client.request("echo", b"x") for _ in range(20)]) for _ in range(8)]
    messages = 0
    for _ in range(20):
        taken = []
        while len(taken) < 8:
            taken += requests(router.recv())
            messages += 1
        answer(router, taken)
    assert [each.result(TIMEOUT_SECONDS) for each in asking] == [[[b"x"]] * 20] * 8
    assert messages < 160


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_closing_settles_every_future(router):
    client, called = Client(router.endpoint, timeout=TIMEOUT_SECONDS), []
    futures, _ = submit(client, router, 10)
    for future in futures:
        future.add_done_callback(called.append)
    client.close()
    assert all(isinstance(future.exception(0), ClosedError) for future in futures)
    assert called == futures


def test_closing_ends_the_threads(router, pool):
    for _ in range(50):
        client = Client(router.endpoint, timeout=TIMEOUT_SECONDS)
        future, calling = client.submit("echo"), pool.submit(client.request, "echo")
        router.requests(2)
        client.close()
        assert isinstance(future.exception(0), ClosedError)
        assert isinstance(calling.exception(TIMEOUT_SECONDS), ClosedError)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("zmdp-client")]


def test_terminating_the_context_settles_every_future(router):
    context = zmq.Context()
    client = Client(router.endpoint, timeout=TIMEOUT_SECONDS, context=context)
    futures, _ = submit(client, router, 3)
    terminating = threading.Thread(target=context.term)
    terminating.start()
    assert all(isinstance(future.exception(TIMEOUT_SECONDS), ClosedError) for future in futures)
    client.close()
    terminating.join()
