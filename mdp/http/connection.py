"""One connection: an `asyncio.Protocol` that passes everything on to uvicorn's, and ends what takes too much.

It decides what must be decided before there is a request: idle connections, slow and endless headers, and how many
connections there may be.  What concerns a request is decided by the ASGI middleware in `guard.py`, which tells the
connection how far its request has come.
"""

import asyncio
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, Protocol

from ..transport.reading import peer_is_gone
from .checks import certificate_names, too_many_headers
from .connections import GRACE_SECONDS, Connections, Phase
from .frames import FrameCounter
from .problems import Problem

CONNECTION: Final = "zmdp.connection"
"""The key in a scope's state of the `Connection` over which a request came."""

MAX_PIPELINED: Final = 100
"""Requests that a client may send before the first of them is answered."""
MAX_FRAMING: Final = 512 << 10
"""How much of a request may be framing, in addition to as much as its body."""
LINGER_SECONDS: Final = 2.0
"""How long to wait, after a request was answered before all of it had arrived, until the connection is closed: to close
it while the client still sends would discard the answer."""
_FIRST_BYTES: Final = 1024
"""How much of a request is kept until the application gets it."""
_SLACK_BYTES: Final = 64 << 10
"""How much may arrive of a body before the application gets the request; how much may be answered to PINGs."""
_TOO_MANY_FRAMES: Final = 1008
_SILENT: Final = 1011
_TRY_AGAIN_LATER: Final = 1013
"""Codes with which a WebSocket is closed (RFC 6455, 7.4)."""
_OFFER: Final = re.compile(rb"\r\nupgrade:(?=[ \t]*h2c[ \t]*(?:\r\n|$))", re.IGNORECASE)


class Upload(Protocol):
    """What awaits the rest of a body."""

    def check(self, now: float) -> None:
        """Refuse the request if its body is too slow."""

    def refuse(self, problem: Problem) -> None:
        """Answer the request with a problem."""


