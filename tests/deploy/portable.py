"""Use clients and workers without what Windows does not have; on Windows, use them as they are.

    python tests/deploy/portable.py [BROKER]            all of them, over tcp
    python tests/deploy/portable.py COMMAND WORD ...    mdclient or mdworker, with these arguments

It needs nothing but zmdp.  Without BROKER it tries those that need none (Freelance): brokers do not run on Windows.
"""

import asyncio
import atexit
import builtins
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any

MODULES = {"fcntl", "grp", "pwd", "resource", "termios"}
NAMES = {
    os: ["fork", "getegid", "geteuid", "getuid", "register_at_fork"],
    select: ["POLLIN", "poll"],
    signal: ["SIGHUP", "SIGUSR1"],
}
COMMANDS = {"mdclient": "zmdp.clients.command.main", "mdworker": "zmdp.workers.command.cli"}


class Loop(asyncio.SelectorEventLoop):
    """An event loop that watches no descriptors, as Windows' default."""

    def add_reader(self, *arguments: Any) -> None:
        """Refuse."""
        raise NotImplementedError

    remove_reader = add_reader  # type: ignore[assignment]


class Policy(asyncio.DefaultEventLoopPolicy):
    """Makes such loops."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Return one."""
        return Loop()


def do_without() -> None:
    """Take from zmdp what Windows does not have."""
    import concurrent.futures.thread
    import logging.handlers
    import random
    import tempfile
    import uuid

    import zmq

    del concurrent, logging, random, tempfile, uuid, zmq  # which use it if it is there
    real = builtins.__import__

    def without(name: str, globals_: Any = None, *arguments: Any) -> Any:
        if name in MODULES and (globals_ or {}).get("__name__", "").startswith("zmdp"):
            raise ModuleNotFoundError(f"Windows has no {name}", name=name)
        return real(name, globals_, *arguments)

    builtins.__import__ = without
    for module, names in NAMES.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    asyncio.set_event_loop_policy(Policy())


def call_without_a_broker(endpoint: str) -> None:
    """Call servers, in threads and in an event loop."""
    from zmdp.interop.freelance.client import AsyncFreelanceClient, FreelanceClient

    worker = start("mdworker", "zmdp.workers.examples:echo", "--freelance", endpoint)
    with FreelanceClient([endpoint], timeout=60) as client:
        assert list(client.request(b"hello")) == [b"hello"]

    async def call() -> None:
        async with AsyncFreelanceClient([endpoint], timeout=60) as client:
            assert list(await client.request(b"hello")) == [b"hello"]

    asyncio.run(call())
    called = subprocess.check_output(command("mdclient", "call", "--freelance", endpoint, "hello", "--wait"))
    assert called.strip() == b"hello", called
    worker.kill()


def call_through(broker: str) -> None:
    """Offer services and call them, in threads and in an event loop, with each protocol."""
    from zmdp import AsyncClient, AsyncWorker, Client, Titanic, Worker

    async def reverse(request: Any) -> Any:
        await asyncio.sleep(0)
        return [bytes(reversed(frame)) for frame in request]

    async def run() -> None:
        worker = AsyncWorker("reverse", reverse, broker=broker)
        worker.start()
        for protocol in ("X1", "0.2"):
            async with AsyncClient(broker, timeout=60, protocol=protocol) as client:
                replies = await asyncio.gather(*(client.request("reverse", b"%03d" % n) for n in range(100)))
                assert [bytes(reversed(reply[0])) for reply in replies] == [b"%03d" % n for n in range(100)]
        worker.stop()
        await worker.wait()

    asyncio.run(run())
    with Worker("echo", list, broker=broker, concurrency=2):
        for protocol in ("X1", "0.2"):
            with Client(broker, timeout=60, protocol=protocol) as client:
                for number in range(100):
                    assert list(client.request("echo", b"%d" % number)) == [b"%d" % number]
        with Client(broker, timeout=60) as client:
            Titanic(client)
            called = subprocess.check_output(command("mdclient", "call", "echo", "hello", "--broker", broker))
            assert called.strip() == b"hello", called
    worker = start("mdworker", "zmdp.workers.examples:echo", "--broker", broker, "--service", "other")
    with Client(broker, timeout=60) as client:
        assert list(client.request("other", b"hello")) == [b"hello"]
    worker.kill()


def command(*words: str) -> list[str]:
    """Return the command line of one of zmdp's commands that does without, too."""
    return [sys.executable, __file__, *words]


def start(*words: str) -> "subprocess.Popen[bytes]":
    """Start a command, which ends with this process at the latest."""
    process = subprocess.Popen(command(*words))
    atexit.register(process.kill)
    return process


def free_endpoint() -> str:
    """Return where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def main() -> None:
    """Do as told."""
    if sys.platform != "win32":
        do_without()
    if sys.argv[1:] and sys.argv[1] in COMMANDS:
        module = COMMANDS[sys.argv.pop(1)]
        importlib.import_module(module).main()
    call_without_a_broker(free_endpoint())
    for broker in sys.argv[1:]:
        call_through(broker)
    print("clients and workers work")


if __name__ == "__main__":
    main()
