"""The worker's side of MDP as a state machine (C6 to C10): a connection, and the requests that it holds.

It speaks X1 (docs/reference/x1.md), or 0.2 or 0.1 with one request at a time.

It has no socket and no clock.  Its shell opens a socket when `deadline` says so, and then calls `connected`.  It passes
on messages with `receive`, calls `tick` when that is due, takes requests with `begin`, and ends each with `final` or
`error`.  It sends what `take_messages` returns, and acts on what `take_events` returns.  Once the
connection has ended, it closes the socket; the requests that were held then are no longer answered (C9).

What the session may do next depends on the state of the connection (`states.py`).  `HeldRequests` (`held.py`) has its
requests, `Outgoing` (`outgoing.py`) its unsent commands, `Heartbeats` knows whether the broker is alive.

There may be several brokers: the socket is to be connected to `failover.endpoint`.  `Failover` chooses when the
session loses a broker, or is told to leave it.  While it is not at the first one (X1), `take_probe` tells the shell to
probe that, and the shell reports to `probed`.  If it is back, the session finishes its requests, and returns.
"""

import math
import random
from collections.abc import Sequence
from typing import Any, Final, cast

from ...mdp import wire
from ...mdp.codes import Code
from ...mdp.errors import SettingError
from ...mdp.transport.failover import Failover
from ...mdp.wire import Address, Message, batch
from ...mdp.wire.names import displayed
from .heartbeats import Heartbeats
from .held import CreditController, HeldRequests
from .outgoing import outgoing
from .request import Request
from .states import (
    SERVING,
    TRANSITIONS,
    WAITING,
    Cancelled,
    ConnectionEnded,
    Event,
    HandlerStuck,
    SessionSettings,
    SessionState,
    Trigger,
)

UNHEARD_PATIENCE_SECONDS: Final = 0.5
"""Time that a leaving worker waits for a broker that has never sent anything."""
SPARE_SECONDS: Final = 0.05
"""How long a worker must have had credit to spare before it returns to its first broker: the other may take so long to
send the next request."""
# Not Final: mypyc (2.4) takes a Final of several floats for unset, and tests set it.
BACKOFF_SECONDS: tuple[float, float] = (1.0, 32.0)
"""Pause before another attempt to connect to brokers that are of no use, at first and at most."""


