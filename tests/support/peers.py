"""Hand-written clients and workers on raw ZeroMQ sockets, which test a broker from outside.

They use none of zmdp's encoders, clients or workers: the frames are written out as in the specification, so that a test
checks the protocol, and not only that two halves of one program agree.

That *no* message arrives is proved by order instead of by waiting: a ROUTER keeps the order of messages to one peer, so
a message that does not precede the answer to a later request on the same connection never comes (`Peer.nothing`).
"""

import json
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from typing import Any, Self

import zmq

from zmdp.mdp.broker.io.loop import Server

from .processes import TIMEOUT_SECONDS

Message = list[bytes]

_fences = count(1)


class Silence(AssertionError):
    """An expected message did not arrive in time."""


class Peer:
    """A connection to a broker."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        *,
        kind: int = zmq.DEALER,
        options: dict[int, int | bytes] | None = None,
    ) -> None:
        self.socket = context.socket(kind)
        self.socket.linger = 0
        self.socket.sndtimeo = int(TIMEOUT_SECONDS * 1000)
        for option, value in (options or {}).items():
            self.socket.set(option, value)
        self.socket.connect(endpoint)
        self._came: deque[Message] = deque()

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def recv(self, timeout: float = TIMEOUT_SECONDS) -> Message:
        """Return the next message.  Raises `Silence` if none arrives in time."""
        return self._came.popleft() if self._came else self._take(timeout)

    def _take(self, timeout: float) -> Message:
        if not self.socket.poll(max(0, int(timeout * 1000))):
            raise Silence(f"no message arrived within {timeout} s")
        return self.socket.recv_multipart()

    @property
    def waiting(self) -> int:
        """Number of messages that `sync` has kept for `recv`."""
        return len(self._came)

    def sync(self) -> Self:
        """Wait until the broker has handled everything sent here; messages that arrive are kept for `recv`."""
        # Twice: the broker answers during a turn, but dispatches at its end.
        for _ in range(2):
            self._fence(b"mmi.fence-%d" % next(_fences))
        return self

    def _fence(self, name: bytes) -> None:
        """Send a request that the broker itself answers, and wait for the answer."""
        # With a leading empty frame, which proxies need.
        self.send(b"", b"MDPC02", b"\x01", name, b"")
        self._keep_until([b"", b"MDPC02", b"\x03", name, b"501"])

    def _keep_until(self, answer: Message) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (message := self._take(deadline - time.monotonic())) != answer:
            self._came.append(message)

    def nothing(self) -> None:
        """Assert that nothing but HEARTBEATs has arrived or arrives in response to what was sent here."""
        self.sync()
        came = [message for message in self._came if not self._is_heartbeat(message)]
        assert came == []
        self._came.clear()

    def silent(self) -> None:
        """Assert that nothing has arrived since the last `recv`, `sync` or `nothing`, not even a HEARTBEAT."""
        self.sync()
        assert not self._came

    def _is_heartbeat(self, message: Message) -> bool:
        del message
        return False

    def close(self) -> None:
        self.socket.close()


class Client(Peer):
    """An MDP/0.2 client."""

    def request(self, service: bytes, *body: bytes) -> None:
        self.send(b"MDPC02", b"\x01", service, *body)

    def partial(self, service: bytes, *body: bytes) -> None:
        """Expect a PARTIAL with this body."""
        assert self.recv() == [b"MDPC02", b"\x02", service, *body]

    def final(self, service: bytes, *body: bytes) -> None:
        """Expect a FINAL with this body."""
        assert self.recv() == [b"MDPC02", b"\x03", service, *body]


class OldClient(Client):
    """An MDP/0.1 client, which sends the leading empty frame."""

    def request(self, service: bytes, *body: bytes) -> None:
        self.send(b"", b"MDPC01", service, *body)

    def partial(self, service: bytes, *body: bytes) -> None:
        raise NotImplementedError("MDP/0.1 has no PARTIAL")

    def final(self, service: bytes, *body: bytes) -> None:
        assert self.recv() == [b"", b"MDPC01", service, *body]


class Worker(Peer):
    """An MDP/0.2 worker, which sends only what the test tells it to, HEARTBEATs included."""

    head: tuple[bytes, ...] = (b"MDPW02",)
    READY, REQUEST, PARTIAL, FINAL, HEARTBEAT, DISCONNECT = b"\x01", b"\x02", b"\x03", b"\x04", b"\x05", b"\x06"

    def ready(self, service: bytes) -> None:
        self.send(*self.head, self.READY, service)

    def partial(self, client: bytes, *body: bytes) -> None:
        self.send(*self.head, self.PARTIAL, client, b"", *body)

    def final(self, client: bytes, *body: bytes) -> None:
        self.send(*self.head, self.FINAL, client, b"", *body)

    def heartbeat(self) -> None:
        self.send(*self.head, self.HEARTBEAT)

    def disconnect(self) -> None:
        self.send(*self.head, self.DISCONNECT)

    def command(self, timeout: float = TIMEOUT_SECONDS) -> Message:
        """Return the next message that is not a HEARTBEAT."""
        deadline = time.monotonic() + timeout
        while self._is_heartbeat(message := self.recv(deadline - time.monotonic())):
            pass
        return message

    def work(self, *body: bytes) -> bytes:
        """Expect a REQUEST with this body; return its address."""
        message = self.command()
        at = len(self.head) + 1
        assert message[:at] == [*self.head, self.REQUEST]
        assert message[at + 1] == b""
        assert message[at + 2 :] == [*body]
        return message[at]

    def beaten(self) -> None:
        """Expect a HEARTBEAT."""
        assert self.recv() == [*self.head, self.HEARTBEAT]

    def disconnected(self) -> None:
        """Expect a DISCONNECT, which in X1 may say why."""
        assert self.command() == [*self.head, self.DISCONNECT]

    def _is_heartbeat(self, message: Message) -> bool:
        return message == [*self.head, self.HEARTBEAT]


class OldWorker(Worker):
    """An MDP/0.1 worker, which sends the leading empty frame and no PARTIALs."""

    head = (b"", b"MDPW01")
    FINAL, HEARTBEAT, DISCONNECT = b"\x03", b"\x04", b"\x05"

    def partial(self, client: bytes, *body: bytes) -> None:
        raise NotImplementedError("MDP/0.1 has no PARTIAL")


# ── X1 ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

ATTACHED = 0xFFFFFFFF
"""Stands for a frame's length if the frame is an attachment."""


