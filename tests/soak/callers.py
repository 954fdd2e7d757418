"""Processes that call during a soak, one kind each: `python -m soak.callers KIND NAME`, until SIGTERM.

The environment says where: `MDP_BROKER`, `MDP_KEY` and `MDP_BROKER_KEY` as for all programs, `SOAK_LEDGER`, and
`SOAK_GATEWAYS`, the gateways' URLs separated by commas.  A caller ends when its outstanding calls have ended.
"""

import asyncio
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import httpx
import zmq

from zmdp import AsyncClient, Client, Titanic
from zmdp.clients import RequestError
from zmdp.mdp.keys import ClientKeys, load_keys
from zmdp.titanic import UnknownTicket

from .ledger import Ledger
from .services import PARTS, Task, parts, right_result, work

CALL_SECONDS = 60.0
"""How long a call may take; nothing that a soak does lasts so long."""
PAUSE_SECONDS = 0.2
"""Between two calls of a thread or task."""
RETRY_SECONDS = 0.2
LEGACY_ATTEMPT_MS = 6000
"""MDP/0.2 does not tell that a request has failed: callers send it again."""
STREAM_EVERY, UNKEYED_EVERY, RESUBMIT_EVERY = 5, 4, 3
KEY_TTL_SECONDS = 600.0
FETCH_SECONDS = 300.0


class Caller:
    """Numbers the calls of this process, and records the outcome of each."""

    def __init__(self, name: str) -> None:
        self._prefix = f"{name}-{os.getpid()}"
        self._numbers = itertools.count(1)
        self.ledger = Ledger(Path(os.environ["SOAK_LEDGER"]), name)
        self.stopped = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stopped.set())

    def begin(self) -> Task:
        """Begin a call."""
        number = next(self._numbers)
        task = Task(f"{self._prefix}-{number}", number)
        self.ledger.write("sent", task.call)
        return task

    def retried(self, task: Task, why: object) -> None:
        """Note that the caller sends the same call again."""
        self.ledger.write("retried", task.call, f"{type(why).__name__}: {why}")

    def end(self, task: Task, replies: object, right: object) -> None:
        """End a call that was answered."""
        good = replies == right
        self.ledger.write("right" if good else "wrong", task.call, "" if good else repr(replies))

    def fail(self, task: Task, error: Exception) -> None:
        """End a call with an error."""
        self.ledger.write("failed", task.call, f"{type(error).__name__}: {error}")

    def run_threads(self, count: int, call: Callable[[], None]) -> None:
        """Repeat `call` in threads until SIGTERM."""

        def repeat() -> None:
            while not self.stopped.wait(PAUSE_SECONDS):
                call()

        threads = [threading.Thread(target=repeat) for _ in range(count)]
        for each in threads:
            each.start()
        while not self.stopped.wait(1.0):
            pass
        for each in threads:
            each.join()


def all_parts(task: Task) -> list[object]:
    """Return the parts that a stream must have."""
    return [right_result(task, part) for part in range(PARTS)]


def call_in_threads(caller: Caller) -> None:
    """Call through a `Client` that threads share."""
    with Client(timeout=CALL_SECONDS) as client:

        def call() -> None:
            task = caller.begin()
            try:
                if task.number % STREAM_EVERY:
                    caller.end(task, client.call(work, task), right_result(task))
                else:
                    caller.end(task, list(client.stream(parts, task)), all_parts(task))
            except Exception as error:  # noqa: BLE001 - whatever it is, the call has ended with it
                caller.fail(task, error)

        caller.run_threads(3, call)


def call_in_tasks(caller: Caller) -> None:
    """Call through an `AsyncClient`."""

    async def call(client: AsyncClient) -> None:
        task = caller.begin()
        try:
            if task.number % STREAM_EVERY:
                caller.end(task, await client.call(work, task), right_result(task))
            else:
                caller.end(task, [part async for part in client.stream(parts, task)], all_parts(task))
        except Exception as error:  # noqa: BLE001 - whatever it is, the call has ended with it
            caller.fail(task, error)

    async def repeat(client: AsyncClient) -> None:
        while not caller.stopped.is_set():
            await asyncio.sleep(PAUSE_SECONDS)
            await call(client)

    async def run() -> None:
        async with AsyncClient(timeout=CALL_SECONDS) as client:
            await asyncio.gather(*(repeat(client) for _ in range(6)))

    asyncio.run(run())


