"""Delivers the machine's messages, and finds out which peers do not read them, and which are gone."""

import logging
import math
from errno import EAGAIN
from typing import Final

from ...timers import Alarms
from ...wire import Message, Route
from ..machine import Broker
from .outbox import Outbox
from .ports import Sockets

OUTBOX_RETRY: Final = 0.01
"""Seconds until the next attempt to send to slow peers, and to find out which are slow."""

log = logging.getLogger("zmdp.broker")


class Delivery:
    """The messages on their way to the peers of a broker, and the peers that are gone.

    A peer that is gone is reported only after everything that it sent before has been taken in.
    """

    def __init__(self, broker: Broker, sockets: Sockets, alarms: Alarms) -> None:
        self.outbox = Outbox(broker.limits, sockets.ports)
        self._broker = broker
        self._sockets = sockets
        self._retrying = alarms.add(self.retry)
        """Set while messages pile up."""
        self._congested: set[bytes] = set()
        self.gone: dict[bytes, tuple[int, int]] = {}
        """Peers that are no longer connected, the first turn whose messages they did not receive, and in which round
        that was found out."""
        self._round = 0

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, messages: list[Message], turn: int, now: float) -> bool:
        """Send the messages of `turn` without blocking.

        Peers that do not read theirs are dropped, and their connections end.  Return whether the machine was told so.
        """
        outbox, sockets = self.outbox, self._sockets
        dropped: list[bytes] = []
        firsts: dict[bytes, Message] = {}
        """The first message for each peer, once that is needed."""
        for message in messages:
            if dropped and message[0] in dropped:
                continue  # nothing follows a lost message, so that no stream has a gap
            errno = EAGAIN if outbox and message[0] in outbox else sockets.at(message[0]).send(message)
            if not errno:
                continue
            if errno != EAGAIN:
                if not firsts:
                    firsts = {each[0]: each for each in reversed(messages)}
                # It may have died of an earlier message of this turn, so that counts as received (C17).
                self.note_gone(message[0], turn + (firsts[message[0]] is not message))
            elif not outbox.add(message, turn):
                outbox.forget(message[0])
                dropped.append(message[0])
        if outbox.piles_up:
            while (slowest := outbox.overfull()) is not None:
                outbox.forget(slowest)
                dropped.append(slowest)
            self._retrying.set(min(self._retrying.due, now))
        for identity in dropped:
            log.warning("dropped a peer that does not read its messages")
            # Only with the connection does libzmq discard the messages that it holds.
            sockets.at(identity).end(identity)
            self._broker.give_up(identity, now)
        return bool(dropped)

    def _put(self, message: Message) -> int:
        return self._sockets.at(message[0]).send(message)

    def retry(self, now: float) -> None:
        """Send the messages that slow peers accept now, and tell the machine for which of them messages pile up."""
        for identity, turn in self.outbox.flush(self._put):
            self.note_gone(identity, turn)
        congested = self.outbox.congested()
        for identity in congested - self._congested:
            self._broker.congested(identity)
        for identity in self._congested - congested:
            self._broker.relieved(identity, now)
        self._congested = congested
        self._retrying.set(now + OUTBOX_RETRY if congested or self.outbox.piles_up else math.inf)

    def discard(self, route: Route, turn: int) -> None:
        """Discard the messages that wait for the worker with that route, unless they were sent in `turn` or later."""
        if self.outbox and route[0] in self.outbox:
            self.outbox.discard_before(route, turn)

    # ── peers that are gone ──────────────────────────────────────────────────────────────────────────────────────────

    def note_gone(self, identity: bytes, turn: int) -> None:
        """Remember that a peer was not connected to receive a message of `turn`."""
        first, found = self.gone.get(identity, (turn, self._round))
        self.gone[identity] = min(first, turn), found

    def report_gone(self, now: float, *, drained: bool, rounds: int) -> bool:
        """Tell the machine which peers are gone and heard out.  Return whether there were any.

        Everything that they sent before has been taken in if the sockets are `drained`, or after so many `rounds`, each
        a call of this method, if messages of others keep coming.
        """
        self._round += 1
        lost = [
            (identity, turn)
            for identity, (turn, found) in self.gone.items()
            if drained or self._round - found >= rounds
        ]
        for identity, turn in lost:
            del self.gone[identity]
            self._sockets.at(identity).forget(identity)
            self.outbox.forget(identity)
            self._broker.disconnected(identity, turn, now)
        return bool(lost)

    def replaced(self, identity: bytes, now: float) -> None:
        """Tell the machine that a peer is gone, since its routing id is another's now.

        Unless it was known to be gone, it has received everything until this turn.
        """
        turn, _ = self.gone.pop(identity, (self._broker.turn, 0))
        self.outbox.forget(identity)
        self._broker.replaced(identity, turn, now)
