"""The worker's side of MDP as a state machine (C6 to C10): a connection, and the requests that it holds.

It speaks X1 (docs/x1.md), or 0.2 or 0.1 with one request at a time.

It has no socket and no clock.  Its shell opens a socket at `connect_at()` and then calls `connected`; it passes on
messages with `receive`, and calls `tick` at `deadline()`.  It takes requests with `begin`, ends each with `final` or
`error`, and sends what `take_messages` returns.  When `lost` is set, it sends the remaining messages and closes the
socket; the requests that were held then are no longer answered (C9).

There may be several brokers (`failover`): the socket is to be connected to `failover.endpoints.current`.  The session
moves on when it loses a broker or is told to go.  While it is not at the first one (X1), the shell is asked by
`probe_due` to find out whether that is back, and reports to `probed`.  If it is, the session finishes what it holds,
and returns.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, cast

from ..mdp import wire
from ..mdp.codes import Code
from ..mdp.defaults import DEFAULT_ENDPOINT
from ..mdp.errors import SettingError
from ..mdp.wire import Address, Message, Route, batch, x1
from ..mdp.wire.names import displayed
from .credit import PREFETCH_SECONDS, CreditController
from .failover import Failover
from .heartbeats import Heartbeats
from .request import Request

HEADERS: Final[dict[str, tuple[Route, bytes]]] = {
    "X1": ((wire.EMPTY,), wire.WX1),
    "0.2": ((), wire.W02),
    "0.1": ((wire.EMPTY,), wire.W01),
}
"""Envelope and header of a worker's messages, by protocol version (C7, C24, C36)."""

# Not Final: mypyc (2.4) takes a Final of several floats for unset.
BACKOFF_SECONDS: tuple[float, float] = (1.0, 32.0)
"""Delay before a reconnection, at first and at most; it doubles each time."""
UNHEARD_PATIENCE_SECONDS: Final = 0.5
"""Time that a leaving worker waits for a broker that has never sent anything."""


