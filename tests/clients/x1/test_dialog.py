"""The synchronous client over X1: many threads, forked processes, its limits."""

import gc
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.processes import TIMEOUT_SECONDS, eventually

from zmdp.clients import Client, ClosedError, RequestRejected, RequestTimeout, SettingError
from zmdp.mdp.limits import Limits
from zmdp.testing import running_broker
from zmdp.workers import Worker


def count(request):
    for number in range(1000):
        yield b"%d" % number


@pytest.fixture
def endpoint():
    with running_broker() as server:
        at = server.endpoints[0]
        with Worker("count", count, broker=at, concurrency=2), Worker("echo", list, broker=at):
            yield at


def test_the_garbage_collector_may_close_a_stream_anywhere(endpoint):
    before = gc.get_threshold()
    gc.set_threshold(20)  # so that it runs within the client, time and again
    try:
        with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
            for _ in range(30):
                cycle = {"stream": client.stream("count")}
                cycle["itself"] = cycle
                next(cycle["stream"])
                del cycle
                assert client.request("echo", b"x") == [b"x"]
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("most", [0, -1, "many"])
def test_max_outstanding_is_checked(endpoint, most):
    with pytest.raises(SettingError, match="max_outstanding"):
        Client(endpoint, max_outstanding=most)


def forked(client, results):
    for use in (
        client.request,
        client.submit,
        client.send,
        lambda _: client.recv(),
        lambda each: next(client.stream(each)),
    ):
        try:
            use("echo")
        except ClosedError as error:
            results.put(str(error))
    client.close()
    os._exit(0)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # newer Pythons warn of fork() with threads: that is the point
def test_a_forked_process_must_create_its_own_client(endpoint):
    context = multiprocessing.get_context("fork")
    with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        client.submit("echo").result(TIMEOUT_SECONDS)
        results = context.SimpleQueue()
        child = context.Process(target=forked, args=(client, results))
        child.start()
        for _ in range(5):
            assert "create one after fork()" in results.get()
        child.join(TIMEOUT_SECONDS)
        assert client.request("echo", b"parent") == [b"parent"]


def test_a_request_that_is_too_large_disturbs_no_other_over_its_connection():
    with (
        running_broker(limits=Limits(max_message=100_000)) as server,
        Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client,
    ):
        executed, may_end = [], threading.Event()

        def stream(request):
            executed.append(request[0])
            yield b"one"
            may_end.wait(TIMEOUT_SECONDS)
            return b"end"

        with Worker("stream", stream, broker=server.endpoints[0]):
            parts = client.stream("stream", b"first")
            assert next(parts) == [b"one"]
            for _ in range(2):  # the limits are asked for, then known
                with pytest.raises(
                    RequestRejected, match="a request may have up to 100000 bytes in 1024 frames"
                ) as caught:
                    client.request("stream", b"x" * 3_000_000)
                assert (caught.value.code, caught.value.service) == (413, "stream")
            may_end.set()
            assert next(parts) == [b"end"]
            assert executed == [b"first"]
            assert server.connections.counts["ended"] == 0


def test_a_callback_that_raises_does_not_affect_other_futures(endpoint, logged):
    def leave(_):
        raise SystemExit(3)

    with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        client.submit("late").add_done_callback(leave)
        with Worker("late", list, broker=endpoint):  # only now can it be done, so the callback is there
            assert logged("a future's callback failed")
            assert client.submit("echo", b"x").result(TIMEOUT_SECONDS) == [b"x"]


# ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_threads_that_use_every_method_at_once(endpoint):
    """No thread waits for ever, and each gets its own replies."""

    def ask(client, who):
        for number in range(60):
            body = b"%d %d" % (who, number)
            match (who + number) % 4:
                case 0:
                    assert client.request("echo", body) == [body]
                case 1:
                    assert client.submit("echo", body).result(TIMEOUT_SECONDS) == [body]
                case 2:
                    client.submit("nobody", body).cancel()
                    assert next(client.stream("count")) == [b"0"]  # the rest is cancelled
                case 3:
                    with pytest.raises(RequestTimeout):
                        client.request("nobody", body, timeout=0.001, retries=0)

    with Client(endpoint, timeout=TIMEOUT_SECONDS) as client, ThreadPoolExecutor() as pool:
        asking = [pool.submit(ask, client, who) for who in range(8)]
        for each in asking:
            each.result(TIMEOUT_SECONDS)
        eventually(lambda: client._dialog._dialog._session.outstanding == 0)  # what was cancelled last, too
