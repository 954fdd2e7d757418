"""Processes that call during a run, one kind each: `python -m faults.callers KIND [NUMBER]`, until SIGTERM.

The environment says where: `MDP_BROKER`, `MDP_KEY` and `MDP_BROKER_KEY` as for all programs, `FAULTS_LEDGER`, and
`FAULTS_GATEWAYS`, the gateways' URLs separated by commas.  A caller ends when its outstanding calls have ended.
"""

import asyncio
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import zmq

from zmdp import AsyncClient, Client, Titanic
from zmdp.clients import RequestError, ServiceError
from zmdp.mdp.security.keys import ClientKeys, load_keys
from zmdp.titanic import Ticket, UnknownTicket

from .ledger import Ledger
from .services import Result, Task, limited, parts, quick, right_result, work

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
        self.ledger = Ledger(Path(os.environ["FAULTS_LEDGER"]), name)
        self.stopped = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stopped.set())

    def begin(self, **what: Any) -> Task:
        """Begin a call."""
        number = next(self._numbers)
        task = Task(f"{self._prefix}-{number}", number, **what)
        self.ledger.write("sent", task.call)
        return task

    def retried(self, task: Task, why: object) -> None:
        """Note that the caller sends the same call again."""
        self.ledger.write("retried", task.call, f"{type(why).__name__}: {why}")

    def end(self, task: Task, replies: Result | list[Result], *, event: str = "right") -> bool:
        """End a call that was answered, or note that it was answered again; return whether the reply is the right one.

        All parts of a reply come from one execution, whose mark is written down.
        """
        many = replies if isinstance(replies, list) else [replies]
        right = [right_result(task, part) for part in range(task.parts if isinstance(replies, list) else 1)]
        marks = {each.mark for each in many}
        good = [replace(each, mark="") for each in many] == right and len(marks) == 1
        self.ledger.write(event if good else "wrong", task.call, marks.pop() if good else f"{replies!r:.300}")
        return good

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


def call_in_threads(caller: Caller) -> None:
    """Call through a `Client` that threads share."""
    with Client(timeout=CALL_SECONDS) as client:

        def call() -> None:
            task = caller.begin()
            try:
                if task.number % STREAM_EVERY:
                    caller.end(task, client.call(work, task))
                else:
                    caller.end(task, list(client.stream(parts, task)))
            except Exception as error:  # noqa: BLE001 - whatever it is, the call has ended with it
                caller.fail(task, error)

        caller.run_threads(3, call)


def call_in_tasks(
    caller: Caller, outstanding: int = 6, pause: float = PAUSE_SECONDS, streams: int | None = None, **client: Any
) -> None:
    """Call through an `AsyncClient`; so many of the outstanding calls are streams, or else every fifth call is one."""

    async def call(client: AsyncClient, stream: bool) -> None:
        task = caller.begin()
        try:
            if stream or (streams is None and task.number % STREAM_EVERY == 0):
                caller.end(task, [part async for part in client.stream(parts, task)])
            else:
                caller.end(task, await client.call(work if streams is None else quick, task))
        except Exception as error:  # noqa: BLE001 - whatever it is, the call has ended with it
            caller.fail(task, error)

    async def repeat(client: AsyncClient, at: int) -> None:
        while not caller.stopped.is_set():
            await asyncio.sleep(pause)
            await call(client, at < (streams or 0))

    async def run() -> None:
        async with AsyncClient(timeout=CALL_SECONDS, max_outstanding=outstanding, **client) as made:
            await asyncio.gather(*(repeat(made, at) for at in range(outstanding)))

    asyncio.run(run())