class Connection(asyncio.Protocol):
    """One connection of a client.

    Args:
        connections: All connections of the server.
        name: What a refusal calls the server.
    """

    def __init__(self, connections: "Connections[Connection]", name: str) -> None:
        self.inner: Any = asyncio.Protocol()
        """uvicorn's protocol; a WebSocket gets another one."""
        self.transport: Any = None
        self.address = ""
        self.phase = Phase.WAITING
        self.unfinished = 0
        self.opened = self.heard = asyncio.get_running_loop().time()
        """When it was opened; when something arrived last."""
        self.certificate: tuple[str, ...] = ()
        """The names in the client's certificate, which was checked."""
        self.first_bytes = b""
        """The beginning of the request that is arriving, unless it came together with an earlier one."""
        self.frames: FrameCounter | None = None
        """Of a WebSocket."""
        self.role = ""
        """The role of a WebSocket's client; empty if everybody may do everything."""
        self.outstanding = 0
        """Requests that have not been answered."""
        self.disconnected = False
        self.on_disconnect: Callable[[], None] | None = None
        """Called once when the connection ends before the response is complete."""
        self.upload: Upload | None = None
        """What awaits the rest of the body that is arriving."""
        self.cycle: Any = None
        """What uvicorn knows of the latest request that the application has got."""
        self._connections = connections
        self._limits = connections.limits
        self._name = name
        self._doing = Phase.WAITING
        """Its phase, whether it reads or not."""
        self._since = self.opened
        """When that began."""
        self._last = 0
        """Size of what arrived last."""
        self._body = 0
        """How much of the body that is arriving the application has got."""
        self._discarding = False
        """The rest of the request that is arriving is not kept, and so does not count."""
        self._closing_since: float | None = None
        self._blocked_since: float | None = None
        """Since when the client has read nothing, while something waits to be sent."""
        self._unread = 0
        """Bytes that waited at that time, which count as memory of the owner."""

    # ── called by asyncio ────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take in a new connection, if there is room; uvicorn calls this again for a WebSocket."""
        if self.transport is None:
            self.transport = transport
            self.address = str((transport.get_extra_info("peername") or [""])[0])
            self.certificate = certificate_names(transport.get_extra_info("peercert"))
            if not self._connections.enter(self):
                self.inner = asyncio.Protocol()
                self.refuse(Problem("overloaded", f"{self._name} has too many connections, all of them busy"))
        self.inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Pass on what has arrived, unless it is too much."""
        self.heard = asyncio.get_running_loop().time()
        if self.transport.is_closing():
            return
        if self._doing is Phase.REFUSED:
            self._last += len(data)
            if self._last > MAX_FRAMING:
                self.abort()
            return
        if self._doing is Phase.IDLE:
            self._do(Phase.WAITING)
        if self._doing is Phase.WAITING and len(self.first_bytes) < _FIRST_BYTES:
            self.first_bytes += data[:_FIRST_BYTES]
        if not self._check_framing():
            return
        inner, frames = self.inner, self.frames
        if frames is not None and not frames.feed(data):
            self._close_websocket(_TOO_MANY_FRAMES)
            return
        inner.data_received(_without_h2c(data) if self.first_bytes == data[:_FIRST_BYTES] else data)
        self._last = len(data)
        if frames is not None:
            self._count_messages(frames)
        else:
            if not self._discarding:
                self._connections.hold(self, self.unfinished + len(data))
            if inner is not self.inner:  # uvicorn has called `upgrade`
                self.frames = FrameCounter()
        if len(getattr(self.inner, "pipeline", ())) > MAX_PIPELINED:
            self.abort()

    def eof_received(self) -> None:
        """Close the connection: the client sends nothing more."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell uvicorn, and whoever is working on a reply."""
        self.frames = None  # the application may still take messages, which must not be counted again
        self._connections.leave(self)
        self._block(None, 0)
        self.inner.connection_lost(exc)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # if others wait behind it, uvicorn has told the last of these
            self.cycle.message_event.set()
        self._interrupt()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered."""
        self._block(asyncio.get_running_loop().time(), self.transport.get_write_buffer_size())
        self.inner.pause_writing()
        if self._connections.owner.memory > self._limits.max_memory:
            self.abort()

    def resume_writing(self) -> None:
        """The client has read."""
        self._block(None, 0)
        self.inner.resume_writing()

    # ── told by uvicorn and by the middleware ────────────────────────────────────────────────────────────────────────

    def upgrade(self, inner: Any) -> "Connection":
        """Become a WebSocket, whose protocol is `inner` of uvicorn; it then calls `connection_made`."""
        self.inner = inner
        if self.outstanding:  # their replies would come between frames
            self.abort()
        return self

    def begin(self, header_bytes: int, *, has_body: bool) -> None:
        """The application has got a request."""
        self.first_bytes = b""
        self.outstanding = 1
        self._do(Phase.UPLOADING)
        if not has_body:
            self.complete(header_bytes)

    def make_optional(self) -> None:
        """Its request may be given up, if others need the place."""
        self._do(Phase.UPLOADING)

    def progress(self, size: int) -> None:
        """The application has got so many bytes of a body."""
        self._body = size

    def discard(self) -> None:
        """Keep nothing of the rest of its request, which is refused or has been answered."""
        self._discarding = True
        self._connections.hold(self, 0)

    def complete(self, size: int) -> None:
        """The application has got all of a request, of so many bytes."""
        self._body = 0
        # uvicorn keeps only what came together with its end.
        self._connections.hold(self, min(max(self.unfinished - size, 0), self._last))
        self._do(Phase.WORKING)

    def end(self) -> None:
        """A request has been answered."""
        self.outstanding = self._body = 0
        self._discarding = False
        self.on_disconnect = None
        self._connections.hold(self, 0)
        self._do(Phase.IDLE)

    def take_message(self) -> None:
        """The application has got a message of a WebSocket."""
        if self.frames is not None:
            self.frames.take()
            self._count_messages(self.frames)

    def set_outstanding(self, count: int) -> None:
        """Take in how many requests of a WebSocket are outstanding."""
        self.outstanding = count
        self._do(Phase.WORKING if count else Phase.OPEN)

    def _count_messages(self, frames: FrameCounter) -> None:
        self._connections.hold(self, frames.held)
        if self._doing is not Phase.WAITING and not self.outstanding:
            self._do(Phase.UPLOADING if frames.unfinished else Phase.OPEN)

    @property
    def unread(self) -> int:
        """Bytes that the client has not read."""
        return int(self.transport.get_write_buffer_size())

    def is_arriving(self) -> bool:
        """Return whether its request may be about to arrive: it began just now, or does not arrive too slowly."""
        now = asyncio.get_running_loop().time()
        elapsed = now - self._since
        if self._doing is Phase.IDLE:
            return False
        if elapsed < GRACE_SECONDS:
            return True
        return now - self.heard < GRACE_SECONDS and self.unfinished >= self._limits.min_body_rate * elapsed

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def sweep(self, now: float) -> None:
        """End what has waited for too long, or whose client is gone."""
        waited, limits = now - self._since, self._limits
        if self.transport.is_closing():
            if self._closing_since is None:
                self._closing_since = now
            elif now - self._closing_since > limits.body_timeout:  # it does not read the last bytes
                self.abort()
            return
        if not self.transport.is_reading() and peer_is_gone(self.transport):
            self.abort()
        elif self._blocked_since is not None:
            unread = self.unread
            if unread < self._unread:
                self._block(now, unread)
            elif now - self._blocked_since > limits.body_timeout:
                self.abort()
        elif self.upload is not None:
            self.upload.check(now)
        else:
            self._check_wait(now, waited)

    def _check_wait(self, now: float, waited: float) -> None:
        limits = self._limits
        if self._doing is Phase.REFUSED:
            if waited > LINGER_SECONDS:
                self.abort()
        elif self._doing is Phase.WAITING:
            if waited > limits.header_timeout:
                text = f"the headers of the request did not arrive within {limits.header_timeout:g} s"
                self.refuse(Problem("slow-request", text))
        elif self.frames is not None and self.transport.is_reading() and now - self.heard > 2 * limits.ping_interval:
            self._close_websocket(_SILENT)

    def refuse(self, problem: Problem) -> None:
        """Answer what is not a request yet, and close the connection once the client has read that."""
        status, headers, body = problem.response()
        lines = [b"HTTP/1.1 %d %s\r\n" % (status, HTTPStatus(status).phrase.encode())]
        lines += [b"%s: %s\r\n" % header for header in [*headers, (b"connection", b"close")]]
        self.transport.write(b"".join([*lines, b"\r\n", body]))
        self._last = 0
        self._do(Phase.REFUSED)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:  # TLS
            self.transport.close()

    def overflow(self) -> None:
        """There is no memory for what it has not finished."""
        if self.frames is not None:
            self._close_websocket(_TRY_AGAIN_LATER)
        elif self.upload is not None:
            self.discard()
            text = f"requests that have not arrived completely take {self._limits.max_unfinished} bytes"
            self.upload.refuse(Problem("overloaded", f"{text}, which is half of --max-memory"))
        else:
            self.abort()

    def abort(self) -> None:
        """Close the connection immediately."""
        self.transport.abort()

    def close_if_idle(self) -> None:
        """Close the connection if it waits for a request: the server is stopping."""
        if self._doing in {Phase.WAITING, Phase.IDLE}:
            self.transport.close()

    def _close_websocket(self, code: int) -> None:
        """Send a close frame, between two frames of uvicorn, and close the connection."""
        self.transport.write(b"\x88\x02" + code.to_bytes(2, "big"))
        self.transport.close()

    def _check_framing(self) -> bool:
        """Return whether what has arrived is no more than headers and bodies explain."""
        limits = self._limits
        if self._doing is Phase.WAITING:
            if self.unfinished > limits.max_header_bytes + _SLACK_BYTES:
                self.refuse(too_many_headers(limits))
        elif self.frames is not None:
            if self._blocked_since is not None and self.unread > self._unread + _SLACK_BYTES:
                self.abort()  # it sends PINGs, and does not read the PONGs
        elif self.unfinished - 2 * self._body > limits.max_header_bytes + MAX_FRAMING:
            if self.upload is None:
                self.abort()
            else:
                self.upload.refuse(Problem("invalid", "the body comes in chunks that are too small"))
        return self._doing is not Phase.REFUSED and not self.transport.is_closing()

    def _do(self, phase: Phase) -> None:
        if self._doing is Phase.REFUSED:
            return
        if phase is not self._doing:
            self._doing, self._since = phase, asyncio.get_running_loop().time()
        unread = self._blocked_since is not None and phase > Phase.UNREAD
        self._connections.move(self, Phase.UNREAD if unread else phase)

    def _block(self, since: float | None, unread: int) -> None:
        self._blocked_since = since
        self._connections.owner.memory += unread - self._unread
        self._unread = unread
        self._do(self._doing)

    def _interrupt(self) -> None:
        self.disconnected = True
        then, self.on_disconnect = self.on_disconnect, None
        if then is not None:
            then()


def _without_h2c(data: bytes) -> bytes:
    """Return the beginning of a request without an offer of HTTP/2, after which httptools would drop the body.

    Java's HTTP client makes it with every first request.
    """
    head, end, body = data.partition(b"\r\n\r\n")
    return _OFFER.sub(b"\r\nx-ignored:", head) + end + body
