"""The client's side of X1 as a state machine: any number of numbered requests over a connection that may be replaced.

It uses no socket and no clock.  `ClientConnection` opens a new socket at the time `retry_at` and reports it with
`connected`.  It calls `receive` and `tick`, sends what `take_messages` returns, and delivers what is in `events`.  When
`lost` gives a reason, it closes the socket: every outstanding request is resent, under its old number, over the next
connection.

The session speaks the batched form (`batch`): the commands of one turn are packed into one message.
"""

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ..mdp import wire
from ..mdp.codes import Code
from ..mdp.errors import (
    BrokerUnreachable,
    RequestCancelled,
    RequestError,
    RequestRejected,
    RequestTimeout,
    RetryLater,
    ServiceError,
    ServiceNotFound,
    SettingError,
    StreamInterrupted,
    WorkerLost,
    ZmdpError,
)
from ..mdp.limits import LARGEST, SHORTEST_HEARTBEAT, Limits
from ..mdp.timers import TimerNode, Timers
from ..mdp.wire import Message, batch
from .reply import Reply

# Not Final: mypyc (2.4) takes a Final of several floats for unset.
BACKOFF: tuple[float, float] = (0.05, 1.0)
"""The shortest and the longest pause, in seconds, between attempts to connect to brokers that do not answer."""
GRACE: tuple[float, float] = (0.05, 0.5)
"""How long the client waits beyond a request's timeout for the broker's ERROR, which is more informative than silence:
this fraction of the timeout, but at most this many seconds."""
MAX_REPLY_BYTES = Limits().max_message
"""Maximum size of the collected PARTIALs of one reply; a stream has no limit."""
FRAME_OVERHEAD_BYTES: Final = 100
"""Memory charged for each frame that is kept, in addition to its content."""
LARGE_REQUEST_BYTES: Final = 1 << 20
"""Size from which a request may be the cause of a broker closing connections."""
MAX_LOSSES: Final = 3
"""Connections that may be lost while such a request is outstanding."""
RESERVED: Final = frozenset({"ttl", "headers", "attempt"})
"""Options of X1 itself, which other arguments set.  `wait` is one too, but `wait: true`, the default, is allowed."""
_CANCEL: Final = 5
"""CANCEL's command byte."""

Outcome = Reply | ZmdpError
"""What a request results in: any number of parts, then a final `Reply` or an error."""


class Call(TimerNode):
    """One request, from when it is made until its FINAL or ERROR."""

    __slots__ = (
        "body", "collected", "collected_bytes", "deadline", "ended", "losses", "number", "options", "receiver",
        "service", "silence", "stream", "streamed", "timeout",
    )  # fmt: skip

    def __init__(self, number: int, service: bytes, body: Sequence[bytes], options: bytes) -> None:
        super().__init__()
        self.number = number
        self.service = service
        self.body = body
        self.options = options
        """The encoded options, without the ttl."""
        self.stream = False
        """Each PARTIAL is delivered as it arrives; otherwise all are collected."""
        self.receiver: Any = None
        """Where the outcomes are delivered.  The session does not use it."""
        self.streamed = False
        """A PARTIAL has been delivered, so the request cannot be sent again."""
        self.collected: list[bytes] | None = None
        """The frames of the PARTIALs, if any has arrived."""
        self.collected_bytes = 0
        self.timeout: float | None = None
        self.silence: float | None = None
        self.deadline: float | None = None
        """When its ttl expires."""
        self.losses = 0
        """Connections that the other end closed while the request was outstanding."""
        self.ended = False


