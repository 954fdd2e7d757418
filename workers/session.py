"""A worker's side of MDP as a machine (C6 to C10): one connection, and the requests that it holds.

It speaks X1 in the batched form (docs/x1.md); or, with a broker that does not, 0.2 or 0.1, one request at a time.

No socket, no clock.  The shell opens a new socket when `connect_at` has come, says so with `connected`, passes on what
arrives with `receive`, and calls `tick` when `deadline` has come.  It takes requests with `begin`, ends each with
`final` or `error`, and sends what `take_messages` returns.  When `lost` has a reason, it sends what is left and closes
the socket; requests that were held then are not answered any more (C9).
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, cast

from ..mdp import wire
from ..mdp.codes import Code
from ..mdp.errors import SettingError
from ..mdp.wire import Address, Message, Route, batch
from .capacity import AHEAD, LONG_STEP, Capacity
from .heartbeats import Heartbeats
from .request import Request

HEADERS: Final[dict[str, tuple[Route, bytes]]] = {
    "X1": ((wire.EMPTY,), wire.WX1),
    "0.2": ((), wire.W02),
    "0.1": ((wire.EMPTY,), wire.W01),
}
"""For each protocol version the envelope and the header of a worker's messages (C7, C24, C36)."""

# Not Final: mypyc (2.4) takes a Final of several floats for unset.
BACKOFF: tuple[float, float] = (1.0, 32.0)
"""Seconds before the first and before the latest reconnection; each waits twice as long as the one before."""
UNHEARD_PATIENCE: Final = 0.5
"""Seconds for which a worker that leaves waits for a broker that has never said anything."""

_PARTIAL, _FINAL, _ERROR, _RELEASE = (
    wire.CODES[wire.WX1][kind][0] for kind in (wire.PARTIAL, wire.FINAL, wire.ERROR, wire.RELEASE)
)