def record(command: int, id: int, rest: bytes = b"") -> bytes:  # noqa: A002 - the wire's word
    """Return a record of an X1 message."""
    return struct.pack(">IBQ", 9 + len(rest), command, id) + rest


def body_of(*frames: bytes | None) -> bytes:
    """Return a body as records contain it; None stands for the next attachment."""
    parts = [struct.pack(">I", ATTACHED) if f is None else struct.pack(">I", len(f)) + f for f in frames]
    return struct.pack(">H", len(frames)) + b"".join(parts)


def request_of(number: int, service: bytes, *body: bytes | None, ttl: int = 0, options: bytes = b"") -> bytes:
    """Return the record of a client's REQUEST."""
    head = struct.pack(">IB", ttl, len(service)) + service + struct.pack(">H", len(options)) + options
    return record(1, number, head + body_of(*body))


def ready_of(service: bytes, credit: int, options: bytes = b"") -> bytes:
    """Return the record of a worker's READY."""
    head = struct.pack(">IB", credit, len(service)) + service
    return record(1, 0, head + struct.pack(">H", len(options)) + options)


def records_of(message: Message, at: int) -> list[tuple[int, int, bytes]]:
    """Return command, id and rest of each record of a message whose header is at index `at`."""
    assert message[at + 1] == b"\x09"
    data, found, begin = message[at + 2], [], 0
    while begin < len(data):
        size, command, number = struct.unpack_from(">IBQ", data, begin)
        assert 9 <= size <= len(data) - begin - 4
        found.append((command, number, data[begin + 13 : begin + 4 + size]))
        begin += 4 + size
    return found


def take_body(rest: bytes, attachments: deque[bytes]) -> list[bytes]:
    """Return the frames of a body, which must be all of `rest`."""
    (count,) = struct.unpack_from(">H", rest)
    begin, frames = 2, []
    for _ in range(count):
        (length,) = struct.unpack_from(">I", rest, begin)
        begin += 4
        if length == ATTACHED:
            frames.append(attachments.popleft())
        else:
            frames.append(rest[begin : begin + length])
            assert len(frames[-1]) == length
            begin += length
    assert begin == len(rest)
    return frames


