"""The client's side of X1 as a state machine: any number of numbered requests over a connection that may be replaced.

It uses no socket and no clock.  `ClientConnection` opens a new socket at the time `retry_at` and reports it with
`connected`.  It calls `receive` and `tick`, sends what `take_messages` returns, and delivers what is in `events`.  When
`lost` gives a reason, it closes the socket: every outstanding request is resent, under its old number, over the next
connection.

With several brokers, the session also leaves a connection that still works: when its broker drains, and when the first
broker is back.  Then `lost` gives the reason as well, but the requests that are outstanding stay with that connection,
an `OldConnection`, which `take_left` returns.  `ClientConnection` keeps its socket, passes what arrives there to
`receive_old`, and closes it when `closed` gives a reason.  All other requests are sent over the next connection.  A
request is outstanding at one connection only, so an answer that arrives over another is ignored.

The commands of one turn are packed into one message (`batch`).
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ..mdp import wire
from ..mdp.codes import Code
from ..mdp.endpoints import Endpoints
from ..mdp.errors import (
    BrokerUnreachable,
    RequestError,
    RequestRejected,
    RequestTimeout,
    RetryLater,
    ServiceError,
    SettingError,
    StreamInterrupted,
    ZmdpError,
)
from ..mdp.limits import LARGEST, SHORTEST_HEARTBEAT, Limits
from ..mdp.timers import Timers
from ..mdp.wire import Message, batch, x1
from .call import Call, Outcome, encode_options, error_of, is_refused
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
# Not Final, for the same reason as BACKOFF.
PROBE_INTERVAL: tuple[float, float] = (1.0, 15.0)
"""The shortest and the longest interval, in seconds, between probes of the first broker; each is twice the last."""
PROBE_SECONDS: Final = 2.0
"""How long the first broker may take to answer a probe."""
SHORT_CONNECTION_SECONDS: Final = 1.0
"""A broker that drains after a shorter connection may have been draining from the beginning."""
MAX_OLD_CONNECTIONS: Final = 3
"""Connections still in use from which on the client does not return to the first broker: streams may last for days."""
_LOST: Final = 0
_DRAINED: Final = 1
_RETURNS: Final = 2


class OldConnection:
    """A connection that the client has left, and the requests that will be answered over it."""

    def __init__(self, endpoint: str, calls: dict[Any, Call]) -> None:
        self.endpoint = endpoint
        self.calls = calls
        self.unsent = 0
        """Commands that `take_messages` would return."""
        self.closed: str | None = None
        """Why the connection is to be closed; None while it is needed."""
        self.batch: Any = None
        self.heartbeat_unsent = False
        self.beat_at = 0.0
        self.asked_at: float | None = None
        """When the first unanswered HEARTBEAT was sent."""

    def take_messages(self) -> list[Message]:
        """Return the messages to send over this connection, as `ClientSession.take_messages` does for the current."""
        if not self.unsent:
            return []
        messages: list[Message] = self.batch.messages()
        if self.heartbeat_unsent:
            self.heartbeat_unsent = False
            messages.append(wire.heartbeat((b"",), wire.CX1))
        self.unsent = 0
        return messages


class ClientSession:
    """One client's exchange with whichever broker it is connected to.

    While a request is outstanding, a broker that has been silent for `heartbeat` seconds is sent a HEARTBEAT.  After
    `liveness` silent intervals it is considered dead.

    With several `endpoints`, a request that a draining broker refuses (503) does not fail, but is sent to the next.
    """

    def __init__(
        self,
        endpoints: Endpoints | None = None,
        *,
        heartbeat: float = 1.0,
        liveness: int = 5,
        rng: random.Random | None = None,
    ) -> None:
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
        self.endpoints = endpoints or Endpoints([""])
        """The brokers and the one in use.  `next_endpoint` changes it."""
        self.several = len(self.endpoints.all) > 1
        """Whether there is a broker to move to."""
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
        self._old: list[OldConnection] = []
        self._left: OldConnection | None = None
        """The connection just left, until `take_left` returns it."""
        self._drains = False
        """The message being processed says that the broker drains."""
        self._probe_at = math.inf
        """When to probe the first broker; while that is done, when it has taken too long."""
        self._begin_failover()

    def _begin_failover(self) -> None:
        """Set what is used only if there are several brokers."""
        self._refused: dict[Any, Call] = {}
        """The requests that the broker refuses in the message being processed, because it drains."""
        self._going = _LOST
        """Why the next connection is opened."""
        self._drained = 0
        """Brokers left in a row because they drained, each after a short time."""
        self._pause = BACKOFF[0]
        """The pause before the next connection, when all brokers drain."""
        self._connected_at = -math.inf
        self._probe_interval = PROBE_INTERVAL[0]
        self._probing = False

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
            raw = encode_options(options, headers, wait)
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
            self._send_cancel(call)
            self._forget(call)

    def _send_request(self, call: Call, now: float) -> None:
        ttl, deadline = 0, call.deadline
        if deadline is not None:
            ttl = min(max(1, round((deadline - now) * 1000)), batch.MAX_TTL_MS)
        self._batch.request_to_broker(call.number, ttl, call.service, call.options, call.body)
        self.unsent += 1

    def _send_cancel(self, call: Call) -> None:
        old = self._old_of(call) if self._old else None
        if old is not None:
            old.batch.signal(x1.CLIENT_CANCEL, call.number)
            old.unsent += 1
        elif self.lost is None:
            self._batch.signal(x1.CLIENT_CANCEL, call.number)
            self.unsent += 1

    def take_messages(self) -> list[Message]:
        """Return the messages to send: all commands since the last call, in as few messages as possible."""
        if not self.unsent:
            return []
        messages: list[Message] = self._batch.messages()
        if self._heartbeat_unsent:
            self._heartbeat_unsent = False
            messages.append(wire.heartbeat((b"",), wire.CX1))
        self.unsent = 0
        return messages

    def _forget(self, call: Call) -> None:
        call.ended = True
        self._due.clear(call)
        self.outstanding -= 1
        old = self._old_of(call) if self._old else None
        if old is None:
            del self._calls[call.number]
        else:
            self._take_from(old, call)

    def _fail(self, call: Call, error: ZmdpError) -> None:
        self._forget(call)
        self.events.append((call, error))

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    def next_endpoint(self) -> str:
        """Return the endpoint to connect to, when there is no connection and `retry_at` has come."""
        going, self._going = self._going, _LOST
        if going == _RETURNS:
            return self.endpoints.restart()
        if going == _DRAINED:
            return self.endpoints.advance()
        return self.endpoints.fail_over(answered=self.heard)

    def connected(self, endpoint: str, now: float) -> None:
        """Report a new connection, to `endpoint`: every request without a connection is sent there."""
        self.lost = None
        self.endpoint = endpoint
        self.heard = False
        self._expect_sign_of_life(now)
        if self.several:
            self._plan_probe(now)
        for call in self._calls.values():
            self._resend(call, now)

    def _resend(self, call: Call, now: float) -> None:
        call.collected, call.collected_bytes = None, 0
        self._send_request(call, now)

    def lose(self, reason: str, now: float, *, cut: bool = False) -> None:
        """Give up the connection.  Streams that have begun fail; other requests wait for the next connection.

        `cut` tells that the other end closed an established connection.
        """
        self.lost = self._trouble = reason
        self._going = _LOST
        self.retry_at = now
        if not self.heard:  # otherwise the broker may have been restarted: there is no reason to wait
            self.retry_at += self._backoff * self._rng.uniform(0.5, 1.0)
            self._backoff = min(2 * self._backoff, BACKOFF[1])
        self._batch = _new_batch()
        self._heartbeat_unsent = False
        self.unsent = 0
        self._fail_interrupted(list(self._calls.values()), self.endpoint, reason, cut)

    def _fail_interrupted(self, calls: list[Call], endpoint: str, reason: str, cut: bool) -> None:
        """Fail those of `calls` that cannot be sent again after they have lost their connection."""
        for call in calls:
            call.losses += cut
            service = call.service.decode()
            if call.streamed:
                text = f"the stream of service {service!r} broke off: "
                text += f"the connection to {endpoint} was lost ({reason})"
                self._fail(call, StreamInterrupted(text, service=service))
            elif call.losses >= MAX_LOSSES and (size := wire.size_of(call.body)) > LARGE_REQUEST_BYTES:
                # A broker's libzmq disconnects a peer that sends a frame far beyond its limit.  Each time this request
                # is sent again, all others would have to be sent again with it.
                text = (
                    f"the connection to {endpoint} was lost {call.losses} times with a request of {size} bytes "
                    f"for service {service!r} outstanding: does that exceed the broker's max_message?"
                )
                self._fail(call, RequestRejected(text, service=service))

    def refuse(self, reason: str) -> None:
        """Fail every request without a connection, because every broker refuses this client."""
        for call in list(self._calls.values()):
            service = call.service.decode()
            text = f"service {service!r} cannot be called through {self.endpoint}: {reason}"
            self._fail(call, BrokerUnreachable(text, service=service))

    def close(self, error: Callable[[], ZmdpError]) -> None:
        """Cancel every outstanding request; each ends with an `error`."""
        calls = list(self._calls.values())
        for old in self._old:
            calls += old.calls.values()
        for call in calls:
            self._send_cancel(call)
            self._fail(call, error())

    def receive(self, message: Message, now: float) -> None:
        """Process a message from the broker."""
        if self.lost is not None:
            return
        found = wire.decode_broker(message)
        if not isinstance(found, wire.Batched) or found.header != wire.CX1:
            return
        self.heard = True
        self._backoff = BACKOFF[0]
        self._trouble = None
        self._expect_sign_of_life(now)
        if not found.bare:
            for command in batch.to_client(message, found.at):
                self._process(command, now)
        if self._drains:
            self._drains = False
            self._leave_drained(now)

    def _process(self, command: Any, now: float) -> None:
        if isinstance(command, wire.Reply):
            call = self._calls.get(command.id)
            if call is not None:  # else it was cancelled
                self._answered(call, command, now)
        elif isinstance(command, wire.Error):
            call = self._calls.get(command.id)
            if call is not None:
                if self.several and is_refused(call, command):
                    # It stays among the others until the whole message is processed.
                    self._refused[call.number] = call
                    self._drains = True
                else:
                    self._fail(call, error_of(call, command))
        elif self.several and isinstance(command, wire.Disconnect):
            self._drains = True

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

    # ── leaving a connection ─────────────────────────────────────────────────────────────────────────────────────────

    def _leave_drained(self, now: float) -> None:
        """Move to the next broker: immediately, unless all of them seem to drain."""
        if now - self._connected_at >= SHORT_CONNECTION_SECONDS:
            self._drained = 0
            self._pause = BACKOFF[0]
        self._drained += 1
        self._leave("the broker drains", now, _DRAINED)
        if self._drained >= len(self.endpoints.all):
            self.retry_at += self._pause * self._rng.uniform(0.5, 1.0)
            self._pause = min(2 * self._pause, BACKOFF[1])

    def _leave(self, reason: str, now: float, going: int) -> None:
        """Make the connection an old one, with the requests that are outstanding and not refused."""
        refused: dict[Any, Call] = {}
        for number in self._refused:
            call = self._calls.pop(number, None)
            if call is not None:  # else the same message has ended it
                refused[number] = call
        self._refused = {}
        calls, self._calls = self._calls, refused
        if calls:
            old = OldConnection(self.endpoint, calls)
            old.batch, old.unsent = self._batch, self.unsent
            old.heartbeat_unsent = self._heartbeat_unsent
            old.beat_at, old.asked_at = self._beat_at, self._asked_at
            self._old.append(old)
            self._left = old
        self._batch = _new_batch()
        self._heartbeat_unsent = False
        self.unsent = 0
        self.lost = self._trouble = reason
        self.retry_at = now
        self._going = going

    def take_left(self) -> OldConnection | None:
        """Return the connection that was left, once; None if it is lost, or nothing is outstanding there."""
        left, self._left = self._left, None
        return left

    def receive_old(self, old: OldConnection, message: Message, now: float) -> None:
        """Process a message that has arrived over an old connection."""
        if old.closed is not None:
            return
        found = wire.decode_broker(message)
        if not isinstance(found, wire.Batched) or found.header != wire.CX1:
            return
        old.beat_at = now + self._heartbeat
        old.asked_at = None
        if found.bare:
            return
        for command in batch.to_client(message, found.at):
            if isinstance(command, wire.Reply):
                call = old.calls.get(command.id)
                if call is not None:
                    self._answered(call, command, now)
            elif isinstance(command, wire.Error):
                call = old.calls.get(command.id)
                if call is None:
                    continue
                if is_refused(call, command):
                    self._take_from(old, call)
                    self._place(call, now)
                else:
                    self._fail(call, error_of(call, command))

    def lose_old(self, old: OldConnection, reason: str, now: float, *, cut: bool = False) -> None:
        """Give up an old connection.  Its requests are sent over the current one; streams that have begun fail."""
        if old.closed is not None:
            return
        self._fail_interrupted(list(old.calls.values()), old.endpoint, reason, cut)
        for call in list(old.calls.values()):
            self._take_from(old, call)
            self._place(call, now)
        old.closed = reason

    def _place(self, call: Call, now: float) -> None:
        """Send a request again that has lost its old connection."""
        self._calls[call.number] = call
        if self.lost is None:
            self._resend(call, now)

    def _old_of(self, call: Call) -> OldConnection | None:
        """Return the old connection at which `call` is outstanding, or None if it is not."""
        for old in self._old:
            if call.number in old.calls:
                return old
        return None

    def _take_from(self, old: OldConnection, call: Call) -> None:
        """Remove a call from its old connection, which ends with the last one."""
        del old.calls[call.number]
        if not old.calls:
            old.closed = "nothing is outstanding there"
            self._old.remove(old)

    # ── returning to the first broker ────────────────────────────────────────────────────────────────────────────────

    def _plan_probe(self, now: float) -> None:
        """A connection begins: plan to probe the first broker, if this is another."""
        if now - self._connected_at >= PROBE_INTERVAL[1]:  # else the first broker comes and goes
            self._probe_interval = PROBE_INTERVAL[0]
        self._connected_at = now
        if self.endpoints.at_first:
            self._probe_at = math.inf
        elif not self._probing:
            self._probe_later(now)

    def _probe_later(self, now: float) -> None:
        self._probe_at = now + self._probe_interval * self._rng.uniform(0.5, 1.0)
        self._probe_interval = min(2 * self._probe_interval, PROBE_INTERVAL[1])

    def take_probe(self, now: float) -> str | None:
        """Return the endpoint of the first broker if it should be probed now; then report the outcome with `probed`."""
        if self._probing or now < self._probe_at or self.lost is not None or not self.outstanding:
            return None
        if len(self._old) >= MAX_OLD_CONNECTIONS:
            self._probe_later(now)
            return None
        self._probing = True
        self._probe_at = now + PROBE_SECONDS
        return self.endpoints.first

    def probed(self, answered: bool, now: float) -> None:
        """Report whether the first broker takes requests: if so, the client returns to it."""
        self._probing = False
        if self.endpoints.at_first:
            self._probe_at = math.inf
        elif not answered:
            self._probe_later(now)
        elif self.lost is None:
            self._leave("the first broker is back", now, _RETURNS)
        else:
            self._going = _RETURNS

    # ── the time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> None:
        """Do what is due: end overdue requests, send heartbeats, give up a broker that has been silent for too long."""
        for call in self._due.pop_due(now):
            self._send_cancel(call)
            self._fail(call, self._overdue(call, now))
        if self._old:
            self._tick_old(now)
        if self.lost is not None or not self.outstanding or now < self._beat_at:
            return
        asked_at = self._asked_at
        if asked_at is not None and now >= asked_at + self._silence_limit and not self._held_up(self._beat_at, now):
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
        self._beat_at = self._next_beat(asked_at, now)
        if not self._heartbeat_unsent:
            self._heartbeat_unsent = True
            self.unsent += 1

    def _tick_old(self, now: float) -> None:
        for old in list(self._old):
            if now < old.beat_at:
                continue
            asked_at = old.asked_at
            if asked_at is not None and now >= asked_at + self._silence_limit and not self._held_up(old.beat_at, now):
                silence = self._silence_limit + self._heartbeat
                self.lose_old(old, f"the broker has been silent for {silence:g} s", now)
                continue
            if asked_at is None:
                asked_at = now
                old.asked_at = now
            old.beat_at = self._next_beat(asked_at, now)
            if not old.heartbeat_unsent:
                old.heartbeat_unsent = True
                old.unsent += 1

    def _held_up(self, due: float, now: float) -> bool:
        """Return whether this process was held up: a tick that was due then comes more than an interval late.

        ZeroMQ's thread was held up too, so what the broker sent may not have reached the socket yet.
        """
        return now > due + self._heartbeat

    def _next_beat(self, asked_at: float, now: float) -> float:
        """Return when to send the next HEARTBEAT, or to give up the broker."""
        give_up_at = asked_at + self._silence_limit
        return now + self._heartbeat if give_up_at <= now else min(now + self._heartbeat, give_up_at)

    def deadline(self) -> float | None:
        """Return when `tick` (or, while `lost`, a new connection) is due; None if nothing is outstanding."""
        if not self.outstanding:
            return None
        then = self._beat_at
        if self.lost is not None:
            then = self.retry_at
        elif self._probe_at < then:
            then = self._probe_at
        if self._old:
            for old in self._old:
                then = min(then, old.beat_at)
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
        old = self._old_of(call) if self._old else None
        endpoint, asked_at = (self.endpoint, self._asked_at) if old is None else (old.endpoint, old.asked_at)
        text = f"no reply from service {service!r} through {endpoint} within {waited:g} s"
        if call.streamed:
            text = f"the stream of service {service!r} stopped: nothing arrived for {waited:g} s after a part"
            if passed:
                text = f"the stream of service {service!r} was not finished within {waited:g} s"
            return StreamInterrupted(text, service=service)
        if old is None:
            if self._going == _DRAINED and self._drained >= len(self.endpoints.all):
                text = f"{text}: all brokers drain, retry later"
                return RetryLater(text, service=service, code=Code.DRAINING)
            trouble = self.lost or self._trouble
            if trouble is None and asked_at is not None:
                trouble = "the broker has not said anything yet"
            if trouble is not None and not self.heard:
                return BrokerUnreachable(f"{text}: {trouble}", service=service)
        if asked_at is not None and now - asked_at >= self._heartbeat:
            text += f"; the broker has been silent for {now - asked_at + self._heartbeat:.1f} s"
        return RequestTimeout(text, service=service)


def _new_batch() -> Any:
    return batch.Batch((b"",), wire.CX1)
