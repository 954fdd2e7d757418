"""Fixtures: a real broker on real sockets for each test."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import zmq
from support.peers import Bench
from support.router import Router, proxied

from zmdp.mdp.limits import Limits
from zmdp.testing import running_broker

Start = Callable[..., Bench]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(*binds, **limits)` starts a broker, which stops without draining unless `drain_timeout` is given.

    `pirates` are its pirate endpoints, each with a service, and `pirate_workers` those for workers only.

    Unless a test sets `heartbeat`, no timer fires: the broker sends no HEARTBEAT and loses no silent worker.
    """
    context: zmq.Context[Any] = zmq.Context()
    benches: list[Bench] = []
    with ExitStack() as stack:
        stack.callback(context.term)

        def run(
            *binds: str,
            drain_timeout: float = 0.0,
            pirates: Sequence[tuple[str, bytes]] = (),
            pirate_workers: Sequence[tuple[str, bytes]] = (),
            **limits: Any,
        ) -> Bench:
            settings = Limits(**{"heartbeat": 60.0, **limits})
            running = running_broker(
                *binds, limits=settings, drain_timeout=drain_timeout, context=context, pirates=pirates,
                pirate_workers=pirate_workers,
            )  # fmt: skip
            server = stack.enter_context(running)
            bench = Bench(server, context)
            stack.callback(bench.close)
            benches.append(bench)
            return bench

        yield run
        assert [bench.server.broker.stats.internal_errors for bench in benches] == [0] * len(benches)


@pytest.fixture
def bench(start: Start) -> Bench:
    """A broker in which no timer fires."""
    return start()


@pytest.fixture
def router() -> Iterator[Router]:
    """A hand-written broker, for tests of zmdp's clients and workers."""
    with Router() as router:
        yield router


@pytest.fixture
def proxy(bench: Bench) -> Iterator[str]:
    """A real ROUTER–DEALER proxy in front of the broker."""
    with proxied(bench.endpoint) as endpoint:
        yield endpoint