class WorkerSession:
    """One worker's dialog with its broker.

    `options` are the options of READY (X1).  `controller` decides how many requests to hold; with 0.2 and 0.1 it is
    one.
    """

    def __init__(
        self,
        service: str | bytes,
        settings: SessionSettings | None = None,
        *,
        options: bytes = b"",
        controller: CreditController | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings or SessionSettings()
        self.service = wire.service_name(service)
        if self.service.startswith(wire.MMI):
            name = self.service.decode()
            raise SettingError(f"service {name!r} is reserved: the broker itself offers services named mmi.*")
        self.state: SessionState = WAITING
        self.controller = controller or CreditController(1)
        self.served = 0
        """Requests that have ended, with a reply or without."""
        self.credit = self.controller.credit
        """The credit announced to the broker."""
        self.heartbeats = Heartbeats(self.settings.heartbeat, self.settings.liveness)
        self.failover = Failover(self.settings.endpoints, rng or random, BACKOFF_SECONDS)
        self._name = self.service.decode()
        self._options = options
        self._x1 = self.settings.protocol == "X1"
        self._several = self.failover.several
        self._requests = HeldRequests(self.controller, self.settings.handler_timeout)
        self._outgoing = outgoing(self.settings.protocol)
        self._header = self._outgoing.header
        self._events: list[Event] = []
        self._leave_by = math.inf  # when to end the connection if the broker does not answer DISCONNECT
        self._spare_since = math.inf  # while it is to return, since when it has had credit to spare

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    def connected(self, now: float) -> None:
        """Send READY on a new socket (C7)."""
        self._change("connect")
        self._leave_by = self._spare_since = math.inf
        self.failover.connected(now, probing=self._x1)  # third-party brokers do not answer a probe
        self.heartbeats.connected(now)
        self._outgoing.discard()
        self._outgoing.ready(self.credit, self.service, self._options)

    def leave(self, now: float) -> None:
        """Take no more requests, and disconnect for good when those in progress are finished."""
        if not self.state.leaving:
            self._drain("leave", now)

    def lose(
        self, reason: str, now: float, *, wait: bool = False, dismissed: bool = False, refused: bool = False
    ) -> None:
        """Give up the connection.

        With `wait`, it would be lost again for the same reason, so there is a pause before the next one, as there is if
        the broker was not heard.  `dismissed` tells that the broker drains, `refused` that it refuses this worker.
        """
        heard = self.heartbeats.heard and self.state.connected  # else no socket could be opened
        if self.state.draining:
            self.failover.ended(now)
        else:
            self.failover.lost(reason, now, of_use=heard and not wait, dismissed=dismissed)
        self._outgoing.discard()
        self._end(ConnectionEnded(reason, self.failover.dismissed or (dismissed and heard), refused))

    def close(self, reason: str, now: float) -> None:
        """Give up the connection for good, without telling the broker."""
        self._change("leave")
        if self.state.connected:
            self.lose(reason, now)

    def _change(self, trigger: Trigger) -> None:
        self.state = TRANSITIONS[self.state][trigger]

    def _drain(self, trigger: Trigger, now: float, text: str = "") -> None:
        """Take no more requests, and end the connection when those that have begun are finished.

        `text` tells the broker why a request is given up.
        """
        serving = self.state is SERVING
        self._change(trigger)
        if serving and self._x1:
            self._release(0)
            self._outgoing.disconnect(text.encode())
        if self.state.draining:
            self._settle(now)

    def _settle(self, now: float) -> None:
        """While draining, end the connection if only abandoned requests are left."""
        if not self._requests.finished:
            return
        abandoned = bool(self._requests.abandoned)
        if self._x1 and not abandoned:  # the broker is to answer DISCONNECT
            patience = self.heartbeats.patience
            if not self.heartbeats.heard:
                patience = min(patience, UNHEARD_PATIENCE_SECONDS)
            self._leave_by = min(self._leave_by, now + patience)
            return
        if not self._x1:
            self._outgoing.disconnect()  # C16: the broker forgets this worker at once
        self._end_cleanly("a handler does not end" if abandoned else "closed", now)

    def _end_cleanly(self, reason: str, now: float) -> None:
        """End the connection cleanly: the last messages should still reach the broker."""
        self.failover.ended(now)
        heard = self.heartbeats.heard  # else it is not waited for
        self._end(ConnectionEnded(reason, self.failover.dismissed, keep_messages=heard))

    def _end(self, event: ConnectionEnded) -> None:
        self._change("end")
        self._events.append(event)
        self._events += map(Cancelled, self._requests.lose())
        self._announce()

    # ── what the broker sends ────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: Message, now: float) -> None:
        """Process a message.  New requests wait for `begin`."""
        if not self.state.connected:
            return
        command = wire.decode_broker(message)
        if isinstance(command, wire.Invalid) or command.header != self._header:
            return
        if isinstance(command, wire.Batched):
            self._receive_batch(message, command, now)
        elif isinstance(command, wire.Heartbeat):
            self._heartbeat_received(now)
        elif isinstance(command, wire.Disconnect):
            self._disconnect_received(command, now)
        else:
            self.heartbeats.command_received(now)
            self._take_request(cast("wire.Request", command), now)

    def _receive_batch(self, message: Message, found: wire.Batched, now: float) -> None:
        if found.bare:
            self._heartbeat_received(now)
            return
        commands = batch.to_worker(message, found.at)
        if not (commands and isinstance(commands[0], wire.Disconnect)):
            self.heartbeats.command_received(now)
        for command in commands:
            if isinstance(command, wire.Request):
                self._take_request(command, now)
            elif isinstance(command, wire.Cancel):
                self._cancel_request(command.id, now)
            elif isinstance(command, wire.Disconnect):
                self._disconnect_received(command, now)
                return

    def _heartbeat_received(self, now: float) -> None:
        if self._x1 and not self.heartbeats.heard:
            self.heartbeats.command_received(now)  # the answer to READY, which says nothing about the broker's interval
        else:
            self.heartbeats.heartbeat_received(now)

    def _disconnect_received(self, command: wire.Disconnect, now: float) -> None:
        if command.text:
            text = displayed(command.text.decode(errors="replace"))
            self.lose(f"the broker refused this worker: {text}", now, wait=True, refused=True)
            return
        # C9.  A broker that was heard before is probably being restarted: reconnect without delay.
        expected = ", as it does when it restarts" if self.heartbeats.heard and not self.state.draining else ""
        self.lose(f"the broker sent DISCONNECT{expected}", now, dismissed=True)

    def _take_request(self, command: wire.Request, now: float) -> None:
        address = cast("Address", command.id)
        if address in self._requests.by_address:
            if not self._x1:
                self.lose("the broker sent a second request with the address of the first", now, wait=True)
            return  # a duplicate: in X1 an address belongs to one dispatch (C32)
        ttl = command.ttl
        self._requests.add(
            Request(
                command.body,
                service=self._name,
                client=address,
                options=command.options,
                deadline=None if ttl is None else now + ttl,
                attempt=command.attempt,
            )
        )
        if self.state is not SERVING:  # the broker had not read DISCONNECT
            self._release(0)
        elif self._several:
            self._note_use(now)

    def _cancel_request(self, address: Address, now: float) -> None:
        request = self._requests.by_address.get(address)
        if request is None or request.cancelled:
            return
        request.cancelled = True
        if self._requests.has_begun(request):
            self._events.append(Cancelled(request))
        else:
            self.error(request, Code.CANCELLED.value, "cancelled", now)

    # ── what the handlers do ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def held(self) -> dict[Address, Request]:
        """Unfinished requests of this connection, by address."""
        return self._requests.by_address

    @property
    def waiting(self) -> int:
        """Number of requests that have not begun."""
        return len(self._requests.unbegun)

    @property
    def to_begin(self) -> int:
        """Number of these for which there is a handler; some may be cancelled, and `begin` skips them."""
        return min(len(self._requests.unbegun), self._requests.room)

    def begin(self, now: float) -> Request | None:
        """Return the next request for a handler, or None if there is none or enough handlers are running."""
        return self._requests.begin(now)

    def partial(self, request: Request, body: Sequence[bytes], now: float) -> bool:
        """Send a PARTIAL of `request` (C8).  Return False if the request was lost."""
        if not self._requests.active(request, now):
            return False
        if self._outgoing.partial(request.address, body):
            self.heartbeats.sent_at = now
        return True

    def final(self, request: Request, body: Sequence[bytes], now: float) -> bool:
        """End `request` with a FINAL (C8).  Return False if the request was lost."""
        if not self._finish(request, now):
            return False
        self._outgoing.final(request.address, body)
        if self.state is not SERVING:
            self._settle(now)
        return True

    def error(self, request: Request, code: Any, text: str, now: float, detail: Sequence[bytes] = ()) -> bool:
        """End `request` with an ERROR; in 0.2 and 0.1, with a FINAL in its place.  Return False if the request was
        lost."""
        if code not in range(1000):  # a code has three digits
            code, text = Code.FAILED.value, f"{text} (code {code!r})"
        if not self._finish(request, now):
            return False
        self._outgoing.error(request.address, code, text, detail)
        if self.state is not SERVING:
            self._settle(now)
        return True

    def abandon(self, request: Request, now: float, *, ended: bool = False) -> None:
        """Give up `request` so that another worker gets it: its handler is stuck, or has `ended` without a reply.

        The broker suspects every request that a lost connection holds.  So the connection takes no more requests, and
        ends when the others are finished.  Until a stuck handler ends, the next connection has one credit less.
        """
        if self._requests.abandon(request, ended=ended):
            limit = self.settings.handler_timeout or 0.0  # without one, no handler is given up while it runs
            hung = f"its handler has neither returned nor yielded for {limit:g} s (handler_timeout)"
            self._drain("drain", now, "" if ended else hung)
        elif ended:
            self._finish(request, now)

    def _finish(self, request: Request, now: float) -> bool:
        """Remove `request` from those held.  Return False if its connection was lost."""
        requests = self._requests
        self.served += 1
        held = requests.finish(request, now)
        if held:
            self.heartbeats.sent_at = now
            if self._several:
                self._note_use(now)
        if requests.credit != self.credit:
            self._announce()
        return held

    def _announce(self) -> None:
        """Announce the credit to the broker if it has changed."""
        credit = self._requests.credit
        if credit != self.credit:
            self.credit = credit
            if self.state is SERVING:
                self._outgoing.credit(credit)

    def _release(self, keep: int) -> None:
        """Return requests that have not begun to the broker, except the first `keep` (X1)."""
        if self._x1:
            for address in self._requests.release(keep):
                self._outgoing.release(address)

    # ── the return to the first broker ───────────────────────────────────────────────────────────────────────────────

    def take_probe(self, now: float) -> str | None:
        """Return the endpoint of the first broker if it should be probed now; then report the outcome with `probed`."""
        return self.failover.take_probe(now) if self.state is SERVING else None

    def probed(self, answered: bool, now: float) -> None:
        """Return to the first broker if it has `answered`, as soon as there is credit to spare.

        The requests that are held then are finished before.
        """
        if self.state is SERVING:
            self.failover.probed(answered, now)
            self._note_use(now)

    def _note_use(self, now: float) -> None:
        """Before the return to the first broker, note whether there is credit to spare.

        As long as there is none, requests may wait for this worker at the broker that it leaves.
        """
        if len(self._requests.by_address) >= self.credit or not self.failover.returning:
            self._spare_since = math.inf
        elif self._spare_since == math.inf:
            self._spare_since = now

    # ── messages, events, and what is due ────────────────────────────────────────────────────────────────────────────

    @property
    def unsent(self) -> bool:
        """Whether there are messages to send."""
        return bool(self._outgoing)

    def take_messages(self) -> list[Message]:
        """Return the messages to send now."""
        return self._outgoing.take()

    def take_events(self) -> list[Event]:
        """Return what has happened since the last call."""
        events, self._events = self._events, []
        return events

    def tick(self, now: float) -> None:
        """Do what is due: send a HEARTBEAT, or give up a silent broker (C13) or a stuck handler."""
        if not self.state.connected:
            return
        heartbeats = self.heartbeats
        if heartbeats.is_silent(now):
            reason = f"the broker has been silent for {round(heartbeats.patience, 2):g} s"
            heartbeats.broker_was_silent()
            self.lose(reason, now)
            return
        if now >= self._leave_by:
            self._end_cleanly("closed", now)
            return
        if self.state is SERVING and now >= self._spare_since + SPARE_SECONDS:
            self._drain("drain", now)
        self._watch_handlers(now)
        if self.state.connected and heartbeats.beat(now):
            self._outgoing.heartbeat()

    def _watch_handlers(self, now: float) -> None:
        requests = self._requests
        while (request := requests.stuck(now)) is not None:
            self._events.append(HandlerStuck(request))
            self.abandon(request, now)
        if requests.slow(now):
            self._release(requests.room)
            self._announce()

    def deadline(self) -> float | None:
        """Return when `tick` is due, or a new connection if there is none; None if neither is.

        While all handlers are busy with lost requests, there is no new connection.
        """
        if not self.state.connected:
            return None if self.state.leaving or not self.credit else self.failover.retry_at
        due = min(self.heartbeats.deadline(), self._leave_by, self._requests.deadline())
        if self._several and self.state is SERVING:
            due = min(due, self.failover.probe_at, self._spare_since + SPARE_SECONDS)
        return due