class X1Peer(Peer):
    """Base of the clients and workers that speak X1.

    `recv` returns a message record by record: head, command, id in decimal, and the fields of the command.
    """

    head: tuple[bytes, ...]

    def __init__(self, context: zmq.Context[Any], endpoint: str, **settings: Any) -> None:
        super().__init__(context, endpoint, **settings)
        self._unpacked: deque[Message] = deque()

    def say(self, *records: bytes, attachments: tuple[bytes, ...] = ()) -> None:
        """Send records, in one message."""
        self.send(*self.head, b"\x09", b"".join(records), *attachments)

    def heartbeat(self) -> None:
        self.send(*self.head)

    def beaten(self) -> None:
        """Expect a HEARTBEAT."""
        assert self.recv() == [*self.head]

    def _take(self, timeout: float) -> Message:
        if not self._unpacked:
            message = super()._take(timeout)
            at = len(self.head) - 1
            if message[: at + 1] != [*self.head] or message[at + 1 : at + 2] != [b"\x09"]:
                return message
            attachments = deque(message[at + 3 :])
            for command, number, rest in records_of(message, at):
                told = self._fields(command, rest, attachments)
                self._unpacked.append([*self.head, bytes([command]), b"%d" % number, *told])
            assert not attachments
            assert self._unpacked
        return self._unpacked.popleft()

    def _is_heartbeat(self, message: Message) -> bool:
        return message == [*self.head]

    def _fields(self, command: int, rest: bytes, attachments: deque[bytes]) -> list[bytes]:
        raise NotImplementedError


class X1Client(X1Peer, Client):
    """An X1 client.

    It numbers its requests; expectations are for the latest one, unless a number is given.  Replies do not name their
    service.
    """

    head = (b"", b"MDPCX1")
    number = 0
    reason, lost = b"", 0
    """The reason and the number of lost workers in the ERROR that arrived last."""

    def request(
        self, service: bytes, *body: bytes, number: int | None = None, options: bytes = b"", ttl: int = 0
    ) -> None:
        self.number = self.number + 1 if number is None else number
        self.say(request_of(self.number, service, *body, options=options, ttl=ttl))

    def cancel(self, number: int | None = None) -> None:
        self.say(record(5, self.number if number is None else number))

    def partial(self, service: bytes, *body: bytes, number: int | None = None) -> None:
        self._expect(b"\x02", number, *body)

    def final(self, service: bytes, *body: bytes, number: int | None = None) -> None:
        self._expect(b"\x03", number, *body)

    def _expect(self, command: bytes, number: int | None, *told: bytes) -> None:
        assert self.recv() == [*self.head, command, b"%d" % (self.number if number is None else number), *told]

    def error(self, code: bytes, *told: bytes, number: int | None = None) -> str:
        """Expect an ERROR, with exactly the text and detail in `told` if given; return the text."""
        message = self.recv()
        number = self.number if number is None else number
        assert message[:5] == [*self.head, b"\x04", b"%d" % number, code]
        if told:
            assert message[5:] == [*told]
        else:
            assert len(message) == 6
        return message[5].decode(errors="replace")

    def _fields(self, command: int, rest: bytes, attachments: deque[bytes]) -> list[bytes]:
        if command == 7:
            return [rest] if rest else []
        if command in {2, 3}:
            return take_body(rest, attachments)
        assert command == 4
        code, self.lost, named = struct.unpack_from(">HHB", rest)
        self.reason = rest[5 : 5 + named]
        (told,), at = struct.unpack_from(">H", rest, 5 + named), 7 + named
        return [b"%03d" % code, rest[at : at + told], *take_body(rest[at + told :], attachments)]


