"""A worker's side of MDP as a machine: READY, one request at a time, heartbeats both ways, reconnecting (C6 to C10).

It speaks X1 (docs/x1.md) or, with a broker that does not, 0.2 or 0.1.

No socket, no clock.  The shell opens a new socket when `retry_at` has come, says so with `connected`, feeds `receive`
and `tick`, and sends what is returned.  When `lost` tells a reason, the shell closes the socket and sends nothing
more (C9).
"""

import random
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from ..mdp import wire
from ..mdp.codes import Code
from ..mdp.errors import SettingError
from ..mdp.limits import LARGEST, SHORTEST_HEARTBEAT
from ..mdp.wire import Message, Route
from .request import Request

HEADERS: Final[dict[str, tuple[Route, bytes]]] = {
    "X1": ((), wire.WX1),
    "0.2": ((), wire.W02),
    "0.1": ((b"",), wire.W01),
}
"""For each protocol version the envelope and the header of a worker's messages (C7, C24)."""

# Not Final: mypyc (2.4) takes a Final of several floats for unset.
BACKOFF: tuple[float, float] = (1.0, 32.0)
"""Seconds before the first and before the latest reconnection; each waits twice as long as the one before."""
LONGEST_PATIENCE: Final = 60.0
"""Seconds to which the patience with a silent broker grows, if the settings do not ask for more."""


_NOT_FOR_WORKERS: Final = (wire.Answer, wire.Error, wire.Invalid)


class Pulse:
    """What all sessions of one connection know of their broker."""

    def __init__(self, heartbeat: float, liveness: int) -> None:
        self.patience = heartbeat * liveness
        """Seconds for which the broker may be silent."""
        self.beat_interval = heartbeat
        """Seconds between heartbeats: the worker's own interval, or the broker's if that is shorter."""
        self.backoff = BACKOFF[0]
        """Seconds before the next reconnection, or somewhat less."""
        self.retry_at = 0.0
        """When the last of those that had to wait is to connect, or was."""


