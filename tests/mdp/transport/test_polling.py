"""The substitutes for what Windows does not have, beside what others have."""

import asyncio
import select
import socket
import threading

import pytest
from support.processes import TIMEOUT_MS

from zmdp.mdp.transport import polling
from zmdp.mdp.transport.polling import READABLE, SelectPoller, add_reader, new_poller, remove_reader


class Loop(asyncio.SelectorEventLoop):
    """Watches no descriptors, as Windows' default."""

    def add_reader(self, *arguments):
        raise NotImplementedError


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("make", [select.poll, SelectPoller])
def test_a_poller_waits_for_what_is_readable(make, pair):
    (near, far), poller = pair, make()
    poller.register(near.fileno(), READABLE)
    poller.register(far.fileno(), READABLE)
    assert poller.poll(0) == []
    far.send(b"!")
    assert poller.poll(TIMEOUT_MS) == poller.poll(-1) == poller.poll() == [(near.fileno(), READABLE)]
    poller.unregister(near.fileno())
    assert poller.poll(0) == []


def test_a_descriptor_that_is_closed_meanwhile_is_no_error(pair):
    near, _ = pair
    poller = SelectPoller()
    poller.register(near.fileno(), READABLE)
    near.close()
    assert poller.poll(0) == []


def test_the_systems_own_is_used_where_there_is_one(monkeypatch):
    assert isinstance(new_poller(), type(select.poll()))
    monkeypatch.delattr(select, "poll")
    assert isinstance(new_poller(), SelectPoller)


@pytest.mark.parametrize("make", [asyncio.SelectorEventLoop, Loop])
def test_a_loop_calls_back_in_its_thread_until_it_is_told_not_to(make, pair):
    near, far = pair
    near.setblocking(False)
    received = []

    async def exchange():
        loop, seen = asyncio.get_running_loop(), asyncio.Event()

        def read():
            received.append((near.recv(1), threading.current_thread()))
            seen.set()

        for _ in range(2):  # the second time with a new watcher
            add_reader(loop, near.fileno(), read)
            for _ in range(3):
                seen.clear()
                far.send(b"!")
                await seen.wait()
            remove_reader(loop, near.fileno())
        far.send(b"?")
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(exchange())
    assert received == [(b"!", threading.current_thread())] * 6
    assert not polling._watchers


def test_several_descriptors_and_an_error_in_one(pair):
    near, far = pair
    errors = []

    async def fail_and_go_on():
        loop, seen = asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

        def fail():
            remove_reader(loop, near.fileno())
            raise ValueError("no good")

        def read():
            far.recv(1)
            seen.set()

        add_reader(loop, near.fileno(), fail)
        add_reader(loop, far.fileno(), read)
        far.send(b"!")
        near.send(b"!")
        await seen.wait()
        while not errors:
            await asyncio.sleep(0)
        remove_reader(loop, far.fileno())

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(fail_and_go_on())
    assert [str(error) for error in errors] == ["no good"]
    assert not polling._watchers
