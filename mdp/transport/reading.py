"""Pausing to read from a connection without missing its end."""

import asyncio
import select
from typing import Final

GONE: Final[int] = getattr(select, "POLLRDHUP", select.POLLHUP)
"""What `poll` says when the peer has closed its side; on macOS, which has no POLLRDHUP, it says POLLHUP then."""

LOOK_SECONDS: Final = 1.0
"""How often a connection that is not being read is checked for its end."""


class Reading:
    """Reads from a connection or not.

    While a transport reads nothing, it does not notice that its peer is gone.  So meanwhile this looks, and aborts the
    connection then.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.paused = False
        self._transport = transport
        self._looking: asyncio.TimerHandle | None = None

    def pause(self) -> None:
        """Read nothing for now."""
        if not self.paused and not self._transport.is_closing():
            self.paused = True
            self._transport.pause_reading()
            self._look_later()

    def resume(self) -> None:
        """Read again."""
        if self.paused:
            self.stop()
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def stop(self) -> None:
        """Look no longer: the connection is closed."""
        self.paused = False
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _look_later(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._looking = None
        if self._transport.is_closing():
            return
        if peer_is_gone(self._transport):
            self._transport.abort()
        else:
            self._look_later()


def peer_is_gone(transport: asyncio.BaseTransport) -> bool:
    """Return whether the peer has closed its side, even if what it sent before has not been read."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket"), GONE)
    return bool(poll.poll(0))
