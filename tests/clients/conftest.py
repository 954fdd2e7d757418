"""What the tests of both clients share: a broker, and workers that a test can hold up."""

import json
import threading
import time
from contextlib import ExitStack

import pytest
from support.holding import Holding
from support.processes import TIMEOUT_SECONDS

from zmdp.clients import ServiceError
from zmdp.testing import running_broker
from zmdp.workers import Worker


def count(request):
    for number in range(3):
        yield b"%d" % number
    return b"end"


def fail(request):
    raise ValueError("no good")


def fail_late(request):
    yield b"first"
    raise KeyError("gone")


def flood(request):
    """Stream as many parts of 100 bytes as the request says."""
    for _ in range(int(request[0] or b"0")):
        yield b"x" * 100
    return b"end"


def look(request):
    left = None if request.deadline is None else request.deadline - time.monotonic()
    options = {name: value for name, value in request.options.items() if name not in {"ttl", "headers"}}
    return json.dumps({"headers": dict(request.headers), "options": options, "left": left}).encode()


def refuse(request):
    raise ServiceError(int(request[0]), "said so", request[1] or None)


@pytest.fixture(scope="module")
def server():
    with running_broker(drain_timeout=0.1) as server:
        yield server


@pytest.fixture(scope="module")
def endpoint(server):
    at = server.endpoints[0]
    workers = [
        Worker("echo", list, broker=at, concurrency=2),
        Worker("count", count, broker=at),
        Worker("flood", flood, broker=at),
        Worker("look", look, broker=at),
        Worker("refuse", refuse, broker=at),
        Worker("fail", fail, broker=at),
        Worker("fail.0.2", fail, broker=at, protocol="0.2"),
        Worker("fail.0.1", fail, broker=at, protocol="0.1"),
        Worker("fail.late", fail_late, broker=at),
        Worker("fail.late.0.2", fail_late, broker=at, protocol="0.2"),
        Worker("sum", sum, broker=at, codec="json"),
        Worker("numbers", lambda many: (yield from range(many)), broker=at, codec="json"),
    ]
    with ExitStack() as running:
        for worker in workers:
            running.enter_context(worker)
        yield at


@pytest.fixture
def holding(endpoint):
    """A handler of the service `hold`, which takes eight requests at a time."""
    handler = Holding()
    with Worker("hold", handler, broker=endpoint, concurrency=8):
        try:
            yield handler
        finally:
            handler.let_go()


@pytest.fixture
def begun(endpoint):
    """The name of a service that sends one part, and nothing else until the test has ended."""
    ended = threading.Event()

    def begin(request):
        yield b"first"
        assert ended.wait(TIMEOUT_SECONDS)

    with Worker("begin", begin, broker=endpoint):
        try:
            yield "begin"
        finally:
            ended.set()