class ClientSession:
    """One client's exchange with whichever broker it is connected to.

    While a request is outstanding, a broker that has been silent for `heartbeat` seconds is sent a HEARTBEAT.  After
    `liveness` silent intervals it is considered dead.
    """

    def __init__(self, *, heartbeat: float = 1.0, liveness: int = 5, rng: random.Random | None = None) -> None:
        if not SHORTEST_HEARTBEAT <= heartbeat < LARGEST:
            raise SettingError(f"heartbeat is {heartbeat!r}: it must be {SHORTEST_HEARTBEAT} seconds or more")
        if liveness < 2:
            raise SettingError(f"liveness is {liveness!r}: it must be a number of intervals, 2 or more")
        self.unsent = 0
        """Commands that `take_messages` would return."""
        self.outstanding = 0
        """Requests that have not ended."""
        self.events: list[tuple[Call, Outcome]] = []
        """What to deliver.  The connection empties it."""
        self.lost: str | None = "not connected yet"
        """Why there is no connection; None while there is one."""
        self.retry_at = 0.0
        """When to connect next, while `lost`."""
        self.endpoint = ""
        """The endpoint of the latest connection, for error messages."""
        self.heard = False
        """Whether the broker has sent anything over the latest connection."""
        self._trouble: str | None = None
        """Why the last connection was lost, until a broker sends something again."""
        self._heartbeat = heartbeat
        self._silence_limit = heartbeat * (liveness - 1)
        """Seconds a broker may leave a HEARTBEAT unanswered."""
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not cryptography
        self._backoff = BACKOFF[0]
        self._last_number = 0
        self._calls: dict[Any, Call] = {}
        self._due: Timers[Call] = Timers(0.01)
        self._batch: Any = _new_batch()
        self._heartbeat_unsent = False
        self._beat_at = 0.0
        self._asked_at: float | None = None
        """When the first unanswered HEARTBEAT was sent."""

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def request(
        self,
        service: bytes,
        body: Sequence[bytes],
        now: float,
        *,
        timeout: float | None = None,
        silence: float | None = None,
        stream: bool = False,
        wait: bool = True,
        headers: Mapping[Any, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        receiver: Any = None,
    ) -> Call:
        """Begin a request.  It is sent now, or as soon as there is a connection.

        Args:
            service: The service's name.
            body: The frames of the request.
            now: The current time.
            timeout: Seconds until the FINAL must have arrived.  It travels with the request as its ttl.
            silence: Seconds within which something must arrive, a PARTIAL or the FINAL.
            stream: Deliver each PARTIAL as it arrives.
            wait: If false, fail immediately when no worker offers the service.
            headers: Texts by name, for the handler.
            options: Further options of the request.
            receiver: Where to deliver the outcomes.

        Raises `SettingError` for an argument that cannot be sent.
        """
        raw = b""
        if options or headers or not wait:
            raw = _encode_options(options, headers, wait)
        if len(body) > batch.MAX_BODY_FRAMES:
            raise SettingError(f"the body has {len(body)} frames: it may have at most {batch.MAX_BODY_FRAMES}")
        self._last_number += 1
        call = Call(self._last_number, service, body, raw)
        call.stream = stream
        call.receiver = receiver
        call.timeout = timeout
        call.silence = silence
        if timeout is not None:
            call.deadline = now + timeout
            if timeout * 1000 > batch.MAX_TTL_MS:
                _with_ttl(raw, timeout * 1000)  # raises SettingError if it cannot be sent
        if self.lost is None:
            self._send_request(call, now)
        self._set_due(call, now)
        if not self.outstanding:
            self._expect_sign_of_life(now)
            if self.lost is not None:
                self.retry_at = min(self.retry_at, now + self._backoff)
        self._calls[call.number] = call
        self.outstanding += 1
        return call

    def _set_due(self, call: Call, now: float) -> None:
        due = math.inf
        timeout, deadline, silence = call.timeout, call.deadline, call.silence
        if deadline is not None and timeout is not None:
            due = deadline + min(timeout * GRACE[0], GRACE[1])
        if silence is not None and now + silence < due:
            due = now + silence
        if due < math.inf:
            self._due.set(call, due)

    def cancel(self, call: Call) -> None:
        """Abandon a request and tell the broker.  Nothing more is delivered for it."""
        if not call.ended:
            self._forget(call)
            self._send_cancel(call)

    def _send_request(self, call: Call, now: float) -> None:
        ttl, options = 0, call.options
        deadline = call.deadline
        if deadline is not None:
            ttl = max(1, round((deadline - now) * 1000))
            if ttl > batch.MAX_TTL_MS:
                options = _with_ttl(options, ttl)
                ttl = 0
        self._batch.request_to_broker(call.number, ttl, call.service, options, call.body)
        self.unsent += 1

    def _send_cancel(self, call: Call) -> None:
        if self.lost is None:
            self._batch.signal(_CANCEL, call.number)
            self.unsent += 1

    def take_messages(self) -> list[Message]:
        """Return the messages to send: all commands since the last call, in as few messages as possible."""
        if not self.unsent:
            return []
        messages: list[Message] = self._batch.messages()
        if self._heartbeat_unsent:
            self._heartbeat_unsent = False
            messages.append([b"", wire.CX1])
        self.unsent = 0
        return messages

    def _forget(self, call: Call) -> None:
        call.ended = True
        self._due.clear(call)
        del self._calls[call.number]
        self.outstanding -= 1

    def _fail(self, call: Call, error: ZmdpError) -> None:
        self._forget(call)
        self.events.append((call, error))

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    def connected(self, endpoint: str, now: float) -> None:
        """Report a new connection, to `endpoint`: every outstanding request is sent there."""
        self.lost = None
        self.endpoint = endpoint
        self.heard = False
        self._expect_sign_of_life(now)
        for call in self._calls.values():
            call.collected, call.collected_bytes = None, 0
            self._send_request(call, now)

    def lose(self, reason: str, now: float, *, cut: bool = False) -> None:
        """Give up the connection.  Streams that have begun fail; other requests wait for the next connection.

        `cut` tells that the other end closed an established connection.
        """
        self.lost = self._trouble = reason
        self.retry_at = now
        if not self.heard:  # otherwise the broker may have been restarted: there is no reason to wait
            self.retry_at += self._backoff * self._rng.uniform(0.5, 1.0)
            self._backoff = min(2 * self._backoff, BACKOFF[1])
        self._batch = _new_batch()
        self._heartbeat_unsent = False
        self.unsent = 0
        for call in list(self._calls.values()):
            call.losses += cut
            service = call.service.decode()
            if call.streamed:
                text = f"the stream of service {service!r} broke off: "
                text += f"the connection to {self.endpoint} was lost ({reason})"
                self._fail(call, StreamInterrupted(text, service=service))
            elif call.losses >= MAX_LOSSES and (size := wire.size_of(call.body)) > LARGE_REQUEST_BYTES:
                # A broker's libzmq disconnects a peer that sends a frame far beyond its limit.  Each time this request
                # is sent again, all others would have to be sent again with it.
                text = (
                    f"the connection to {self.endpoint} was lost {call.losses} times with a request of {size} bytes "
                    f"for service {service!r} outstanding: does that exceed the broker's max_message?"
                )
                self._fail(call, RequestRejected(text, service=service))

    def refuse(self, reason: str) -> None:
        """Fail every outstanding request, because every broker refuses this client."""
        for call in list(self._calls.values()):
            service = call.service.decode()
            text = f"service {service!r} cannot be called through {self.endpoint}: {reason}"
            self._fail(call, BrokerUnreachable(text, service=service))

    def close(self, error: Callable[[], ZmdpError]) -> None:
        """Cancel every outstanding request; each ends with an `error`."""
        for call in list(self._calls.values()):
            self._send_cancel(call)
            self._fail(call, error())

    def receive(self, message: Message, now: float) -> None:
        """Process a message from the broker, in either form."""
        if self.lost is not None:
            return
        found = wire.decode_broker(message)
        if isinstance(found, wire.Invalid) or found.header != wire.CX1:
            return
        self.heard = True
        self._backoff = BACKOFF[0]
        self._trouble = None
        self._expect_sign_of_life(now)
        if isinstance(found, wire.Batched):
            for command in batch.to_client(message, found.at):
                self._process(command, now)
        else:
            self._process(found, now)

    def _process(self, command: Any, now: float) -> None:
        if isinstance(command, wire.Reply):
            call = self._calls.get(command.id)
            if call is not None:  # else it was cancelled
                self._answered(call, command, now)
        elif isinstance(command, wire.Error):
            call = self._calls.get(command.id)
            if call is not None:
                self._fail(call, _error(call, command))

    def _answered(self, call: Call, answer: wire.Reply, now: float) -> None:
        service = call.service.decode()
        body = answer.body
        if answer.final:
            failure = wire.parse_error(body)  # from a worker whose dialect has no ERROR
            self._forget(call)
            if failure is not None:
                self.events.append((call, ServiceError(failure[0], failure[1], service=service)))
                return
            reply = Reply(body, service=service, final=True)
            if call.collected is not None:
                reply[:0] = call.collected
                reply.collected = len(call.collected)
            self.events.append((call, reply))
            return
        if call.silence is not None:
            self._due.clear(call)
            self._set_due(call, now)
        if call.stream:
            call.streamed = True
            self.events.append((call, Reply(body, service=service, final=False)))
            return
        if call.collected is None:
            call.collected = []
        call.collected += body
        call.collected_bytes += wire.size_of(body) + FRAME_OVERHEAD_BYTES * len(body)
        if call.collected_bytes > MAX_REPLY_BYTES:
            text = f"the parts of the reply of service {service!r} exceed {MAX_REPLY_BYTES} bytes: use stream()"
            self._send_cancel(call)
            self._fail(call, RequestRejected(text, service=service, code=Code.TOO_LARGE))

    # ── the time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> None:
        """Do what is due: end overdue requests, send heartbeats, give up a broker that has been silent for too long."""
        for call in self._due.pop_due(now):
            self._send_cancel(call)
            self._fail(call, self._overdue(call, now))
        if self.lost is not None or not self.outstanding or now < self._beat_at:
            return
        asked_at = self._asked_at
        if asked_at is not None and now >= asked_at + self._silence_limit:
            silence = f"silent for {self._silence_limit + self._heartbeat:g} s"
            if self.heard:
                self.lose(f"the broker has been {silence}", now)
            else:
                self.lose(
                    f"the program that listens there has been {silence}; if it is not zmdp's broker, try protocol 0.2",
                    now,
                )
            return
        if asked_at is None:
            asked_at = now
            self._asked_at = now
        self._beat_at = min(now + self._heartbeat, asked_at + self._silence_limit)
        if not self._heartbeat_unsent:
            self._heartbeat_unsent = True
            self.unsent += 1

    def deadline(self) -> float | None:
        """Return when `tick` (or, while `lost`, a new connection) is due; None if nothing is outstanding."""
        if not self.outstanding:
            return None
        then = self.retry_at if self.lost is not None else self._beat_at
        due = self._due.next_due()
        return then if due is None else min(due, then)

    def _expect_sign_of_life(self, now: float) -> None:
        """Begin to wait for a sign of life: one has arrived, or there was no reason to expect one until now."""
        self._beat_at = now + self._heartbeat
        self._asked_at = None

    def _overdue(self, call: Call, now: float) -> RequestError:
        service = call.service.decode()
        passed = call.deadline is not None and now >= call.deadline
        waited = call.timeout if passed else call.silence
        text = f"no reply from service {service!r} through {self.endpoint} within {waited:g} s"
        if call.streamed:
            text = f"the stream of service {service!r} stopped: nothing arrived for {waited:g} s after a part"
            if passed:
                text = f"the stream of service {service!r} was not finished within {waited:g} s"
            return StreamInterrupted(text, service=service)
        trouble = self.lost or self._trouble
        if trouble is None and self._asked_at is not None:
            trouble = "the broker has not said anything yet"
        if trouble is not None and not self.heard:
            return BrokerUnreachable(f"{text}: {trouble}", service=service)
        if self._asked_at is not None and now - self._asked_at >= self._heartbeat:
            text += f"; the broker has been silent for {now - self._asked_at + self._heartbeat:.1f} s"
        return RequestTimeout(text, service=service)


def _new_batch() -> Any:
    return batch.Batch((b"",), wire.CX1)


def _encode_options(options: Mapping[str, Any] | None, headers: Mapping[Any, Any] | None, wait: bool) -> bytes:
    """Return the options of a request as JSON.  Raises `SettingError` if they cannot be sent."""
    # The types of headers are checked here: compiled code would raise `TypeError` for types other than those declared.
    given: dict[str, Any] = {}
    if options:
        given.update(options)
        reserved = RESERVED if given.get("wait", True) is True else RESERVED | {"wait"}
        if not reserved.isdisjoint(given):
            names = ", ".join(sorted(reserved.intersection(given)))
            raise SettingError(
                f"options have {names}: these are X1's own; the arguments timeout, wait and headers set them"
            )
    if headers:
        if not all(isinstance(each, str) for pair in headers.items() for each in pair):
            raise SettingError(f"headers are {headers!r:.200}: names and values are text")
        given["headers"] = dict(headers)
    if not wait:
        given["wait"] = False
    return wire.encode_options(given)


def _with_ttl(options: bytes, ttl: float) -> bytes:
    """Return `options` with a ttl, in milliseconds, that is too long for a record.  Raises `SettingError` as above."""
    values: dict[str, Any] = json.loads(options) if options else {}
    values["ttl"] = round(ttl)
    return wire.encode_options(values)


def _error(call: Call, error: wire.Error) -> RequestError:
    """Return the exception for an ERROR.

    An ERROR with a detail frame is the service's own, whatever its code; one without is the broker's.
    """
    service, code, text = call.service.decode(), error.code, error.text.decode(errors="replace")
    if error.detail:
        return ServiceError(code, text, error.detail[0] or None, service=service)
    kind = StreamInterrupted if call.streamed and code == Code.WORKER_LOST else _ERRORS.get(code)
    if kind is None:
        return ServiceError(code, text, service=service)
    return kind(f"service {service!r}: {text} ({code})", service=service, code=code, text=text)


_ERRORS: Final[Mapping[int, type[RequestError]]] = {
    Code.MALFORMED: RequestRejected,
    Code.NOT_ALLOWED: RequestRejected,
    Code.NO_WORKER: ServiceNotFound,
    Code.TIME_PASSED: RequestTimeout,
    Code.TOO_LARGE: RequestRejected,
    Code.QUEUE_FULL: RetryLater,
    Code.CANCELLED: RequestCancelled,
    Code.WORKER_LOST: WorkerLost,
    Code.DRAINING: RetryLater,
}