class WorkerSession:
    """One worker's dialog with its broker.

    `heartbeat` (seconds) and `liveness` (intervals) should be the broker's (see `Heartbeats`).  `controller` decides
    how many requests to hold; with 0.2 and 0.1 it is one.  A handler that has neither ended nor sent a PARTIAL for
    `handler_timeout` seconds is given up.  `options` are the options of READY (X1).  `endpoints` are those of the
    brokers, of which each may be tried without delay before there is a backoff.
    """

    def __init__(
        self,
        service: str | bytes,
        *,
        protocol: str = "X1",
        heartbeat: float = 1.0,
        liveness: int = 5,
        controller: CreditController | None = None,
        handler_timeout: float | None = None,
        options: bytes = b"",
        endpoints: Sequence[str] = (DEFAULT_ENDPOINT,),
        rng: random.Random | None = None,
    ) -> None:
        if protocol not in HEADERS:
            raise SettingError(f"protocol is {protocol!r}: it must be one of {', '.join(HEADERS)}")
        self.service = wire.service_name(service)
        if self.service.startswith(wire.MMI):
            name = self.service.decode()
            raise SettingError(f"service {name!r} is reserved: the broker itself offers services named mmi.*")
        self.controller = controller or CreditController(1)
        self.credit = self.controller.credit
        """The credit announced to the broker: the controller's, minus the handlers still busy with lost requests."""
        self.held: dict[Address, Request] = {}
        """Unfinished requests of this connection, by address."""
        self.cancelled: list[Request] = []
        """Cancelled requests whose handlers should stop.  The shell clears this list."""
        self.stuck: list[Request] = []
        """Requests whose handlers have exceeded `handler_timeout`.  The shell clears this list."""
        self.lost: str | None = "not connected yet"
        """Why there is no connection; None while there is one."""
        self.dismissed = False
        """The broker ended the last connection with DISCONNECT, as it does when it shuts down."""
        self.refused = False
        """The broker ended the last connection with DISCONNECT because of this worker, and said why."""
        self.retry_at = 0.0
        """When to reconnect, while `lost` is set."""
        self.keep_messages = False
        """Whether the messages left when the connection ended should still be sent."""
        self.heard = False
        """Whether the broker has sent anything on this connection."""
        self.leaving = False
        """Whether `leave` was called: the worker does not reconnect."""
        self.heartbeats = Heartbeats(heartbeat, liveness)
        self._route, self._header = HEADERS[protocol]
        self._x1 = self._header == wire.WX1
        self._name = self.service.decode()
        self.handler_timeout = math.inf if handler_timeout is None else handler_timeout
        self._options = options
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not cryptography
        self.failover = Failover(endpoints, self._rng)
        self._several = self.failover.several
        self._batch: Any = batch.Batch(self._route, self._header)
        self._messages: list[Message] = []  # to be sent before the batch
        self._queue: deque[Request] = deque()  # requests that have not begun, in order
        self._running: dict[Address, float] = {}  # when each of the others began, oldest first
        self._active_at: dict[Address, float] = {}  # when they last sent anything; only with a `handler_timeout`
        self._slow_suspect: tuple[Address, float] | None = None  # the request whose handler seemed slow, and when
        self._abandoned: set[Address] = set()  # requests to be done by another worker
        self._orphans: dict[int, Request] = {}  # by id(): requests of lost connections whose handlers still run
        self._partials: dict[Address, list[bytes]] = {}  # the PARTIALs so far of each request (0.1)
        self._winding_down = False  # DISCONNECT was sent: the connection ends with its last request (X1)
        self._leave_by = math.inf  # when to close if the broker does not answer DISCONNECT
        self._backoff = BACKOFF_SECONDS[0]  # seconds before the next reconnection, without jitter

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def alive(self) -> bool:
        """Whether there is a connection."""
        return self.lost is None

    @property
    def ended(self) -> bool:
        """Whether the connection has ended for good."""
        return self.leaving and self.lost is not None

    def connect_at(self) -> float:
        """Return when to open a socket while `lost` is set; never while all handlers are busy with lost requests."""
        return math.inf if self.leaving or not self.credit else self.retry_at

    def connected(self, now: float) -> None:
        """Send READY on a new socket (C7)."""
        self.lost = None
        self.heard = self.keep_messages = self.refused = False
        self._winding_down = False
        self._leave_by = math.inf
        self.failover.connected(now, probing=self._x1)  # third-party brokers do not answer a probe
        self.heartbeats.connected(now)
        self._discard()
        if self._x1:
            self._batch.ready(self.credit, self.service, self._options)
        else:
            self._send(wire.ready(self._route, self._header, self.service))

    def leave(self, now: float) -> None:
        """Take no more requests, and disconnect when those in progress are finished."""
        if not self.leaving:
            self.leaving = True
            if self.lost is None:
                self._wind_down(now)

    def lose(self, reason: str, now: float, *, wait: bool = True, dismissed: bool = False) -> None:
        """Give up the connection, and connect again: with `wait` after a backoff, else (after DISCONNECT) immediately.

        With several endpoints, the next connection is to another one, and there is a backoff only if all have failed.
        """
        heard = self.heard and self.lost is None  # else no socket could be opened
        away = self.dismissed and not heard  # a broker that went away has not been heard since
        self.dismissed = dismissed or not wait
        failover = self.failover
        if self._several and self._winding_down and not failover.returning:  # because a handler does not end
            failover.ended()
            wait = False
        elif self._several:
            wait = failover.lost(reason, heard=heard, dismissed=self.dismissed)
        self.retry_at = now
        if wait:
            self.retry_at += self._backoff * self._rng.uniform(0.5, 1.0)
            if not (away and self.dismissed):  # it drains, for not too long
                self._backoff = min(2 * self._backoff, BACKOFF_SECONDS[1])
        self.keep_messages = False
        self._discard()
        self._end(reason)

    def _end(self, reason: str) -> None:
        self.lost = reason
        for address, request in self.held.items():
            request.cancelled = True
            if address in self._running:
                self.cancelled.append(request)
                self._orphans[id(request)] = request
        self.held.clear()
        self._queue.clear()
        self._running.clear()
        self._active_at.clear()
        self._abandoned.clear()
        self._partials.clear()
        self._announce()

    def _wind_down(self, now: float) -> None:
        """Take no more requests on this connection."""
        if self._x1 and not self._winding_down:
            self._winding_down = True
            self._release_unbegun(0)
            self._send(wire.disconnect(self._route, self._header))
        self._settle(now)

    def _settle(self, now: float) -> None:
        """Close the connection if it is to end and only abandoned requests are left."""
        if not (self.leaving or self._winding_down or self._abandoned) or self._running.keys() - self._abandoned:
            return
        if self._x1 and not self._abandoned:
            patience = self.heartbeats.patience
            if not self.heard:
                patience = min(patience, UNHEARD_PATIENCE_SECONDS)
            self._leave_by = min(self._leave_by, now + patience)
            return
        if not self._x1:
            self._send(wire.disconnect(self._route, self._header))  # C16: the broker forgets this worker at once
        self._close("a handler does not end" if self._abandoned else "closed", now)

    def _close(self, reason: str, now: float) -> None:
        """End the connection cleanly: the last messages should still reach the broker."""
        self.dismissed = self.failover.returning
        self.failover.ended()
        self.retry_at = now
        self.keep_messages = self.heard  # do not wait for a broker that was never heard
        self._end(reason)

    # ── what the broker sends ────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: Message, now: float) -> None:
        """Process a message.  New requests wait for `begin`; `cancelled` and `lost` may change."""
        if self.lost is not None:
            return
        command = wire.decode_broker(message)
        if isinstance(command, wire.Invalid) or command.header != self._header:
            return
        if isinstance(command, wire.Batched):
            self._receive_batch(message, command, now)
        elif isinstance(command, wire.Heartbeat):
            self._beaten(now)
        elif isinstance(command, wire.Disconnect):
            self._sent_away(command, now)
        else:
            self._seen(now)
            self._given(cast("wire.Request", command), now)

    def _receive_batch(self, message: Message, found: wire.Batched, now: float) -> None:
        if found.bare:
            self._beaten(now)
            return
        commands = batch.to_worker(message, found.at)
        if not (commands and isinstance(commands[0], wire.Disconnect)):
            self._seen(now)
        for command in commands:
            if isinstance(command, wire.Request):
                self._given(command, now)
            elif isinstance(command, wire.Cancel):
                self._withdrawn(command.id, now)
            elif isinstance(command, wire.Disconnect):
                self._sent_away(command, now)
                return

    def _sent_away(self, command: wire.Disconnect, now: float) -> None:
        if command.text:
            text = displayed(command.text.decode(errors="replace"))
            self.lose(f"the broker refused this worker: {text}", now)
            self.refused = True
            return
        # C9.  A broker that was heard before is probably being restarted: reconnect without delay.
        expected = ", as it does when it restarts" if self.heard and not self._winding_down else ""
        dismissed = self._several or self.dismissed
        self.lose(f"the broker sent DISCONNECT{expected}", now, wait=not self.heard, dismissed=dismissed)

    def _seen(self, now: float) -> None:
        self.heard = True
        self._backoff = BACKOFF_SECONDS[0]
        self.heartbeats.command_received(now)

    def _beaten(self, now: float) -> None:
        self.heartbeats.heartbeat_received(now, first=not self.heard)
        self.heard = True
        self._backoff = BACKOFF_SECONDS[0]

    def _given(self, work: wire.Request, now: float) -> None:
        address = cast("Address", work.id)
        if address in self.held:
            if not self._x1:
                self.lose("the broker sent a second request with the address of the first", now)
            return  # a duplicate: in X1 an address belongs to one dispatch (C32)
        ttl = work.ttl
        request = Request(
            work.body,
            service=self._name,
            client=address,
            options=work.options,
            deadline=None if ttl is None else now + ttl,
            attempt=work.attempt,
        )
        self.held[address] = request
        self._queue.append(request)
        if self._winding_down:  # the broker had not read DISCONNECT
            self._release_unbegun(0)
        elif self._several:
            self._note_use(now)

    def _withdrawn(self, address: Address, now: float) -> None:
        request = self.held.get(address)
        if request is None or request.cancelled:
            return
        request.cancelled = True
        if address in self._running:
            self.cancelled.append(request)
        else:
            self.error(request, Code.CANCELLED.value, "cancelled", now)

    # ── what the handlers do ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def waiting(self) -> int:
        """Number of requests that have not started."""
        return len(self._queue)

    @property
    def _busy(self) -> int:
        """Number of running handlers, including those of lost connections."""
        return len(self._running) + len(self._orphans)

    def begin(self, now: float) -> Request | None:
        """Return the next request for a handler, or None if there is none or enough handlers are running."""
        queue = self._queue
        while queue and self._busy < self.controller.concurrency:
            request = queue.popleft()
            address = request.address
            if self.held.get(address) is request:  # else it was cancelled
                self._running[address] = now
                if self.handler_timeout != math.inf:
                    self._active_at[address] = now
                return request
        return None

    def partial(self, request: Request, body: Sequence[bytes], now: float) -> bool:
        """Send a PARTIAL of `request` (C8).  Return False if the request was lost."""
        address = request.address
        if self.held.get(address) is not request:
            return False
        if self._active_at.pop(address, None) is not None:
            self._active_at[address] = now
        if self._header == wire.W01:
            self._partials.setdefault(address, []).extend(body)  # 0.1 has no PARTIAL: all is in the REPLY (C24)
            return True
        self._reply(wire.PARTIAL, address, body)
        self.heartbeats.sent_at = now
        return True

    def final(self, request: Request, body: Sequence[bytes], now: float) -> bool:
        """End `request` with a FINAL (C8).  Return False if the request was lost."""
        address = request.address
        if not self._finish(request, now):
            return False
        if self._partials:
            body = [*self._partials.pop(address, ()), *body]
        self._reply(wire.FINAL, address, body)
        self._settle(now)
        return True

    def error(self, request: Request, code: Any, text: str, now: float, detail: Sequence[bytes] = ()) -> bool:
        """End `request` with an ERROR; in 0.2 and 0.1, with a FINAL in its place.  Return False if the request was
        lost."""
        if code not in range(1000):  # a code has three digits
            code, text = Code.FAILED.value, f"{text} (code {code!r})"
        address = request.address
        if not self._x1:
            self._partials.pop(address, None)  # after PARTIALs, a 0.1 REPLY is not recognized as a failure
            return self.final(request, wire.error_body(code, text), now)
        if not self._finish(request, now):
            return False
        self._batch.error(x1.WORKER_ERROR, address, code, text.encode(errors="replace"), detail)
        self._settle(now)
        return True

    def abandon(self, request: Request, now: float, *, ended: bool = False) -> None:
        """Give up `request` so that another worker gets it: its handler is stuck, or has `ended` without a reply.

        The broker suspects every request that a lost connection holds.  So the connection takes no more requests, and
        is closed when the others have ended.  Until a stuck handler ends, the next connection has one credit less.
        """
        address = request.address
        if self.held.get(address) is request:
            self._abandoned.add(address)
            self._active_at.pop(address, None)
            if ended:
                self._running.pop(address, None)
            self._wind_down(now)
        elif ended:
            self._finish(request, now)

    def _finish(self, request: Request, now: float) -> bool:
        """Remove `request` from those held.  Return False if its connection was lost."""
        address = request.address
        if self.held.get(address) is not request:
            if self._orphans.pop(id(request), None) is not None:
                self._announce()
            return False
        del self.held[address]
        if self._several:
            self._note_use(now)
        began = self._running.pop(address, None)
        if self._active_at:
            self._active_at.pop(address, None)
        if self._abandoned:
            self._abandoned.discard(address)
        if began is not None and self.controller.finished(now - began):
            self._announce()
        self.heartbeats.sent_at = now
        return True

    def _announce(self) -> None:
        """Announce the credit to the broker if it has changed (X1)."""
        credit = max(0, self.controller.credit - len(self._orphans))
        if credit != self.credit:
            self.credit = credit
            if self._x1 and self.lost is None and not self._winding_down:
                self._batch.credit(credit)

    def _release_unbegun(self, keep: int) -> None:
        """Return requests that have not started to the broker, except the first `keep` (X1)."""
        while self._x1 and len(self._queue) > keep:
            request = self._queue.pop()
            address = request.address
            if self.held.get(address) is not request:
                continue
            del self.held[address]
            self._batch.signal(x1.WORKER_RELEASE, address)

    # ── the return to the first broker ───────────────────────────────────────────────────────────────────────────────

    def probe_due(self, now: float) -> bool:
        """Return whether to find out now if the first broker takes workers again; the shell then calls `probed`."""
        if now < self.failover.probe_at or self.lost is not None or self.leaving or self._winding_down:
            return False
        self.failover.probe_at = math.inf
        return True

    def probed(self, answered: bool, now: float) -> None:
        """Return to the first broker if it has `answered`, as soon as there is credit to spare.

        The requests that are held then are finished before.
        """
        if self.lost is not None or self.leaving or self._winding_down:
            return
        self.failover.probed(answered, now)
        if answered:
            self._note_use(now)

    def _note_use(self, now: float) -> None:
        if self.failover.returning:
            self.failover.use(full=len(self.held) >= self.credit, now=now)

    # ── messages to send, and timers ──────────────────────────────────────────────────────────────────────────────────

    @property
    def unsent(self) -> bool:
        """Whether there are messages to send."""
        return bool(self._messages or self._batch)

    def take_messages(self) -> list[Message]:
        """Return the messages to send now."""
        if len(self._batch):
            self._messages += self._batch.messages()
        messages, self._messages = self._messages, []
        return messages

    def _reply(self, kind: wire.Kind, address: Address, body: Sequence[bytes]) -> None:
        if self._x1:
            self._batch.reply(x1.WORKER_FINAL if kind is wire.FINAL else x1.WORKER_PARTIAL, address, body)
        else:
            self._send(wire.reply_to_broker(self._route, self._header, kind, address, body))

    def _send(self, message: Message) -> None:
        if len(self._batch):
            self._messages += self._batch.messages()
        self._messages.append(message)

    def _discard(self) -> None:
        self._batch.messages()
        self._messages = []

    def tick(self, now: float) -> None:
        """Do what is due: send a HEARTBEAT, or give up a silent broker (C13) or a stuck handler."""
        if not self.alive:
            return
        heartbeats = self.heartbeats
        if heartbeats.is_silent(now):
            reason = f"the broker has been silent for {round(heartbeats.patience, 2):g} s"
            heartbeats.broker_was_silent()
            self.lose(reason, now)
            return
        if now >= self._leave_by:
            self._close("closed", now)
            return
        if now >= self.failover.leave_at() and not (self.leaving or self._winding_down):
            self._wind_down(now)
        self._watch_handlers(now)
        if self.alive and heartbeats.beat(now):
            self._send(wire.heartbeat(self._route, self._header))

    def _watch_handlers(self, now: float) -> None:
        while self._active_at:
            address, sign = next(iter(self._active_at.items()))
            if now < sign + self.handler_timeout:
                break
            request = self.held[address]
            self.stuck.append(request)
            self.abandon(request, now)
        if now >= self._slow_at():
            oldest = next(iter(self._running))
            suspect = self._slow_suspect
            if suspect is None or oldest != suspect[0]:  # this process may have been suspended: check again
                self._slow_suspect = (oldest, now)
                return
            self.controller.slow()
            self._release_unbegun(max(0, self.controller.concurrency - self._busy))
            self._announce()

    def _slow_at(self) -> float:
        """Return when the oldest handler will have kept other requests waiting for too long."""
        if self._running and self._x1 and self.controller.requests_may_wait(len(self._queue), self._busy):
            oldest, began = next(iter(self._running.items()))
            suspect = self._slow_suspect
            if suspect is None or suspect[0] != oldest:
                return began + PREFETCH_SECONDS
            return suspect[1] + PREFETCH_SECONDS / 2
        return math.inf

    def deadline(self) -> float:
        """Return when `tick` is due, or a new connection while `lost` is set."""
        if self.lost is not None:
            return self.connect_at()
        due = min(self.heartbeats.deadline(), self._leave_by)
        if self._several and not (self.leaving or self._winding_down):
            due = min(due, self.failover.probe_at, self.failover.leave_at())
        if self._active_at:
            due = min(due, next(iter(self._active_at.values())) + self.handler_timeout)
        return min(due, self._slow_at())
