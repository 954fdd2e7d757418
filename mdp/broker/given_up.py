"""X1 clients that missed messages, and are not answered until they have reconnected."""

from typing import Final

from .records import PeerKey

GIVEN_UP: Final = 60.0
"""A client that was given up is not answered until it has been silent for this many seconds."""
MAX_GIVEN_UP: Final = 5000
"""Maximum number of such clients that are remembered."""


class GivenUp:
    """Peers that did not keep up and so missed messages.

    Since it is not answered, an X1 client considers the broker dead, reconnects, and resends what is outstanding.
    A proxy stands for all peers behind it.
    """

    def __init__(self) -> None:
        self._until: dict[PeerKey, float] = {}
        """Until when each client that was given up is not answered; the latest last."""

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: PeerKey, now: float) -> None:
        """Give up a peer."""
        self._until.pop(key, None)  # the one that is forgotten first is the one that has been silent for longest
        self._until[key] = now + GIVEN_UP
        if len(self._until) > MAX_GIVEN_UP:
            del self._until[next(iter(self._until))]

    def forget(self, identity: bytes) -> None:
        """Answer the peer with that routing id again: it is another connection."""
        self._until.pop(identity, None)

    def includes(self, key: PeerKey, now: float) -> bool:
        """Return whether a peer that has just sent a message is not answered."""
        proxy = key if isinstance(key, bytes) else key[0]
        until = max(self._until.get(key, 0.0), self._until.get(proxy, 0.0))
        if now >= until:
            self._until.pop(key, None)
            self._until.pop(proxy, None)
            return False
        # This message stays unanswered too, which extends the time.  A peer behind a proxy reconnects to the proxy, so
        # it is given up by itself; otherwise its peers would keep the whole proxy given up.
        self.add(key, now)
        return True