def call_over_http(caller: Caller) -> None:
    """Call through the gateways as a load balancer does: what one cannot take is sent to the other."""
    gateways = itertools.cycle(os.environ["SOAK_GATEWAYS"].split(","))
    headers = {"Request-Timeout": f"{CALL_SECONDS:g}", "Prefer": "wait=30"}
    with httpx.Client(timeout=CALL_SECONDS + 10) as http:

        def call() -> None:
            task = caller.begin()
            until = time.monotonic() + CALL_SECONDS
            while True:
                try:
                    reply = http.post(f"{next(gateways)}/services/{work.name}", json=asdict(task), headers=headers)
                    if reply.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                        reply.raise_for_status()
                        caller.end(task, reply.json(), asdict(right_result(task)))
                        return
                    why: Exception = httpx.RemoteProtocolError(reply.text)
                except httpx.TransportError as error:
                    why = error
                except Exception as error:  # noqa: BLE001 - whatever it is, the call has ended with it
                    caller.fail(task, error)
                    return
                if time.monotonic() > until:
                    caller.fail(task, why)
                    return
                caller.retried(task, why)
                time.sleep(RETRY_SECONDS)

        caller.run_threads(2, call)


class LegacySocket:
    """MDP/0.2 by hand, as a program without zmdp speaks it; a new socket, to the next broker, for each attempt that
    follows a silent one."""

    def __init__(self) -> None:
        self._endpoints = itertools.cycle(os.environ["MDP_BROKER"].split(","))
        keys = load_keys(key=os.environ["MDP_KEY"], broker_key=os.environ["MDP_BROKER_KEY"])
        assert keys is not None
        self._keys: ClientKeys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self.reopen()

    def reopen(self) -> None:
        """Connect to the next broker."""
        self._socket.close(linger=0)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_publickey, self._socket.curve_secretkey = self._keys.public, self._keys.secret
        self._socket.curve_serverkey = self._keys.server
        self._socket.connect(next(self._endpoints))

    def ask(self, service: str, body: bytes) -> bytes | None:
        """Return the reply, or None if there was none in time."""
        self._socket.send_multipart([b"MDPC02", b"\x01", service.encode(), body])
        if not self._socket.poll(LEGACY_ATTEMPT_MS):
            return None
        header, command, _, reply = self._socket.recv_multipart()
        assert (header, command) == (b"MDPC02", b"\x03")
        return reply

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)


def call_by_hand(caller: Caller) -> None:
    """Call with frames of MDP/0.2."""
    connection = LegacySocket()
    while not caller.stopped.wait(PAUSE_SECONDS / 2):
        task = caller.begin()
        until = time.monotonic() + CALL_SECONDS
        body = json.dumps(asdict(task)).encode()
        while (reply := connection.ask(work.name, body)) is None:
            connection.reopen()  # also before the next call, which would get a late reply to this one
            if time.monotonic() > until:
                break
            caller.retried(task, RequestError("silence"))
        if reply is None:
            caller.fail(task, RequestError("silence"))
        else:
            caller.end(task, json.loads(reply), asdict(right_result(task)))
    connection.close()


def submit(caller: Caller) -> None:
    """Submit to Titanic, fetch the reply once, and close; most requests have a key, and some are submitted twice."""
    with Client(timeout=CALL_SECONDS / 4) as client:
        titanic = Titanic(client)

        def until_accepted(task: Task) -> str:
            while True:
                try:
                    return titanic.submit(work, task, key=task.call, key_ttl=KEY_TTL_SECONDS).uuid
                except RequestError as error:
                    caller.retried(task, error)
                    time.sleep(RETRY_SECONDS)

        def fetch(task: Task, uuid: str) -> None:
            ticket = titanic.ticket(uuid, work)
            until = time.monotonic() + FETCH_SECONDS
            while True:
                try:
                    caller.end(task, ticket.result(CALL_SECONDS), right_result(task))
                    break
                except RequestError as error:
                    if time.monotonic() > until:
                        caller.fail(task, error)
                        return
                    caller.ledger.write("fetched again", task.call, repr(error))
                    time.sleep(RETRY_SECONDS)
            if task.number % UNKEYED_EVERY and task.number % RESUBMIT_EVERY == 0 and uuid != until_accepted(task):
                caller.ledger.write("wrong", task.call, "its key stands for two requests")
            with suppress(RequestError, UnknownTicket):
                ticket.close()

        def call() -> None:
            task = caller.begin()
            try:
                uuid = until_accepted(task) if task.number % UNKEYED_EVERY else titanic.submit(work, task).uuid
            except RequestError as error:
                # Without a key it is unknown whether the request was stored; it must not be submitted again.
                caller.ledger.write("abandoned", task.call, repr(error))
                return
            caller.ledger.write("accepted", task.call, uuid)
            try:
                fetch(task, uuid)
            except Exception as error:  # noqa: BLE001 - whatever it is, the call has ended with it
                caller.fail(task, error)

        caller.run_threads(4, call)


KINDS: dict[str, Callable[[Caller], None]] = {
    "threads": call_in_threads,
    "asyncio": call_in_tasks,
    "http": call_over_http,
    "legacy": call_by_hand,
    "titanic": submit,
}

if __name__ == "__main__":
    KINDS[sys.argv[1]](Caller(sys.argv[1]))
