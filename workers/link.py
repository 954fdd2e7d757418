"""The connection of an asyncio worker, and the slots that share it.

In X1 each slot is a worker of its own to the broker, told apart by its envelope: all of them have one socket, and what
is sent and what arrives goes through it in batches.  Before X1 a link has one slot.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Final, Protocol

import zmq

from ..mdp import wire
from ..mdp.errors import SettingError
from ..mdp.multipart import receive, send
from ..mdp.sockets import dealer
from ..mdp.wire import Message, Route
from .connection import LINGER
from .request import Request
from .session import WorkerSession

RETRY: Final = 0.01
"""Seconds until a message that the broker does not take yet is tried again."""
FAREWELL = 2.0
"""Seconds that a broker has to say that it has read what was said last."""
GRAIN: Final = 20
"""So many times in an interval what is due is looked for, at most: heartbeats may be late by so much of it."""

log = logging.getLogger("zmdp.worker")


class Slot(Protocol):
    """Who takes one request at a time over a link."""

    session: WorkerSession
    freed: int
    """The turn in which it got free, counted on its link: the broker gives work to the one that is free longest."""

    @property
    def busy(self) -> bool:
        """Whether its handler is at work, be it for a request that is lost."""

    def begin(self, request: Request) -> None:
        """Work on `request`."""

    def cancel(self) -> None:
        """Nobody waits any more for what it works on."""

    def stop(self) -> None:
        """Take no more requests, and end when nothing is left to do and to send."""

    def settle(self) -> None:
        """All has been sent: end, if that was waited for."""

    def look(self) -> None:
        """Now and then: see whether the handler is at work still."""


class Link:
    """A socket, made anew when it is lost, the timer of its sessions, and what is to be sent.

    `shared` tells whether it may have more than one slot.  `severity` tells at which level a loss is logged, given the
    time.
    """

    def __init__(
        self,
        service: str,
        endpoint: str,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        shared: bool,
        severity: Callable[[float], int],
    ) -> None:
        self.stalled = False
        """The broker does not take what is sent."""
        self.working = 0
        """Slots whose handlers are at work."""
        self.ending = False
        """Slots wait for the last messages to be sent, and then end."""
        self.gone = asyncio.Event()
        """The last slot has left, and the connection is closed."""
        self._farewell: asyncio.TimerHandle | None = None
        """Until then the broker has time to take in what was said last."""
        self._turns = 0
        self._service = service
        self._endpoint = endpoint
        self._context = context
        self._shared = shared
        self._severity = severity
        self.context = copy_context()
        """In which all runs that is no handler's."""
        self._loop = asyncio.get_running_loop()
        self._slots: dict[Slot, None] = {}
        self._registered: dict[Route, Slot] = {}
        """Those that have said READY, by their envelopes."""
        self._only: Slot | None = None
        """The one slot of a link that is not shared: whatever comes is for it."""
        self._joined = 0
        """Slots there have been on this connection: a number is not used again on it."""
        self._heard = False
        """The broker has said something to a slot that has left."""
        self._socket: zmq.Socket[bytes] | None = None
        self._fd = -1
        self._retry_at = 0.0
        """When to connect again, while there is no socket."""
        self._unsent: list[Message] = []
        self._stalled_since = 0.0
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = 0.0

    # ── slots ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, slot: Slot) -> None:
        """Register a new slot; the first one opens the connection, and that may raise."""
        first = not self._slots
        self._slots[slot] = None
        if first:
            self._open()
        elif self._socket is not None:
            self._join(slot, time.monotonic())
            self._schedule()
        self._wake_by(slot.session.deadline())

    def leave(self, slot: Slot, reason: str) -> None:
        """DISCONNECT of `slot`, if it is registered: what it has the broker gives to another worker."""
        messages = slot.session.disconnect(reason, time.monotonic())
        if messages:
            self._unsent += messages
            self._part(slot, LINGER)

    def remove(self, slot: Slot) -> None:
        """`slot`, whose handler is not at work, is not to be registered any more."""
        del self._slots[slot]
        if self._slots:
            self.leave(slot, "closed")
            return
        self._sleep_on()
        self._heard = self._heard or slot.session.heard
        if self._socket is not None and self._joined > 1 and slot.session.lost is None and self._heard:
            self._take_leave(slot)
        else:
            self.leave(slot, "closed")
            self._sleep_on()
            self._close(0)
            self.gone.set()

    def may_leave(self, slot: Slot) -> bool:
        """Whether all that `slot` has said will be sent, though it leaves now: others, or the broker, saw to that."""
        return not self._unsent or len(self._slots) > 1 or slot.session.lost is not None

    def _take_leave(self, slot: Slot) -> None:
        """DISCONNECT of the last slot.  The connection stays until the broker has taken in what all of them have said.

        It would find the connection closed when it has another request for the first of them, and would take the
        replies of the others, which it has not read yet, for lost.  So it is asked for a sign of life, as clients do,
        which it gives when it has read all that came before.
        """
        self._unsent += slot.session.disconnect("closed", time.monotonic())
        self._unsent.append(wire.heartbeat((wire.EMPTY,), wire.CX1))
        self._registered.clear()
        self._farewell = self._loop.call_later(FAREWELL, self._part_for_good)
        self._turn()

    def _part_for_good(self) -> None:
        if self._farewell is not None:
            self._farewell.cancel()
            self._farewell = None
        self._close(LINGER)
        self.gone.set()

    def freed(self, slot: Slot) -> None:
        """The handler of `slot` is not at work any more."""
        self.working -= 1
        self._turns += 1
        slot.freed = self._turns
        if slot.session.lost is not None:
            self._wake_by(slot.session.retry_at if self._socket is not None else self._retry_at)

    def _join(self, slot: Slot, now: float) -> None:
        """READY of `slot`; the first one on a connection has no envelope."""
        self._unsent += slot.session.connected(now, b"%d" % self._joined if self._joined else None)
        self._joined += 1
        self._registered[slot.session.route] = slot
        if not self._shared:
            self._only = slot

    def _part(self, slot: Slot, linger: int) -> None:
        """`slot` is not registered any more.  Without any there is no connection."""
        session = slot.session
        self._heard = self._heard or session.heard
        del self._registered[session.route]
        if self._registered:
            self._schedule()
        else:
            self._close(linger)
            self._retry_at = session.retry_at
        if not slot.busy:
            self._wake_by(session.retry_at)

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    def _open(self) -> None:
        self._socket = socket = dealer(self._context, self._endpoint, {zmq.LINGER: LINGER})
        self._fd = int(socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._turn)
        self._joined, self._heard = 0, False
        now = time.monotonic()
        for slot in self._slots:
            if not slot.busy:
                self._join(slot, now)
        self._turn()

    def _close(self, linger: int) -> None:
        """Close the socket; what is still to be sent has `linger` milliseconds to get out."""
        socket, self._socket = self._socket, None
        if socket is None:
            return
        # A broker that was never there will not take anything now.
        heard = self._heard or any(slot.session.heard for slot in self._registered.values())
        if linger:
            with suppress(zmq.ContextTerminated):
                self._send_to(socket)
        self._unsent.clear()
        self._registered.clear()
        self._only = None
        self.stalled = False
        self._loop.remove_reader(self._fd)
        socket.close(linger if heard else 0)

    def _lose(self, cause: WorkerSession, now: float) -> None:
        """The connection is of no use, as one of its sessions has found: it is lost for all of them."""
        self._close(0)
        self._retry_at = cause.retry_at
        for slot in self._slots:
            if slot.session is not cause:
                slot.session.lose_with(cause)
            slot.cancel()
        self._tell(cause, now)
        self._wake_by(self._retry_at)

    def _tell(self, session: WorkerSession, now: float) -> None:
        log.log(
            self._severity(now), "%s: %s; connecting to %s again in %.1f s",
            self._service, session.lost, self._endpoint, max(0.0, session.retry_at - now),
        )  # fmt: skip

    def _terminated(self) -> None:
        log.warning("%s: the ZeroMQ context was terminated", self._service)
        self._close(0)
        if self._farewell is not None:
            self._part_for_good()
        for slot in list(self._slots):
            slot.session.lose("the ZeroMQ context was terminated", time.monotonic())
            slot.cancel()
            slot.stop()

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, messages: list[Message]) -> None:
        """Send: at once, or while other handlers are at work together with what they have to send by then."""
        if self._socket is None:
            return
        self._unsent += messages
        if self.working:
            self._schedule()
        else:
            self._turn()

    def _schedule(self) -> None:
        if self._soon is None:
            self._soon = self._loop.call_soon(self._turn, context=self.context)

    def _turn(self) -> None:
        """Send, then take in what has arrived: of what arrives while something is sent the descriptor does not tell."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        socket = self._socket
        if socket is None:
            return
        try:
            if self._unsent and not self._send_to(socket):
                self._stall()
            if self._socket is not None:
                self._take_in(socket)
        except zmq.ContextTerminated:
            self._terminated()
        self._settle()

    def _settle(self) -> None:
        if self.ending and not self._unsent:
            self.ending = False
            for slot in list(self._slots):
                slot.settle()

    def _send_to(self, socket: zmq.Socket[bytes]) -> bool:
        """Whether the broker has taken all."""
        unsent, sent = self._unsent, 0
        while sent < len(unsent) and not send(socket, unsent[sent]):
            sent += 1
        del unsent[:sent]
        if sent:
            self.stalled = False
        return not unsent

    def _stall(self) -> None:
        """The broker does not take all; `_tick` tries again."""
        now = time.monotonic()
        if not self.stalled:
            self.stalled, self._stalled_since = True, now
        if self._farewell is not None:  # which has an end of its own
            self._wake_by(now + RETRY)
            return
        session = next(iter(self._registered.values())).session
        if now - self._stalled_since > session.patience:
            session.lose("the broker takes nothing", now)
            self._lose(session, now)
        else:
            self._wake_by(now + RETRY)

    def _take_in(self, socket: zmq.Socket[bytes]) -> None:
        registered, only = self._registered, self._only
        now = time.monotonic()
        while (message := receive(socket)) is not None:
            command = wire.decode_broker(message)
            if self._farewell is not None:
                if isinstance(command, wire.Heartbeat) and command.header == wire.CX1:
                    self._part_for_good()
                    return
                continue
            slot = only or registered.get(command.route)
            if slot is None:
                continue  # it has left
            session = slot.session
            request = session.take(command, now)
            if request is not None:
                slot.begin(request)
            elif session.lost is not None:
                self._dismissed(slot, now)
                if self._socket is None:
                    return
            elif session.request is not None and session.request.cancelled:
                slot.cancel()

    def _dismissed(self, slot: Slot, now: float) -> None:
        """The broker does not want to hear of `slot` any more."""
        if slot.session.heard:
            self._lose(slot.session, now)  # it has perhaps been restarted: it knows none of them (C9)
        else:
            self._tell(slot.session, now)  # it takes no more workers
            self._part(slot, 0)

    # ── the time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def wake(self) -> None:
        """Look what is to be done."""
        self._wake_by(time.monotonic())

    def _wake_by(self, due: float) -> None:
        """Look at `due`, at the latest, for what is to be done."""
        if self._timer is not None:
            if self._wakes_at <= due:
                return
            self._timer.cancel()
        self._wakes_at = due
        seconds = max(0.0, due - time.monotonic())
        self._timer = self._loop.call_later(seconds, self._tick, context=self.context)

    def _sleep_on(self) -> None:
        """There is nothing to look for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        for slot in list(self._slots):
            slot.look()
        self._turn()  # first what has come, then the time
        now = time.monotonic()
        if self._socket is not None:
            self._beat(now)
        elif now >= self._retry_at and not all(slot.busy for slot in self._slots):
            self._reopen(now)
        if self._slots:
            self._wake_by(self._due(now))

    def _beat(self, now: float) -> None:
        """Heartbeats, and slots that were dismissed register again."""
        for slot in self._slots:
            session = slot.session
            if session.lost is None:
                self._unsent += session.tick(now)
                if not session.alive:
                    self._lose(session, now)
                    self._settle()
                    return
            elif now >= session.retry_at and not slot.busy:
                self._join(slot, now)
        self._turn()

    def _reopen(self, now: float) -> None:
        try:
            self._open()
        except zmq.ContextTerminated:
            self._terminated()
        except (zmq.ZMQError, SettingError) as error:  # no file descriptor left, for example
            session = next(iter(self._slots)).session
            session.lose(str(error), now)
            self._lose(session, now)

    def _due(self, now: float) -> float:
        """When `_tick` next has something to do.  It looks for it in turns, as each slot has its own time."""
        if self.stalled:
            return now + RETRY
        interval = next(iter(self._slots)).session.beat_interval
        if self._socket is None:
            # A slot whose handler is at work will say when it has ended.
            return self._retry_at if not all(slot.busy for slot in self._slots) else now + interval
        due = min((s.session.deadline() for s in self._slots if s.session.lost is None or not s.busy), default=now)
        return max(due, now + interval / GRAIN)