class X1Worker(X1Peer, Worker):
    """An X1 worker."""

    head = (b"", b"MDPWX1")
    ERROR, CANCEL, CREDIT, RELEASE = b"\x07", b"\x08", b"\x0a", b"\x0b"

    def ready(self, service: bytes, credit: int = 1, **told: Any) -> None:
        """Send READY with `told` as its options."""
        self.say(ready_of(service, credit, json.dumps(told).encode() if told else b""))

    def partial(self, client: bytes, *body: bytes) -> None:
        self.say(record(3, int(client), body_of(*body)))

    def final(self, client: bytes, *body: bytes) -> None:
        self.say(record(4, int(client), body_of(*body)))

    def error(self, client: bytes, code: bytes, text: bytes, *detail: bytes) -> None:
        self.say(record(7, int(client), struct.pack(">HHBH", int(code), 0, 0, len(text)) + text + body_of(*detail)))

    def credit(self, credit: int) -> None:
        self.say(record(10, 0, struct.pack(">I", credit)))

    def release(self, client: bytes) -> None:
        self.say(record(11, int(client)))

    def disconnect(self) -> None:
        self.say(record(6, 0))

    def work(self, *body: bytes, options: bytes = b"", attempt: int = 1) -> bytes:
        """Expect a REQUEST with these options and this body, at this attempt; return its address."""
        address, _, *told = self.told()
        assert told == [attempt, options, [*body]]
        return address

    def request(self, *body: bytes) -> tuple[bytes, bytes]:
        """Expect a REQUEST with this body; return its address and options."""
        address, options, came = self.any_request()
        assert came == [*body]
        return address, options

    def any_request(self) -> tuple[bytes, bytes, list[bytes]]:
        """Expect a REQUEST; return its address, options and body."""
        address, _, _, options, body = self.told()
        return address, options, body

    def told(self) -> tuple[bytes, int, int, bytes, list[bytes]]:
        """Expect a REQUEST; return its address, ttl, attempt, options and body."""
        message = self.command()
        assert message[:3] == [*self.head, self.REQUEST]
        return message[3], int(message[4]), int(message[5]), message[6], message[7:]

    def cancelled(self, client: bytes) -> None:
        """Expect a CANCEL."""
        assert self.command() == [*self.head, self.CANCEL, client]

    def disconnected(self) -> None:
        message = self.command()
        assert message[:4] == [*self.head, self.DISCONNECT, b"0"]
        assert len(message) <= 5

    def _fields(self, command: int, rest: bytes, attachments: deque[bytes]) -> list[bytes]:
        if command == 6:
            return [rest] if rest else []
        if command == 8:
            assert rest == b""
            return []
        assert command == 2
        ttl, attempt, told = struct.unpack_from(">IBH", rest)
        return [b"%d" % ttl, b"%d" % attempt, rest[7 : 7 + told], *take_body(rest[7 + told :], attachments)]


class Bench:
    """A running broker, and a test's peers, which `close` closes."""

    def __init__(self, server: Server, context: zmq.Context[Any]) -> None:
        self.server = server
        self.context = context
        self.endpoint = server.endpoints[0]
        self._peers = ExitStack()
        self._observer = self.client()

    def connect(
        self,
        peer: Callable[..., Any],
        *,
        endpoint: str = "",
        kind: int = zmq.DEALER,
        options: dict[int, int | bytes] | None = None,
    ) -> Any:
        made = peer(self.context, endpoint or self.endpoint, kind=kind, options=options)
        self._peers.callback(made.close)
        return made

    def peer(self, **settings: Any) -> Peer:
        made: Peer = self.connect(Peer, **settings)
        return made

    def client(self, **settings: Any) -> Client:
        made: Client = self.connect(Client, **settings)
        return made

    def worker(self, service: bytes | None = None, **settings: Any) -> Worker:
        """Return a worker; if `service` is given, the broker has registered it."""
        return self._registered(self.connect(Worker, **settings), service)

    def old_worker(self, service: bytes | None = None, **settings: Any) -> OldWorker:
        made: OldWorker = self._registered(self.connect(OldWorker, **settings), service)
        return made

    def x1_client(self, **settings: Any) -> X1Client:
        made: X1Client = self.connect(X1Client, **settings)
        return made

    def x1_worker(self, service: bytes | None = None, *, credit: int = 1, **settings: Any) -> X1Worker:
        made: X1Worker = self._registered(self.connect(X1Worker, **settings), service, credit=credit)
        return made

    @staticmethod
    def _registered(worker: Any, service: bytes | None, **told: Any) -> Any:
        if service is not None:
            worker.ready(service, **told)
            worker.sync()
        return worker

    def mmi(self, name: bytes, *body: bytes) -> bytes:
        """Ask the broker itself, over a separate connection."""
        self._observer.request(name, *body)
        head, command, service, answer = self._observer.recv()
        assert (head, command, service) == (b"MDPC02", b"\x03", name)
        return answer

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.mmi(b"mmi.stats", b""))
        return found

    def status(self, service: bytes) -> bytes:
        return self.mmi(b"mmi.service", service)

    def until(self, what: Callable[[], bool]) -> None:
        """Poll until `what` returns true.  Raises `Silence` if it does not in time."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not what():
            if time.monotonic() > deadline:
                raise Silence(f"the condition was still false after {TIMEOUT_SECONDS} s; {self.stats()}")
            self._observer.socket.poll(5)  # no message can come: this is a pause between two polls

    def close(self) -> None:
        self._peers.close()
