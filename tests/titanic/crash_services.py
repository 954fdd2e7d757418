"""The services whose workers the crash harness (tests/crash.py) kills.

Each execution first appends a line to the file CRASH_LOG, and puts a mark of its own into all that it replies: so it is
seen how often a request was executed, and from which execution a reply is.
"""

import os
import random
import secrets
import time

from zmdp.workers import ServiceError, Worker

echo = Worker("crash.echo", concurrency=4)
parts = Worker("crash.parts", concurrency=2)
quick = Worker("crash.quick", concurrency=2)


def begin(number):
    """Record an execution of the request `number`, and return its mark."""
    mark = secrets.token_hex(6).encode()
    log = os.open(os.environ["CRASH_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, number + b" " + mark + b"\n")
    os.close(log)
    return mark


def work():
    """Take some milliseconds, and sometimes much longer, so that some request is always running."""
    time.sleep(random.uniform(0.1, 0.8) if random.random() < 0.1 else random.uniform(0.003, 0.04))


@echo
def answer(request):
    """Return the body, or fail with an error of the service."""
    number, how, payload = request
    mark = begin(number)
    work()
    if how == b"fail":
        raise ServiceError(422, f"{number.decode()} fails, as it should", mark + b" " + payload)
    return [number, mark, payload]


@quick
def mark(request):
    """Return the number and the mark, mostly at once."""
    (number,) = request
    made = begin(number)
    time.sleep(random.uniform(0.05, 0.3) if random.random() < 0.02 else random.uniform(0.0, 0.005))
    return number + b" " + made


@parts
def stream(request):
    """Yield the body in several parts, then return their number."""
    number, how, payload = request
    mark, count = begin(number), int(how)
    for at in range(count):
        yield [number, mark, b"%d" % at, payload[at::count]]
        time.sleep(random.uniform(0.0, 0.2 / count))
    return [number, mark, b"%d" % count]