class WorkerSession:
    """The dialog of one worker with its broker, over a connection of its own, or in X1 over one of its connection's
    slots: `sibling` makes the session of another.

    `heartbeat` is the interval in seconds, `liveness` the number of silent ones after which the broker is taken for
    dead. The broker's interval may differ: the worker observes it, beats at least as often, and waits for as many of
    the broker's intervals; while it has not heard any it becomes more patient with each reconnection.
    """

    def __init__(
        self,
        service: str | bytes,
        *,
        protocol: str = "X1",
        heartbeat: float = 1.0,
        liveness: int = 5,
        rng: random.Random | None = None,
    ) -> None:
        if protocol not in HEADERS:
            raise SettingError(f"protocol is {protocol!r}: it is one of {', '.join(HEADERS)}")
        if not SHORTEST_HEARTBEAT <= heartbeat < LARGEST:
            raise SettingError(f"heartbeat is {heartbeat!r}: it takes {SHORTEST_HEARTBEAT} seconds or more")
        if liveness < 1:
            raise SettingError(f"liveness is {liveness!r}: it takes a number of intervals, 1 or more")
        self.service = wire.service_name(service)
        if self.service.startswith(wire.MMI):
            raise SettingError(f"{service!r} is reserved: services whose names begin with mmi. are the broker's own")
        self.request: Request | None = None
        self.lost: str | None = "not connected yet"
        """Why there is no connection; None while there is one."""
        self.retry_at = 0.0
        """When to connect next, while `lost`."""
        self.route, self._header = HEADERS[protocol]
        """The envelope of all messages."""
        self._name = self.service.decode()
        self._protocol = protocol
        self._heartbeat = heartbeat
        self._liveness = liveness
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not cryptography
        self._pulse = Pulse(heartbeat, liveness)
        self._gaps: deque[float] = deque(maxlen=3)
        self.heard = False
        """Whether the broker has said anything on this connection."""
        self._last_seen = 0.0
        self._last_sent = 0.0
        self._collected: list[bytes] = []

    def sibling(self) -> "WorkerSession":
        """The session of another slot of the same connection (X1)."""
        other = WorkerSession(
            self.service, protocol=self._protocol, heartbeat=self._heartbeat, liveness=self._liveness, rng=self._rng
        )
        other._pulse = self._pulse
        return other

    @property
    def patience(self) -> float:
        """Seconds for which the broker may be silent."""
        return self._pulse.patience

    @property
    def beat_interval(self) -> float:
        """Seconds between this worker's heartbeats: its own interval, or the broker's if that is shorter."""
        return self._pulse.beat_interval

    @property
    def alive(self) -> bool:
        """Whether it is connected, as far as it knows."""
        return self.lost is None

    def connected(self, now: float, slot: bytes | None = None) -> list[Message]:
        """There is a new socket, or on one that there is a `slot` that has not been there before (X1): READY (C7)."""
        self.route = HEADERS[self._protocol][0] if slot is None else (slot, wire.EMPTY)
        self.lost = None
        self.request = None
        self.heard = False
        self._gaps.clear()  # they may be another broker's, or tell of the trouble that ended the last connection
        self._last_seen = self._last_sent = now
        return [wire.ready(self.route, self._header, self.service)]

    def receive(self, message: Message, now: float) -> Request | None:
        """The request that `message` brings, or None.  `lost` is to be looked at afterwards."""
        return self.take(wire.decode_broker(message), now)

    def take(self, command: wire.FromBroker | wire.Invalid, now: float) -> Request | None:
        """The same for what has been decoded already."""
        if self.lost is not None:
            return None
        if isinstance(command, wire.Work) and command.header == self._header:  # first: it comes most often
            self.heard = True
            self._pulse.backoff = BACKOFF[0]
            self._last_seen = now
            return self._given(command, now)
        if isinstance(command, _NOT_FOR_WORKERS) or command.header != self._header:
            return None
        if isinstance(command, wire.Disconnect):
            # C9.  A broker that knew this worker has perhaps been restarted: no reason to wait.
            self.lose("the broker sent DISCONNECT", now, wait=not self.heard)
            return None
        if isinstance(command, wire.Heartbeat):
            self._observe(now - self._last_seen)
        self.heard = True
        self._pulse.backoff = BACKOFF[0]
        self._last_seen = now
        if isinstance(command, wire.Withdraw) and self.request is not None and self.request.client == command.client:
            self.request.cancelled = True
        return None

    def _given(self, command: wire.Work, now: float) -> Request | None:
        if self.request is not None:
            self.lose("the broker sent a second request during the first", now)
            return None
        self._collected = []
        self.request = Request(
            command.body,
            service=self._name,
            client=command.client,
            options=command.options,
            deadline=None if command.options.ttl is None else now + command.options.ttl,
        )
        return self.request

    def _observe(self, gap: float) -> None:
        """Learn the broker's interval from the time before its HEARTBEAT."""
        pulse = self._pulse
        if gap < SHORTEST_HEARTBEAT or gap > pulse.patience:
            return  # several read at once, or this process was held up: it tells nothing
        if self.heard:
            self._gaps.append(gap)
            learned = min(self._liveness * max(self._gaps), LONGEST_PATIENCE)
            pulse.patience = max(self._liveness * self._heartbeat, learned)
        # The first gap includes the time to connect: enough to beat by, not to be patient by.
        slowest = max(self._gaps, default=gap)
        pulse.beat_interval = max(min(self._heartbeat, slowest), SHORTEST_HEARTBEAT)

    def partial(self, request: Request, body: Sequence[bytes], now: float) -> list[Message]:
        """PARTIAL for `request` (C8); nothing if its connection is lost, and with it the request."""
        if request is not self.request:
            return []
        if self._header == wire.W01:
            self._collected += body  # 0.1 has no PARTIAL: all goes into the one REPLY (C24)
            return []
        self._last_sent = now
        return [wire.reply(self.route, self._header, wire.PARTIAL, request.client, body)]

    def final(self, request: Request, body: Sequence[bytes], now: float) -> list[Message]:
        """FINAL for `request` (C8); nothing if its connection is lost, and with it the request."""
        if request is not self.request:
            return []
        self.request = None
        self._last_sent = now
        return [wire.reply(self.route, self._header, wire.FINAL, request.client, [*self._collected, *body])]

    def error(self, request: Request, code: Any, text: str, now: float, detail: Sequence[bytes] = ()) -> list[Message]:
        """ERROR for `request`; before X1, the FINAL that stands for it.  Nothing if its connection is lost."""
        if code not in range(1000):  # three digits are all that can be told
            code, text = Code.FAILED.value, f"{text} (code {code!r})"
        if self._header != wire.WX1:
            if request is self.request:
                self._collected = []  # with them in front, a 0.1 worker's REPLY would not be known for a failure
            return self.final(request, wire.error_body(code, text), now)
        if request is not self.request:
            return []
        self.request = None
        self._last_sent = now
        return [wire.failure(self.route, request.client, code, text, detail)]

    def tick(self, now: float) -> list[Message]:
        """HEARTBEAT when one is due; `lost` when the broker has been silent for too long (C13)."""
        if self.lost is not None:
            return []
        pulse = self._pulse
        if now >= self._last_seen + pulse.patience:
            reason = f"the broker has been silent for {pulse.patience:g} s"
            pulse.patience = max(pulse.patience, min(2 * pulse.patience, LONGEST_PATIENCE))
            self.lose(reason, now)
            return []
        if now >= self._last_sent + pulse.beat_interval:
            self._last_sent = now
            return [wire.heartbeat(self.route, self._header)]
        return []

    def deadline(self) -> float:
        """When `tick`, or while `lost` a new connection, is due."""
        if self.lost is not None:
            return self.retry_at
        pulse = self._pulse
        return min(self._last_seen + pulse.patience, self._last_sent + pulse.beat_interval)

    def disconnect(self, reason: str, now: float) -> list[Message]:
        """DISCONNECT (C10): the broker gives the request, if there is one, to another worker."""
        if self.lost is not None:
            return []
        self.lose(reason, now)
        return [wire.disconnect(self.route, self._header)]

    def lose(self, reason: str, now: float, *, wait: bool = True) -> None:
        """The connection is of no use any more: connect again, if `wait` after a backoff."""
        self.retry_at = now
        pulse = self._pulse
        if wait and now >= pulse.retry_at:  # else a sibling waits already: they come back together
            pulse.retry_at = now + pulse.backoff * self._rng.uniform(0.5, 1.0)
            pulse.backoff = min(2 * pulse.backoff, BACKOFF[1])
        if wait:
            self.retry_at = pulse.retry_at
        self._end(reason)

    def lose_with(self, sibling: "WorkerSession") -> None:
        """The connection is of no use any more, as `sibling`, another of its sessions, has found."""
        self.retry_at = sibling.retry_at
        self._end(str(sibling.lost))

    def _end(self, reason: str) -> None:
        self.lost = reason
        if self.request is not None:
            self.request.cancelled = True
        self.request = None