def call_without_pause(caller: Caller) -> None:
    """Have so many calls outstanding as the second argument says, some of them streams."""
    outstanding = int(sys.argv[2])
    call_in_tasks(caller, outstanding, 0.0, outstanding // 25, heartbeat=0.5, liveness=240)


def call_over_http(caller: Caller) -> None:
    """Call through the gateways as a load balancer does: what one cannot take is sent to the other."""
    gateways = itertools.cycle(os.environ["FAULTS_GATEWAYS"].split(","))
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
                        caller.end(task, Result(**reply.json()))
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
            caller.end(task, Result(**json.loads(reply)))
    connection.close()


class Submitter:
    """Submits to Titanic, most requests with a key; fetches the replies in various ways, and closes the requests."""

    def __init__(self, caller: Caller, client: Client, kept: float, service: Any = work) -> None:
        self._caller = caller
        self._titanic = Titanic(client)
        self._pool = ThreadPoolExecutor()
        self._kept = kept
        """The part of the requests that are not closed, so that they can be audited."""
        self._service = service

    def _streams(self, task: Task) -> bool:
        return self._service is work and task.number % 4 == 0

    def call(self) -> None:
        """Submit a request, and see it through."""
        rng = random.Random()
        what: dict[str, Any] = {
            "parts": 150 if rng.random() < 0.02 else rng.randint(1, 17),
            "fails": rng.random() < 0.1,
        }
        task = self._caller.begin(body="x" * (300_000 if rng.random() < 0.02 else rng.choice((0, 500))), **what)
        service: Any = parts if self._streams(task) else self._service
        options: dict[str, Any] = {"priority": rng.choice((0, 0, 3, 9)), "delay": rng.choice((None, None, 1.0))}
        keyed = task.number % UNKEYED_EVERY != 0
        if keyed:
            options |= {"key": task.call, "key_ttl": KEY_TTL_SECONDS}
        ticket = self._submit(task, service, options, twice=keyed and rng.random() < 0.2)
        if ticket is None:
            return
        try:
            read = rng.random() < 0.97  # the others are closed unread
            if read:
                self._fetch(task, ticket, rng)
            if keyed and rng.random() < 0.2:
                self._submit(task, service, options)  # which changes nothing
            if not read or rng.random() >= self._kept:
                self._close(task, ticket)
                if keyed and rng.random() < 0.2:
                    self._submit(task, service, options)  # the key outlives the request
                    self._check_gone(task, ticket)
        except Exception as error:  # noqa: BLE001 - whatever it is, the call has ended with it
            self._caller.fail(task, error)

    def _submit(self, task: Task, service: Any, options: dict[str, Any], *, twice: bool = False) -> Any:
        """Submit a request, with a key until it is accepted; return its ticket, or None if it is unknown."""

        def one(_: int) -> Any:
            while True:
                try:
                    ticket = self._titanic.submit(service, task, **options)
                except RequestError as error:
                    if "key" not in options:
                        # It is unknown whether the request was stored; it must not be submitted again.
                        self._caller.ledger.write("abandoned", task.call, repr(error))
                        return None
                    self._caller.retried(task, error)
                    time.sleep(RETRY_SECONDS)
                else:
                    self._caller.ledger.write("accepted", task.call, ticket.uuid)
                    return ticket

        if twice:
            first, _ = self._pool.map(one, range(2))
            return first
        return one(0)

    def _fetch(self, task: Task, ticket: "Ticket[Any, Any]", rng: random.Random) -> None:
        """Fetch the reply, perhaps after its PARTIALs, and perhaps twice; errors of Titanic's absence are repeated."""
        streams = self._streams(task)
        if streams and rng.random() < 0.5:
            read: list[Any] = []
            self._patiently(task, lambda: read.extend(ticket.partials(len(read), timeout=CALL_SECONDS)))
            if [replace(each, mark="") for each in read] != [right_result(task, at) for at in range(task.parts)]:
                self._caller.ledger.write("wrong", task.call, f"PARTIALs: {read!r:.300}")
        for event in ("right", "seen")[: rng.choice((1, 1, 2))]:
            try:
                found = self._patiently(task, lambda: ticket.result(CALL_SECONDS))
            except ServiceError as error:
                good = task.fails and not streams and error.code == 422
                detail = (error.detail or b"").decode() if good else repr(error)
                self._caller.ledger.write(event if good else "wrong", task.call, detail)
                continue
            if streams:  # they are those of the attempt that counts
                found = self._patiently(task, lambda: list(ticket.partials(timeout=CALL_SECONDS)))
            elif task.fails:
                self._caller.ledger.write("wrong", task.call, f"it should fail: {found!r:.300}")
            self._caller.end(task, found, event=event)

    def _close(self, task: Task, ticket: "Ticket[Any, Any]") -> None:
        self._patiently(task, ticket.close)
        self._caller.ledger.write("closed", task.call)

    def _check_gone(self, task: Task, ticket: "Ticket[Any, Any]") -> None:
        with suppress(UnknownTicket):
            self._caller.ledger.write("wrong", task.call, f"closed, but there: {self._patiently(task, ticket.ready)}")

    def _patiently(self, task: Task, do: Callable[[], Any]) -> Any:
        """Do something, again while Titanic, the broker or the database is away."""
        until = time.monotonic() + FETCH_SECONDS
        while True:
            try:
                return do()
            except (ServiceError, UnknownTicket):
                raise
            except RequestError as error:
                if time.monotonic() > until:
                    raise
                self._caller.ledger.write("fetched again", task.call, repr(error))
                time.sleep(RETRY_SECONDS)


def submit(caller: Caller, service: Any = work) -> None:
    """Submit to Titanic; the second argument is the part of the requests that are kept."""
    with Client(timeout=CALL_SECONDS / 4) as client:
        submitter = Submitter(caller, client, float(sys.argv[2]) if len(sys.argv) > 2 else 0.0, service)
        caller.run_threads(8, submitter.call)


def submit_and_wait(caller: Caller) -> None:
    """Submit many requests with keys at once, whose answers are the replies, and repeat those that have none."""
    rng = random.Random()
    with Client(timeout=CALL_SECONDS / 20, retries=0) as client:

        def ask(task: Task) -> Any:
            body = json.dumps(asdict(task)).encode()
            options = {"key": task.call, "key_ttl": 1000 * KEY_TTL_SECONDS, "reply": True}
            return client.submit("titanic.request", quick.name.encode(), body, options=options)

        def call() -> None:
            missing = [caller.begin() for _ in range(rng.randint(1, 100))]
            while missing:
                asked = [(task, ask(task)) for task in missing]
                missing = [task for task, future in asked if not answered(task, future)]

        def answered(task: Task, future: Any) -> bool:
            try:
                status, *frames = future.result()
            except RequestError as error:
                caller.retried(task, error)
                return False
            if status == b"200":
                return caller.end(task, Result(**json.loads(frames[0]))) or True
            if status != b"300" and frames != [b"database"]:
                caller.ledger.write("wrong", task.call, repr([status, *frames]))
                return True
            caller.retried(task, RequestError(status.decode()))
            return False

        caller.run_threads(1, call)


def call_limited(caller: Caller) -> None:
    """Call the service with a limit; the second argument is the group."""
    with Client(timeout=CALL_SECONDS) as client:

        def call() -> None:
            task = caller.begin()
            try:
                caller.end(task, client.call(limited, task, group=sys.argv[2]))
            except Exception as error:  # noqa: BLE001 - whatever it is, the call has ended with it
                caller.fail(task, error)

        caller.run_threads(3, call)


def call_from_frames(caller: Caller) -> None:
    """Send the rows of DataFrames of eight partitions to the service with a limit, from a Spark of this process."""
    from pyspark.sql.functions import lit  # other callers need no Spark

    from zmdp.spark.pipeline import call_service
    from zmdp.spark.session import open_session

    partitions = 8
    spark = open_session("faults", master=f"local[{partitions}]", conf={"spark.ui.enabled": "false"})

    def call() -> None:
        tasks = {task.call: task for task in (caller.begin() for _ in range(2 * partitions))}
        rows = spark.createDataFrame(
            [(task.call, json.dumps(asdict(task))) for task in tasks.values()], "call string, body string"
        )
        replies = call_service(
            rows.repartition(partitions), limited.name, input="body", group=lit("frame"), timeout=CALL_SECONDS
        )
        for row in replies.collect():
            if row.reply_code == 200:
                caller.end(tasks[row.call], Result(**json.loads(row.reply)))
            else:
                caller.fail(tasks[row.call], RequestError(f"{row.reply_code} {row.reply_error}"))

    caller.run_threads(1, call)
    spark.stop()


KINDS: dict[str, Callable[[Caller], None]] = {
    "threads": call_in_threads,
    "asyncio": call_in_tasks,
    "crowd": call_without_pause,
    "http": call_over_http,
    "legacy": call_by_hand,
    "titanic": submit,
    "waiting": submit_and_wait,
    "limited": call_limited,
    "limited-titanic": partial(submit, service=limited),
    "limited-frames": call_from_frames,
}
SOAKED = ("threads", "asyncio", "http", "legacy", "titanic")
"""The kinds that a soak has."""

if __name__ == "__main__":
    KINDS[sys.argv[1]](Caller(sys.argv[1]))
