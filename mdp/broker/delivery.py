"""Delivers what the machine says, and finds out which peers do not read it, and which are gone."""

import logging
from errno import EAGAIN
from typing import Final

from ..limits import Limits
from ..transport.multipart import send
from ..wire import Message, Route
from .outbox import Outbox
from .ports import PREFIX_BYTES
from .sockets import Sockets

OUTBOX_RETRY: Final = 0.01
"""Seconds until the next attempt to send to slow peers, and to find out which are slow."""

log = logging.getLogger("zmdp.broker")


class Delivery:
    """What is on its way to the peers of a broker, and which of them are gone.

    A peer that is gone is reported only after everything that it sent before has been taken in.
    """

    def __init__(self, sockets: Sockets, limits: Limits) -> None:
        self.outbox = Outbox(limits, sockets.ports)
        sockets.main.unsent = self.outbox.unsent
        self._sockets = sockets
        self._retry_at = 0.0
        self._congested: set[bytes] = set()
        self.newly_congested: set[bytes] = set()
        """The peers for which messages pile up since the last `retry`."""
        self.relieved: set[bytes] = set()
        """The peers for which messages no longer pile up, since the last `retry`."""
        self.gone: dict[bytes, tuple[int, int]] = {}
        """Peers that are no longer connected, the first turn whose messages they did not receive, and in which round
        that was found out."""
        self._round = 0

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, messages: list[Message], turn: int) -> list[bytes]:
        """Send the messages of `turn` without blocking.

        Return the peers that do not read theirs: they are dropped, and their connections end.
        """
        main = self._sockets.main
        socket, chosen, put = main.socket, main.connections.chosen, send
        outbox, unsent, ports = self.outbox, self.outbox.unsent, self._sockets.ports
        dropped: list[bytes] = []
        firsts: dict[bytes, Message] = {}
        """The first message for each peer, once that is needed."""
        for message in messages:
            if dropped and message[0] in dropped:
                continue  # nothing follows a lost message, so that no stream has a gap
            if outbox and message[0] in outbox:
                errno = EAGAIN
            elif (chosen and message[0] in chosen) or (ports and message[0][:PREFIX_BYTES] in ports):
                errno = self._put(message)
            else:
                errno = put(socket, message, unsent)
            if not errno:
                continue
            if errno != EAGAIN:
                if not firsts:
                    firsts = {each[0]: each for each in reversed(messages)}
                # It may have died of an earlier message of this turn, so what it was sent counts as received (C17).
                self.note_gone(message[0], turn + (firsts[message[0]] is not message))
            elif not outbox.add(message, turn):
                outbox.forget(message[0])
                dropped.append(message[0])
        while (slowest := outbox.overfull()) is not None:
            outbox.forget(slowest)
            dropped.append(slowest)
        for identity in dropped:
            log.warning("dropped a peer that does not read its messages")
            # Only with the connection does libzmq discard what it holds.
            self._sockets.at(identity).end(identity)
        return dropped

    def _put(self, message: Message) -> int:
        return self._sockets.at(message[0]).send(message)

    def retry(self, now: float) -> bool:
        """Send what slow peers accept now, and find out for whom messages pile up, if it is time.

        Return whether it was.
        """
        if now < self._retry_at or not (self._congested or self.outbox.piles_up):
            return False
        self._retry_at = now + OUTBOX_RETRY
        for identity, turn in self.outbox.flush(self._put):
            self.note_gone(identity, turn)
        congested = self.outbox.congested()
        self.newly_congested = congested - self._congested
        self.relieved = self._congested - congested
        self._congested = congested
        return True

    def deadline(self) -> float | None:
        """Return when `retry` is due, or None."""
        return self._retry_at if self._congested or self.outbox.piles_up else None

    def discard(self, route: Route, turn: int) -> None:
        """Discard what waits for the worker with that route, unless it was sent in `turn` or later."""
        if self.outbox and route[0] in self.outbox:
            self.outbox.discard_before(route, turn)

    # ── peers that are gone ──────────────────────────────────────────────────────────────────────────────────────────

    def note_gone(self, identity: bytes, turn: int) -> None:
        """Remember that a peer was not connected to receive a message of `turn`."""
        first, found = self.gone.get(identity, (turn, self._round))
        self.gone[identity] = min(first, turn), found

    def take_lost(self, *, drained: bool, rounds: int) -> list[tuple[bytes, int]]:
        """Return the peers that are gone and heard out, each with the first turn whose messages it did not receive.

        Everything that they sent before has been taken in if the sockets are `drained`, or after so many `rounds`, each
        a call of this method, if messages of others keep coming.
        """
        self._round += 1
        lost = [
            (identity, turn)
            for identity, (turn, found) in self.gone.items()
            if drained or self._round - found >= rounds
        ]
        for identity, _ in lost:
            del self.gone[identity]
            self._sockets.at(identity).forget(identity)
            self.outbox.forget(identity)
        return lost

    def forget(self, identity: bytes, turn: int) -> int:
        """Forget a peer whose routing id is another's now; return the first turn whose messages it did not receive.

        Unless it was known to be gone, that is the present `turn`.
        """
        first, _ = self.gone.pop(identity, (turn, 0))
        self.outbox.forget(identity)
        return first
