"""The client's side of X1 as a state machine: any number of numbered requests, over one connection after the other.

It uses no socket and no clock.  `ClientConnection` opens a socket to `endpoint` at the time `retry_at` and reports it
with `connected`.  It calls `receive` and `tick`, sends the messages of `take_messages`, and delivers the outcomes of
`take_events`.  When the connection is lost, `current.lost` says why, and it closes the socket: every outstanding
request is resent, under its old number, over the next connection.

With several brokers (`Failover`), the session also leaves a connection that still works: when its broker drains, and
when the first broker is back.  From then on another `BrokerConnection` is the `current` one.  The requests that are
outstanding at the one that was left stay there: `ClientConnection` keeps its socket, passes what arrives to `receive`
with this connection, and closes the socket once the connection is `lost`.  All other requests are sent over the next
connection.  A request is outstanding at one connection only, so an answer that arrives over another is ignored.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from ...mdp import wire
from ...mdp.codes import Code
from ...mdp.errors import (
    BrokerUnreachable,
    RequestError,
    RequestTimeout,
    RetryLater,
    ServiceError,
    SettingError,
    StreamInterrupted,
    ZmdpError,
)
from ...mdp.limits import LARGEST, SHORTEST_HEARTBEAT
from ...mdp.timers import Timers
from ...mdp.transport.failover import Failover
from ...mdp.wire import MMI, Message, batch, x1
from ..calls.arguments import MAX_OUTSTANDING
from ..calls.reply import MAX_REPLY_BYTES, Outcome, Reply, overlong
from ..calls.retry import Retry, pause_after
from .broker_connection import BrokerConnection, Call, Place
from .errors import error_of, interruption, too_large

SHORT_CONNECTION_SECONDS: Final = 1.0
"""A broker that drains after a shorter connection may have been draining from the beginning."""
MAX_OLD_CONNECTIONS: Final = 3
"""Connections still in use from which on the client does not return to the first broker: streams may last for days."""


class ClientSession:
    """One client's exchange with whichever broker it is connected to.

    While a request is outstanding, a broker that has been silent for `heartbeat` seconds is sent a HEARTBEAT.  After
    `liveness` silent intervals it is considered dead.

    With several `endpoints`, a request that a draining broker refuses (503) does not fail, but is sent to the next.
    Requests beyond `max_outstanding` wait until others end, in order.
    """

    def __init__(
        self,
        endpoints: Sequence[str] = ("",),
        *,
        heartbeat: float = 1.0,
        liveness: int = 5,
        max_outstanding: int = MAX_OUTSTANDING,
        rng: random.Random | None = None,
    ) -> None:
        if not SHORTEST_HEARTBEAT <= heartbeat < LARGEST:
            raise SettingError(f"heartbeat is {heartbeat!r}: it must be {SHORTEST_HEARTBEAT} seconds or more")
        if liveness < 2:
            raise SettingError(f"liveness is {liveness!r}: it must be a number of intervals, 2 or more")
        self.outstanding = 0
        """Requests that have not ended, without those that wait for them."""
        self.max_outstanding = max_outstanding
        self.events: list[tuple[Call, Outcome]] = []
        """The outcomes that `take_events` would return."""
        self._rng = rng or random.Random()  # noqa: S311 - jitter only
        self.failover = Failover(endpoints, self._rng)
        self._several = self.failover.several
        self._heartbeat = heartbeat
        self._patience = heartbeat * (liveness - 1)
        """Seconds a broker may leave a HEARTBEAT unanswered."""
        self.current = self._new_connection("", lost="not connected yet")
        """The latest connection.  While it is lost, new requests wait there for the next."""
        self._pausing = Place()
        """Has the requests that have failed and are sent again later."""
        self._waiting = Place()
        """Has the requests beyond `max_outstanding`, in the order in which they were made."""
        self._old: list[BrokerConnection] = []
        """Connections that were left, and where requests are outstanding."""
        self._trouble: str | None = None
        """Why the last connection was lost; None once a broker has sent something again."""
        self._last_number = 0
        self._due: Timers[Call] = Timers(0.01)

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
        options: bytes = b"",
        retry: Retry | None = None,
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
            options: The encoded options (`encode_options`).
            retry: After which errors, and how often, to send it again.
            receiver: Where to deliver the outcomes.

        Raises `SettingError` for an argument that cannot be sent, and `RequestRejected` for a body that is known to
        exceed the broker's limits.
        """
        if len(body) > x1.MAX_BODY_FRAMES:
            raise SettingError(f"the body has {len(body)} frames: it may have at most {x1.MAX_BODY_FRAMES}")
        current = self.current
        refused = current.refuses(body)
        if refused is not None:
            raise too_large(service, refused)
        self._last_number += 1
        call = Call(
            self._last_number, service, body, options,
            stream=stream, receiver=receiver, timeout=timeout, silence=silence, retry=retry,
        )  # fmt: skip
        if timeout is not None:
            call.deadline = now + timeout
        self._set_due(call, now)
        if self.outstanding < self.max_outstanding and not self._waiting.calls:
            self._begin(call, now)
        else:
            self._waiting.add(call, now)
        return call

    def _begin(self, call: Call, now: float) -> None:
        self.current.add(call, now)
        self.outstanding += 1

    def _begin_waiting(self, now: float) -> None:
        """Begin the requests whose turn it is, because others have ended."""
        waiting = self._waiting.calls
        while waiting and self.outstanding < self.max_outstanding:
            call = next(iter(waiting.values()))
            self._waiting.forget(call)
            self._due.clear(call)
            self._set_due(call, now)
            self._begin(call, now)

    def _set_due(self, call: Call, now: float) -> None:
        if call.wait_from(now):
            self._due.set(call, call.due)

    def cancel(self, call: Call) -> None:
        """Abandon a request and tell the broker.  Nothing more is delivered for it."""
        if not call.ended:
            call.place.cancel(call)
            self._forget(call)

    def _forget(self, call: Call) -> None:
        call.ended = True
        self._due.clear(call)
        self.outstanding -= call.place is not self._waiting
        self._take_from_place(call)

    def _take_from_place(self, call: Call) -> None:
        """Remove a request from its place.  A connection that was left ends with its last request."""
        place = call.place
        place.forget(call)
        if not place.calls and place is not self.current and isinstance(place, BrokerConnection) and place.lost is None:
            self._old.remove(place)
            place.lost = "nothing is outstanding there"  # a CANCEL may still have to be sent

    def _fail(self, call: Call, error: ZmdpError) -> None:
        self._forget(call)
        self.events.append((call, error))

    def _fail_or_retry(self, call: Call, error: RequestError, now: float) -> None:
        """End a request that the broker or its worker has failed, or send it again after a pause."""
        retry = call.retry
        if retry is not None and not call.streamed and error.code in retry.codes and call.attempts < retry.attempts:
            told = error.retry_after if isinstance(error, RetryLater) else None
            retry_at = now + pause_after(call.attempts, retry, self._rng, told)
            if retry_at < (call.due if call.deadline is None else min(call.due, call.deadline)):
                call.attempts += 1
                self._take_from_place(call)
                self._pausing.add(call, now)
                self._due.clear(call)
                self._due.set(call, retry_at)
                return
        self._fail(call, error)

    def _try_again(self, call: Call, now: float) -> None:
        """Send a request again that had failed, under a new number: to the broker, a number ends only once."""
        self._take_from_place(call)
        self._last_number += 1
        call.number = self._last_number
        if call.due < math.inf:
            self._due.set(call, call.due)
        self._send_again(call, now)

    def close(self, error: Callable[[], ZmdpError]) -> None:
        """Cancel every outstanding request; each ends with an `error`."""
        places: list[Place] = [self.current, self._pausing, self._waiting, *self._old]
        for place in places:
            for call in list(place.calls.values()):
                place.cancel(call)
                self._fail(call, error())

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def lost(self) -> str | None:
        """Why there is no connection; None while there is one."""
        return self.current.lost

    def _new_connection(self, endpoint: str, lost: str | None = None) -> BrokerConnection:
        return BrokerConnection(endpoint, self._heartbeat, self._patience, lost)

    @property
    def endpoint(self) -> str:
        """The endpoint in use, or while there is no connection, of the next one."""
        return self.failover.endpoint

    @property
    def retry_at(self) -> float:
        """When to connect to it, while there is no connection."""
        return self.failover.retry_at

    def connected(self, endpoint: str, now: float) -> BrokerConnection:
        """Report a new connection, to `endpoint`, and return it: every request without a connection is sent there."""
        waiting = self.current.calls
        self.current = self._new_connection(endpoint)
        self.failover.connected(now)
        for call in waiting.values():
            self._send_again(call, now)
        return self.current

    def _send_again(self, call: Call, now: float) -> None:
        """Send a request over the current connection, or the next if there is none."""
        call.collected, call.collected_bytes = None, 0  # the next worker begins the reply anew
        self.current.add(call, now)

    def lose(self, reason: str, now: float, connection: BrokerConnection | None = None) -> None:
        """Give up a connection, or the attempt to make one; by default, this is the current one.

        Streams that have begun fail.  Other requests are sent over another connection.
        """
        lost = self.current if connection is None else connection
        if lost is self.current:
            # An attempt that failed is reported here too: then there was no connection, and no broker has answered.
            answered = lost.heard and lost.lost is None
            lost.heard = answered
            self._trouble = reason
            self.failover.lost(reason, now, of_use=answered)
        elif lost.lost is None:
            self._old.remove(lost)
        else:
            return
        lost.end(reason)
        for call in list(lost.calls.values()):
            error = interruption(call, lost.endpoint, reason)
            if error is not None:
                self._fail(call, error)
            elif lost is not self.current:
                self._move(call, now)

    def _move(self, call: Call, now: float) -> None:
        """Send a request over the current connection that was outstanding at another."""
        self._take_from_place(call)
        self._send_again(call, now)

    def refused_by_all(self, reason: str) -> None:
        """Report that every broker refuses this client: every request without a connection fails."""
        for call in list(self.current.calls.values()):
            service = call.service.decode()
            text = f"service {service!r} cannot be called through {self.current.endpoint}: {reason}"
            self._fail(call, BrokerUnreachable(text, service=service))

    def _leave(self, reason: str, now: float) -> None:
        """Make the current connection an old one, or if nothing is outstanding there, end it."""
        left = self.current
        self.current = self._new_connection(left.endpoint, reason)
        self.current.heard = left.heard
        self._trouble = reason
        for call in left.take_large():
            self._send_again(call, now)
        if left.calls:
            self._old.append(left)
        else:
            left.end(reason)

    def take_probe(self, now: float) -> str | None:
        """Return the endpoint of the first broker if it should be probed now; then report the outcome with `probed`."""
        if self.current.lost is not None or not self.outstanding:
            return None
        endpoint = self.failover.take_probe(now)
        if endpoint is not None and len(self._old) >= MAX_OLD_CONNECTIONS:
            self.failover.probed(False, now)
            return None
        return endpoint

    def probed(self, answered: bool, now: float) -> None:
        """Report whether the first broker takes requests: if so, the client returns to it."""
        if self.current.lost is not None:
            return
        self.failover.probed(answered, now)
        if self.failover.returning:
            self.failover.ended(now)
            self._leave("the first broker is back", now)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: Message, now: float, connection: BrokerConnection | None = None) -> None:
        """Process a message that has arrived over a connection, by default the current one."""
        over = self.current if connection is None else connection
        if over.lost is not None:
            return
        found = wire.decode_broker(message)
        if not isinstance(found, wire.Batched) or found.header != wire.CX1:
            return
        over.expect_sign_of_life(now)
        if not over.heard:
            self._note_first_message(over)
        if not found.bare:
            self._process(batch.to_client(message, found.at), over, now)
            if self._waiting.calls:
                self._begin_waiting(now)

    def _note_first_message(self, connection: BrokerConnection) -> None:
        """Record that the broker has sent something over a connection for the first time."""
        connection.heard = True
        if connection is self.current:
            self._trouble = None

    def _process(self, commands: Iterable[Any], connection: BrokerConnection, now: float) -> None:
        calls, drains, refused = connection.calls, False, []
        for command in commands:
            if isinstance(command, wire.Reply):
                call = calls.get(command.id)
                if call is not None:  # else it was cancelled, or is outstanding at another connection
                    self._take_reply(call, command, now)
            elif isinstance(command, wire.Error):
                call = calls.get(command.id)
                if call is None:
                    continue
                if self._several and command.code == Code.DRAINING and not command.detail and not call.streamed:
                    refused.append(call)  # another broker can have it
                else:
                    self._fail_or_retry(call, error_of(call, command), now)
            elif isinstance(command, wire.Limits):
                for call in connection.told_limits(command, now):
                    self._fail(call, too_large(call.service, str(connection.refuses(call.body))))
            elif isinstance(command, wire.Disconnect):
                drains = self._several
        if drains or refused:
            self._drained(connection, refused, now)

    def _drained(self, connection: BrokerConnection, refused: list[Call], now: float) -> None:
        """Leave a broker that drains, and send the requests that it has refused to the next one."""
        if connection is self.current:
            lasted = now - self.failover.connected_at
            self.failover.lost("it drains", now, of_use=lasted >= SHORT_CONNECTION_SECONDS, dismissed=True)
            self._leave("the broker drains", now)
        for call in refused:
            if not call.ended and call.place is connection:  # else the same message has ended it
                self._move(call, now)

    def _take_reply(self, call: Call, answer: wire.Reply, now: float) -> None:
        body = answer.body
        if answer.final:
            failure = wire.parse_error(body)  # from a worker whose dialect has no ERROR
            if failure is not None:
                self._fail_or_retry(call, ServiceError(failure[0], failure[1], service=call.service.decode()), now)
                return
            self._forget(call)
            self.events.append((call, call.complete(body)))
            return
        service = call.service.decode()
        if call.silence is not None:
            self._due.clear(call)
            self._set_due(call, now)
        if call.stream:
            call.streamed = True
            self.events.append((call, Reply(body, service=service, final=False)))
            return
        call.collect(body)
        if call.collected_bytes > MAX_REPLY_BYTES:
            call.place.cancel(call)
            self._fail(call, overlong(service, MAX_REPLY_BYTES))

    def take_messages(self) -> list[Message]:
        """Return the messages to send over the current connection.  Others have their own `take_messages`."""
        return self.current.take_messages()

    def take_events(self) -> list[tuple[Call, Outcome]]:
        """Return the outcomes of requests since the last call."""
        events, self.events = self.events, []
        return events

    # ── the time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> None:
        """Do what is due: end overdue requests, send heartbeats, give up a broker that has been silent for too long."""
        for connection in (self.current, *self._old):
            connection.notice_delay(now)
        for call in self._due.pop_due(now):
            place = call.place
            if not isinstance(place, BrokerConnection):
                if place is self._pausing:
                    self._try_again(call, now)
                else:
                    self._fail(call, self._not_sent(call))
            elif now < place.excused_until:
                self._due.set(call, place.excused_until)
            else:
                place.cancel(call)
                self._fail(call, self._overdue(call, place, now))
        silent = self.current.tick(now)
        if silent is not None:
            self.lose(silent, now)
        for old in self._old[:]:
            silent = old.tick(now)
            if silent is not None:
                self.lose(silent, now, old)
        if self._waiting.calls:
            self._begin_waiting(now)

    def deadline(self) -> float | None:
        """Return when `tick`, or while there is no connection a new one, is due; None if nothing is outstanding."""
        if not self.outstanding:
            return None
        current = self.current
        if current.lost is None:
            then = current.beat_at if current.calls else math.inf
            then = min(then, self.failover.probe_at)
        else:
            then = self.retry_at
        for old in self._old:
            then = min(then, old.beat_at)
        due = self._due.next_due()
        return then if due is None else min(due, then)

    def _not_sent(self, call: Call) -> RequestTimeout:
        """Return the exception of a request that has waited for others to end until its time had passed."""
        service, waited = call.service.decode(), call.silence if call.timeout is None else call.timeout
        text = (
            f"the request to service {service!r} was not sent: {self.max_outstanding} others (max_outstanding) were "
            f"outstanding for {waited:g} s"
        )
        return RequestTimeout(text, service=service)

    def _overdue(self, call: Call, connection: BrokerConnection, now: float) -> RequestError:
        """Return the exception of a request whose time has passed at a connection."""
        service = call.service.decode()
        passed = call.deadline is not None and now >= call.deadline
        waited = call.timeout if passed else call.silence
        text = f"no reply from service {service!r} through {connection.endpoint} within {waited:g} s"
        if call.service.startswith(MMI):  # mdclient asks these before it calls a service, without being told
            text = f"the broker at {connection.endpoint} has not answered {service} within {waited:g} s"
        if call.streamed:
            text = f"the stream of service {service!r} stopped: nothing arrived for {waited:g} s after a part"
            if passed:
                text = f"the stream of service {service!r} was not finished within {waited:g} s"
            return StreamInterrupted(text, service=service)
        if connection is self.current:
            if self.failover.all_drain:
                text = f"{text}: all brokers drain, retry later"
                return RetryLater(text, service=service, code=Code.DRAINING)
            trouble = connection.lost or self._trouble
            if trouble is None and connection.asked_at is not None:
                trouble = "the broker has not said anything yet"
            if trouble is not None and not connection.heard:
                return BrokerUnreachable(f"{text}: {trouble}", service=service)
        silence = connection.silence(now)
        if silence:
            text += f"; the broker has been silent for {silence:.1f} s"
        return RequestTimeout(text, service=service)