class WorkerSession:
    """The dialog of one worker with its broker.

    `heartbeat` (seconds) and `liveness` (intervals) are what the broker should have as well (see `Heartbeats`).
    `capacity` says how many requests to hold; before X1 that is one.  A handler that has neither ended nor sent a
    PARTIAL for `handler_timeout` seconds is given up.  `options` are those of READY (X1).
    """

    def __init__(
        self,
        service: str | bytes,
        *,
        protocol: str = "X1",
        heartbeat: float = 1.0,
        liveness: int = 5,
        capacity: Capacity | None = None,
        handler_timeout: float | None = None,
        options: bytes = b"",
        rng: random.Random | None = None,
    ) -> None:
        if protocol not in HEADERS:
            raise SettingError(f"protocol is {protocol!r}: it must be one of {', '.join(HEADERS)}")
        self.service = wire.service_name(service)
        if self.service.startswith(wire.MMI):
            raise SettingError(f"{service!r} is reserved: services whose names begin with mmi. are the broker's own")
        self.capacity = capacity or Capacity(1)
        self.credit = self.capacity.credit
        """Requests that it may hold, as the broker is told: its capacity, less the handlers of lost requests."""
        self.held: dict[Address, Request] = {}
        """The requests of this connection that have not ended, by their addresses."""
        self.cancelled: list[Request] = []
        """Requests whose handlers should end, because nobody waits for them; the shell takes them."""
        self.stuck: list[Request] = []
        """Requests whose handlers have exceeded their time; the shell takes them."""
        self.lost: str | None = "not connected yet"
        """Why there is no connection; None while there is one."""
        self.retry_at = 0.0
        """When to connect next, while `lost`."""
        self.keep_messages = False
        """The messages left when the connection was lost should still reach the broker."""
        self.heard = False
        """Whether the broker has said anything on this connection."""
        self.leaving = False
        """`leave` was called: it does not connect again."""
        self.heartbeats = Heartbeats(heartbeat, liveness)
        self._route, self._header = HEADERS[protocol]
        self._x1 = self._header == wire.WX1
        self._name = self.service.decode()
        self.handler_timeout = math.inf if handler_timeout is None else handler_timeout
        self._options = options
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not cryptography
        self._batch: Any = batch.Batch(self._route, self._header)
        self._messages: list[Message] = []  # what is to be sent before the batch
        self._line: deque[Request] = deque()  # requests that have not begun, in order
        self._began: dict[Address, float] = {}  # when the others began, the oldest first
        self._signs: dict[Address, float] = {}  # when they last sent something, where a `handler_timeout` limits that
        self._watched: tuple[Address, float] | None = None  # whose handler seemed slow, and when
        self._abandoned: set[Address] = set()  # requests that another worker should do
        self._orphans: dict[int, Request] = {}  # requests of lost connections whose handlers have not ended, by id()
        self._parts: dict[Address, list[bytes]] = {}  # the PARTIALs so far of each request (0.1)
        self._winding_down = False  # DISCONNECT was sent: the connection ends when what it holds is done (X1)
        self._leave_by = math.inf  # when it ends if the broker does not answer DISCONNECT
        self._backoff = BACKOFF[0]  # seconds before the next reconnection, or somewhat less

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def alive(self) -> bool:
        """Whether there is a connection."""
        return self.lost is None

    @property
    def ended(self) -> bool:
        """Whether there is no connection, nor will there be one."""
        return self.leaving and self.lost is not None

    def connect_at(self) -> float:
        """Return when to open a socket, while `lost`: never while all handlers are busy with lost requests."""
        return math.inf if self.leaving or not self.credit else self.retry_at

    def connected(self, now: float) -> None:
        """A new socket is open: send READY (C7)."""
        self.lost = None
        self.heard = self.keep_messages = False
        self._winding_down = False
        self._leave_by = math.inf
        self.heartbeats.connected(now)
        self._discard()
        if self._x1:
            self._batch.ready(self.credit, self.service, self._options)
        else:
            self._send(wire.ready(self._route, self._header, self.service))

    def leave(self, now: float) -> None:
        """Take no more requests, and end when those that have begun are done."""
        if not self.leaving:
            self.leaving = True
            if self.lost is None:
                self._wind_down(now)

    def lose(self, reason: str, now: float, *, wait: bool = True) -> None:
        """The connection is of no use any more: connect again, if `wait` after a backoff."""
        self.retry_at = now
        if wait:
            self.retry_at += self._backoff * self._rng.uniform(0.5, 1.0)
            self._backoff = min(2 * self._backoff, BACKOFF[1])
        self.keep_messages = False
        self._discard()
        self._end(reason)

    def _end(self, reason: str) -> None:
        self.lost = reason
        for address, request in self.held.items():
            request.cancelled = True
            if address in self._began:
                self.cancelled.append(request)
                self._orphans[id(request)] = request
        self.held.clear()
        self._line.clear()
        self._began.clear()
        self._signs.clear()
        self._abandoned.clear()
        self._parts.clear()
        self._announce()

    def _wind_down(self, now: float) -> None:
        """Take no more requests on this connection."""
        if self._x1 and not self._winding_down:
            self._winding_down = True
            self._release_unbegun(0)
            self._send(wire.disconnect(self._route, self._header))
        self._settle(now)

    def _settle(self, now: float) -> None:
        """Close the connection, if that is wanted and nothing but abandoned requests keeps it."""
        if not (self.leaving or self._winding_down or self._abandoned) or self._began.keys() - self._abandoned:
            return
        if self._x1 and not self._abandoned:
            patience = self.heartbeats.patience
            self._leave_by = min(self._leave_by, now + (patience if self.heard else min(patience, UNHEARD_PATIENCE)))
            return
        if not self._x1:
            self._send(wire.disconnect(self._route, self._header))  # C16: the broker forgets this worker at once
        self._close("a handler does not end" if self._abandoned else "closed", now)

    def _close(self, reason: str, now: float) -> None:
        """End the connection in order: what was said last should reach the broker."""
        self.retry_at = now
        self.keep_messages = self.heard  # nothing waits for a broker that has never said anything
        self._end(reason)

    # ── what the broker sends ────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, message: Message, now: float) -> None:
        """Take in a message.  New requests wait for `begin`; `cancelled` and `lost` may have changed afterwards."""
        if self.lost is not None:
            return
        command = wire.decode_broker(message)
        if isinstance(command, wire.Batched):
            if command.header != self._header:
                return
            if command.bare:
                self._beaten(now)
                return
            self._seen(now)
            for each in batch.to_worker(message, command.at):
                self._take(each, now)
        elif isinstance(command, wire.Invalid) or command.header != self._header:
            return
        elif isinstance(command, wire.Disconnect):
            # C9.  A broker that knew this worker has perhaps been restarted: no reason to wait.
            self.lose("the broker sent DISCONNECT", now, wait=not self.heard)
        elif isinstance(command, wire.Heartbeat):
            self._beaten(now)
        else:
            self._seen(now)
            self._take(command, now)

    def _take(self, command: wire.FromBroker | wire.Invalid, now: float) -> None:
        if isinstance(command, wire.Request):
            self._given(command, now)
        elif isinstance(command, wire.Cancel):
            self._withdrawn(cast("Address", command.id), now)

    def _seen(self, now: float) -> None:
        self.heard = True
        self._backoff = BACKOFF[0]
        self.heartbeats.seen(now)

    def _beaten(self, now: float) -> None:
        self.heartbeats.beaten(now, first=not self.heard)
        self.heard = True
        self._backoff = BACKOFF[0]

    def _given(self, work: wire.Request, now: float) -> None:
        address = cast("Address", work.id)
        if address in self.held:
            if not self._x1:
                self.lose("the broker sent a second request with the address of the first", now)
            return  # in X1 an address is one dispatch (C32): it is here already
        ttl = work.options.ttl if work.ttl is None else work.ttl
        request = Request(
            work.body,
            service=self._name,
            client=address,
            options=work.options,
            deadline=None if ttl is None else now + ttl,
            attempt=work.attempt,
        )
        self.held[address] = request
        self._line.append(request)
        if self._winding_down:  # the broker had not read DISCONNECT
            self._release_unbegun(0)

    def _withdrawn(self, address: Address, now: float) -> None:
        request = self.held.get(address)
        if request is None or request.cancelled:
            return
        request.cancelled = True
        if address in self._began:
            self.cancelled.append(request)
        else:
            self.error(request, Code.CANCELLED.value, "cancelled", now)

    # ── what the handlers do ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._line)

    def begin(self, now: float) -> Request | None:
        """Return the next request for a handler; None if there is none, or as many run as may at a time."""
        line = self._line
        while line and len(self._began) + len(self._orphans) < self.capacity.parallel:
            request = line.popleft()
            address = request.address
            if self.held.get(address) is request:  # else it was cancelled
                self._began[address] = now
                if self.handler_timeout != math.inf:
                    self._signs[address] = now
                return request
        return None

    def partial(self, request: Request, body: Sequence[bytes], now: float) -> bool:
        """Send a PARTIAL of `request` (C8).  Returns False if the request was lost."""
        address = request.address
        if self.held.get(address) is not request:
            return False
        if self._signs.pop(address, None) is not None:
            self._signs[address] = now
        if self._header == wire.W01:
            self._parts.setdefault(address, []).extend(body)  # 0.1 has no PARTIAL: all goes into the one REPLY (C24)
            return True
        self._reply(wire.PARTIAL, address, body)
        self.heartbeats.sent_at = now
        return True

    def final(self, request: Request, body: Sequence[bytes], now: float) -> bool:
        """End `request` with a FINAL (C8).  Returns False if the request was lost."""
        address = request.address
        if not self._finish(request, now):
            return False
        if self._parts:
            body = [*self._parts.pop(address, ()), *body]
        self._reply(wire.FINAL, address, body)
        self._settle(now)
        return True

    def error(self, request: Request, code: Any, text: str, now: float, detail: Sequence[bytes] = ()) -> bool:
        """End `request` with an ERROR; before X1, with the FINAL that stands for it.  Returns False if it was lost."""
        if code not in range(1000):  # three digits are all that can be told
            code, text = Code.FAILED.value, f"{text} (code {code!r})"
        address = request.address
        if not self._x1:
            self._parts.pop(address, None)  # with them in front, a 0.1 worker's REPLY would not be known for a failure
            return self.final(request, wire.error_body(code, text), now)
        if not self._finish(request, now):
            return False
        raw = text.encode(errors="replace")
        if isinstance(address, int):
            self._batch.error(_ERROR, address, code, raw, detail)
        else:
            self._send(wire.error_to_broker(self._route, address, code, raw, detail))
        self._settle(now)
        return True

    def abandon(self, request: Request, now: float, *, ended: bool = False) -> None:
        """Give up `request`, so that another worker gets it; its handler does not end, or has `ended` without a reply.

        The broker blames every request that a lost connection holds.  So this one takes no more, and is closed when
        all others that it holds have ended.  The next one does without the handler until that ends.
        """
        address = request.address
        if self.held.get(address) is request:
            self._abandoned.add(address)
            self._signs.pop(address, None)
            if ended:
                self._began.pop(address, None)
            self._wind_down(now)
        elif ended:
            self._finish(request, now)

    def stepped(self, seconds: float) -> None:
        """Record that a coroutine kept the event loop for so long: one that blocks it leaves the rest to others."""
        if self.capacity.stepped(seconds):
            self._announce()
        if seconds >= LONG_STEP:
            self._release_unbegun(0)

    def _finish(self, request: Request, now: float) -> bool:
        """Take `request` out of those held.  Returns False if it was of a connection that is lost."""
        address = request.address
        if self.held.get(address) is not request:
            if self._orphans.pop(id(request), None) is not None:
                self._announce()
            return False
        del self.held[address]
        began = self._began.pop(address, None)
        if self._signs:
            self._signs.pop(address, None)
        if self._abandoned:
            self._abandoned.discard(address)
        if began is not None and self.capacity.finished(now - began):
            self._announce()
        self.heartbeats.sent_at = now
        return True

    def _announce(self) -> None:
        """Tell the broker of a credit that has changed (X1)."""
        credit = max(0, self.capacity.credit - len(self._orphans))
        if credit != self.credit:
            self.credit = credit
            if self._x1 and self.lost is None and not self._winding_down:
                self._batch.credit(credit)

    def _release_unbegun(self, keep: int) -> None:
        """Return requests that have not begun, all but the first `keep` (X1)."""
        while self._x1 and len(self._line) > keep:
            request = self._line.pop()
            address = request.address
            if self.held.get(address) is not request:
                continue
            del self.held[address]
            if isinstance(address, int):
                self._batch.signal(_RELEASE, address)
            else:
                self._send(wire.release(self._route, address))

    # ── what is sent, and the time ───────────────────────────────────────────────────────────────────────────────────

    @property
    def unsent(self) -> bool:
        """Whether there is something to send."""
        return bool(self._messages or self._batch)

    def take_messages(self) -> list[Message]:
        """Return the messages to send now."""
        if len(self._batch):
            self._messages += self._batch.messages()
        messages, self._messages = self._messages, []
        return messages

    def _reply(self, kind: wire.Kind, address: Address, body: Sequence[bytes]) -> None:
        if self._x1 and isinstance(address, int):
            self._batch.reply(_FINAL if kind is wire.FINAL else _PARTIAL, address, body)
        else:  # a broker of other make may use addresses that are no numbers
            self._send(wire.reply_to_broker(self._route, self._header, kind, address, body))

    def _send(self, message: Message) -> None:
        if len(self._batch):
            self._messages += self._batch.messages()
        self._messages.append(message)

    def _discard(self) -> None:
        self._batch.messages()
        self._messages = []

    def tick(self, now: float) -> None:
        """Do what is due: HEARTBEAT, or give up a broker that has been silent for too long (C13), or a handler."""
        if not self.alive:
            return
        heartbeats = self.heartbeats
        if now >= heartbeats.seen_at + heartbeats.patience:
            reason = f"the broker has been silent for {heartbeats.patience:g} s"
            heartbeats.silent()
            self.lose(reason, now)
            return
        if now >= self._leave_by:
            self._close("closed", now)
            return
        self._watch_handlers(now)
        if self.alive and heartbeats.beat(now):
            self._send([*self._route, self._header] if self._x1 else wire.heartbeat(self._route, self._header))

    def _watch_handlers(self, now: float) -> None:
        while self._signs:
            address, sign = next(iter(self._signs.items()))
            if now < sign + self.handler_timeout:
                break
            request = self.held[address]
            self.stuck.append(request)
            self.abandon(request, now)
        if now >= self._slow_at():
            oldest = next(iter(self._began))
            if self._watched is None or oldest != self._watched[0]:  # perhaps this process was held up: look again
                self._watched = (oldest, now)
                return
            self.capacity.slow()
            self._release_unbegun(max(0, self.capacity.parallel - len(self._began) - len(self._orphans)))
            self._announce()

    def _slow_at(self) -> float:
        """Return when the oldest handler has kept others waiting for too long."""
        if self._began and self._x1 and self.capacity.ahead(len(self._line), len(self._began) + len(self._orphans)):
            oldest, began = next(iter(self._began.items()))
            watched = self._watched
            return began + AHEAD if watched is None or watched[0] != oldest else watched[1] + AHEAD / 2
        return math.inf

    def deadline(self) -> float:
        """Return when `tick`, or while `lost` a new connection, is due."""
        if self.lost is not None:
            return self.connect_at()
        due = min(self.heartbeats.deadline(), self._leave_by)
        if self._signs:
            due = min(due, next(iter(self._signs.values())) + self.handler_timeout)
        return min(due, self._slow_at())
