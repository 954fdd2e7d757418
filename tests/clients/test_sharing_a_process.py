"""A client within a program of others' making: Ctrl-C, event loops, gevent, fork, garbage, the end of the process."""

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress

import pytest
from support.processes import TIMEOUT_SECONDS, eventually
from support.x1_broker import X1Router

from zmdp.clients import AsyncClient, Client
from zmdp.interop.freelance.client import AsyncFreelanceClient, FreelanceClient
from zmdp.testing import running_broker
from zmdp.workers import Worker


@pytest.fixture
def endpoint():
    with running_broker() as server, Worker("echo", list, broker=server.endpoints[0]):
        yield server.endpoints[0]


# ── Ctrl-C ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Interrupts:
    """Interrupts the main thread at random moments, so many times, while `wanted` is set."""

    def __init__(self, many):
        self.left = many
        self.wanted = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        rng, main = random.Random(1), threading.main_thread().ident
        while self.left:
            self.wanted.wait()
            time.sleep(rng.random() * 0.0005)
            if self.wanted.is_set():
                self.wanted.clear()
                self.left -= 1
                signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.parametrize("many", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_ctrl_c_takes_nothing_from_other_threads(endpoint, many):
    """At whichever moment it comes: the threads that call never wait for a lock that the main thread has taken."""
    ended, failed, answered = threading.Event(), [], [0, 0, 0]

    def ask(client, who):
        while not ended.is_set():
            body = b"%d %d" % (who, answered[who])
            try:
                match answered[who] % 3:
                    case 0:
                        reply = client.request("echo", body)
                    case 1:
                        reply = client.submit("echo", body).result(TIMEOUT_SECONDS)
                    case _:
                        (reply,) = client.stream("echo", body)
                assert reply == [body]
            except Exception as error:  # noqa: BLE001 - whatever it is
                failed.append(error)
                return
            answered[who] += 1

    def call_without_end(client):
        while True:
            client.request("echo", b"main")
            client.submit("echo", b"main").result()
            list(client.stream("echo", b"main"))

    with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        threads = [threading.Thread(target=ask, args=(client, who)) for who in range(3)]
        for thread in threads:
            thread.start()
        interrupts, taken = Interrupts(many), 0
        while interrupts.left:
            with suppress(KeyboardInterrupt):
                interrupts.wanted.set()
                call_without_end(client)
            taken += 1
        before = list(answered)
        eventually(lambda: failed or all(now > then for now, then in zip(answered, before, strict=True)))
        ended.set()
        for thread in threads:
            thread.join(TIMEOUT_SECONDS)
            assert not thread.is_alive()
        assert not failed
        assert taken == many
        assert client.request("echo", b"x") == [b"x"]


# ── event loops, and what replaces them ──────────────────────────────────────────────────────────────────────────────


def test_within_a_running_event_loop_as_in_a_notebook(endpoint):
    async def cell():
        with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
            assert client.request("echo", b"x") == [b"x"]
            assert [*client.stream("echo", b"y")] == [[b"y"]]
            assert await asyncio.wrap_future(client.submit("echo", b"z")) == [b"z"]

    asyncio.run(cell())


def run(program, *arguments, **environment):
    """Run a program in a process of its own, and return its output; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(program), *arguments], capture_output=True, text=True,
        timeout=TIMEOUT_SECONDS, env={**os.environ, **environment}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    ("module", "install"),
    [("uvloop", "uvloop.install()"), ("gevent", "from gevent import monkey; monkey.patch_all()")],
)
@pytest.mark.filterwarnings("ignore")
def test_beside_another_event_loop(endpoint, module, install):
    pytest.importorskip(module)
    program = f"""
        import sys, warnings
        warnings.simplefilter("ignore")
        import {module}
        {install}
        import threading
        from zmdp import Client
        with Client(sys.argv[1], timeout=60) as client:
            replies = []
            def ask(number):
                replies.append(client.request("echo", b"%d" % number)[0])
            threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
            for each in threads: each.start()
            for each in threads: each.join()
            futures = [client.submit("echo", b"%d" % number) for number in range(20)]
            assert sorted(replies) == sorted(future.result()[0] for future in futures)
            assert [*client.stream("echo", b"y")] == [[b"y"]]
    """
    run(program, endpoint)


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def use_and_drop_client(endpoint):
    assert Client(endpoint, timeout=TIMEOUT_SECONDS).request("echo", b"x") == [b"x"]


def use_and_drop_sender(endpoint):
    Client(endpoint, timeout=TIMEOUT_SECONDS).send("nobody")


def use_and_drop_async_client(endpoint):
    async def ask():
        assert await AsyncClient(endpoint, timeout=TIMEOUT_SECONDS).request("echo", b"x") == [b"x"]

    asyncio.run(ask())


def use_and_drop_legacy(endpoint):
    assert Client(endpoint, timeout=TIMEOUT_SECONDS, protocol="0.2").request("echo", b"x") == [b"x"]


def drop_unused(endpoint):
    AsyncClient(endpoint)


def drop_freelance(endpoint):
    FreelanceClient(endpoint)


def drop_async_freelance(endpoint):
    AsyncFreelanceClient(endpoint)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
@pytest.mark.parametrize(
    "use",
    [
        use_and_drop_client, use_and_drop_sender, use_and_drop_legacy, use_and_drop_async_client, drop_unused,
        drop_freelance, drop_async_freelance,
    ],
)  # fmt: skip
def test_a_client_that_nobody_closes_is_closed_when_it_is_collected(endpoint, use):
    def drop(times):
        """Use and drop so many clients, and wait until all are closed."""
        with pytest.warns(ResourceWarning, match="was not closed") as warned:  # noqa: PT031 - what warns is the collector
            for _ in range(times):
                use(endpoint)
            eventually(lambda: gc.collect() >= 0 and len(warned) >= times)  # the last reference may be the loop's
        eventually(
            lambda: (
                not [each for each in threading.enumerate() if each.name.startswith(("zmdp-client", "zmdp-freelance"))]
            )
        )

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    drop(1)
    before = descriptors()
    drop(5)
    eventually(lambda: descriptors() <= before)  # libzmq's thread closes the last


def test_what_is_outstanding_keeps_its_client_open(endpoint):
    futures = [Client(endpoint, timeout=TIMEOUT_SECONDS).submit("late", b"%d" % number) for number in range(3)]
    parts = Client(endpoint, timeout=TIMEOUT_SECONDS).stream("echo", b"x")
    gc.collect()
    with Worker("late", list, broker=endpoint), pytest.warns(ResourceWarning) as warned:  # noqa: PT031 - so it is here
        assert [future.result(TIMEOUT_SECONDS) for future in futures] == [[b"0"], [b"1"], [b"2"]]
        assert [*parts] == [[b"x"]]
        del futures, parts
        eventually(lambda: len(warned) >= 4)


def test_what_a_program_sends_last_is_sent():
    with X1Router() as router:
        program = """
            import sys
            from zmdp import Client
            client = Client(sys.argv[1])
            for _ in range(100):
                client.send("later", b"x")
        """
        run(program, router.endpoint)
        assert len(router.requests(100)) == 100


@pytest.mark.parametrize("call", ['client.request("echo", b"x")', '[*client.map("echo", [b"x"])][0]'])
def test_a_client_can_be_used_while_the_interpreter_exits(endpoint, call):
    program = f"""
        import atexit, sys
        from zmdp import Client
        client = Client(sys.argv[1], timeout=60)
        atexit.register(lambda: print({call}))
    """
    done = run(program, endpoint)
    assert done.stdout == "[b'x']\n"
    assert "Traceback" not in done.stderr
