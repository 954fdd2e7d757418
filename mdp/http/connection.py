"""One connection of an HTTP client: uvicorn's protocol with httptools, and the limits that it lacks.

A request that is malformed, too large or too slow is refused with a problem document after the replies to the requests
before it, and the connection is closed.  `Connection.sweep`, called now and then, enforces the timeouts: so a request
sets no timer.

    HEADERS → BODY → REPLY → IDLE → HEADERS      what the connection waits for
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ..transport.reading import peer_is_gone
from .checks import (
    Refused,
    certificate_names,
    check_opening,
    check_version,
    malformed,
    too_many_headers,
    unknown_host,
    without_port,
)
from .limits import ConnectionLimits
from .problems import Problem

CONNECTION: Final = "zmdp.connection"
"""The key in a scope's state of the `Connection` over which a request came."""

HEADERS: Final = "headers"
BODY: Final = "body"
REPLY: Final = "reply"
IDLE: Final = "idle"

MAX_PIPELINED: Final = 100
"""Requests that a client may send before the first of them is answered."""
MAX_IGNORED: Final = 1 << 20
"""Bytes of a body that are read and ignored because the request has been answered already."""
LINGER_SECONDS: Final = 2.0
"""How long to wait for the client to read a refusal before the connection is closed: to close it while the client still
sends would discard the refusal."""
_OF_UPGRADES: Final = frozenset({b"http2-settings", b"upgrade"})
"""Headers, and what names them in the header Connection."""
_CHUNK_OVERHEAD: Final = 8
"""Bytes of framing, for each byte of a body, in chunks of one byte."""


class Owner(Protocol):
    """What the connections of a server belong to, such as a gateway."""

    memory: int
    """Bytes that wait for clients to read them, and what else the owner counts."""

    @property
    def limits(self) -> ConnectionLimits:
        """The limits."""


class Connection(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(
        self, config: Config, server_state: ServerState, owner: Owner, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(config, server_state, {CONNECTION: self}, loop)
        self.opened = loop.time()
        """When it was opened."""
        self.certificate: tuple[str, ...] = ()
        """The names in the client's certificate, which was checked."""
        self.on_disconnect: Callable[[], None] | None = None
        """Called once when the connection ends before the response is complete."""
        self._owner = owner
        self._limits = owner.limits
        self._phase = HEADERS
        self._since = loop.time()
        """When the phase began, or something last arrived in it."""
        self._blocked_since: float | None = None
        """Since when the client has read nothing, while something waits to be sent."""
        self._unsent = 0
        """Bytes that waited at that time, which count as memory of the owner."""
        self._header_bytes = 0
        self._header_count = 0
        self._hosts = 0
        self._received = 0
        """Bytes that have arrived in this phase."""
        self._body_bytes = 0
        self._measured_at = self._since
        """When the rate of the body was last measured."""
        self._measured_bytes = 0
        """What had arrived of it at that time."""
        self._running: RequestResponseCycle | None = None
        """The latest request that the application has got; `cycle` is the latest that has arrived."""
        self._refusal: Problem | None = None
        """What to answer after the replies that are due, before the connection is closed."""
        self._lingering = False
        """Everything is answered: the connection closes, and what arrives is ignored."""

    @property
    def disconnected(self) -> bool:
        """Whether the client of the running request is gone."""
        return self._running is None or self._running.disconnected

    @property
    def outstanding(self) -> int:
        """Number of requests that have arrived and were not answered."""
        running = self._running is not None and not self._running.response_complete
        return running + len(self.pipeline)

    # ── the transport ────────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: Any) -> None:
        """Take a new connection, if there are not too many."""
        full = len(self.connections) >= self._limits.max_connections
        super().connection_made(transport)
        self.certificate = certificate_names(transport.get_extra_info("peercert"))
        if full:
            self._refuse(Problem("overloaded", "the server has too many connections (--max-connections)"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever is working on a reply."""
        super().connection_lost(exc)
        self._block(None, 0)
        self.pipeline.clear()
        self._interrupt()

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        if self._lingering or self._refusal is not None:
            self._received += len(data)
            if self._received > MAX_IGNORED:
                self.transport.abort()
            return
        if self._phase is IDLE:
            self._begin(HEADERS)
        elif self._phase is BODY:
            self._since = self.loop.time()
        self._received += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            reason = error.__context__
            self._refuse(reason.args[0] if isinstance(reason, Refused) else malformed(error))
        else:
            if self._phase is not REPLY:
                self._check_overhead()

    def pause_writing(self) -> None:
        """The client reads more slowly than the reply is written."""
        super().pause_writing()
        self._block(self.loop.time(), self.transport.get_write_buffer_size())
        if self._owner.memory > self._limits.max_memory:
            self.transport.abort()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._block(None, 0)

    def _block(self, since: float | None, unsent: int) -> None:
        self._blocked_since = since
        self._owner.memory += unsent - self._unsent
        self._unsent = unsent

    def _begin(self, phase: str) -> None:
        self._phase = phase
        self._since = self._measured_at = self.loop.time()
        self._received = self._measured_bytes = 0

    # ── the parser ───────────────────────────────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._header_bytes = self._header_count = self._hosts = self._body_bytes = 0
        if self._phase is not HEADERS:  # pipelined
            self._begin(HEADERS)

    def on_url(self, url: bytes) -> None:
        """Take a piece of the request's target."""
        self._header_bytes += len(url)
        if self._header_bytes > self._limits.max_header_bytes:
            raise Refused(too_many_headers(self._limits))
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer, which is ignored."""
        name = name.lower()
        self._header_bytes += len(name) + len(value) + 4
        self._header_count += 1
        limits = self._limits
        if self._header_bytes > limits.max_header_bytes or self._header_count > limits.max_headers:
            raise Refused(too_many_headers(limits))
        if self._phase is HEADERS:
            if name == b"host":
                self._hosts += 1
                if limits.hosts is not None and without_port(value) not in limits.hosts:
                    raise Refused(unknown_host(value))
            elif name == b"transfer-encoding":
                if value.lower() != b"chunked" or any(known == name for known, _ in self.headers):
                    raise Refused(Problem("invalid", "the only transfer coding known is chunked, once"))
            elif name == b"expect":
                if value.lower() != b"100-continue":
                    raise Refused(Problem("expectation-failed", "the only expectation known is 100-continue"))
                self.expect_100_continue = True
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Start the application, or queue the request behind the one in progress."""
        version = self.parser.get_http_version()
        if self._hosts != 1 or version != "1.1":
            check_version(version, self._hosts, self.headers)
        if len(self.pipeline) >= MAX_PIPELINED:
            raise Refused(Problem("overloaded", f"more than {MAX_PIPELINED} requests were sent before a reply"))
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise Refused(Problem("method-not-allowed", "this is not a proxy"))
            if self._should_upgrade():
                check_opening(self.parser.get_method(), self.headers)
                super().on_headers_complete()  # it starts nothing
            return
        super().on_headers_complete()
        self._begin(BODY)

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body, unless the request has been answered."""
        self._body_bytes += len(body)
        cycle = self.cycle
        if cycle is not None and cycle.response_complete:
            if self._body_bytes > MAX_IGNORED:
                raise Refused(None)
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        if not self.pipeline:
            # A body beyond uvicorn's limit paused it, and nothing else resumes it: the end would not be noticed.
            self.flow.resume_reading()
        self._begin(IDLE if self.cycle is not None and self.cycle.response_complete else REPLY)

    def on_response_complete(self) -> None:
        """Start the next request, if one waits."""
        self.on_disconnect = None
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._refusal is not None:
            self._write_refusal(self._refusal)
        elif self._phase is REPLY:
            self._begin(IDLE)
        elif self.expect_100_continue:  # whether the client sends its body now, nobody can tell
            self._linger()

    def respond(self, kind: bytes, body: bytes) -> bool:
        """Answer the running request with 200, all at once; return whether that was possible.

        It is not if the client has yet to read earlier replies: then `send` waits for it.
        """
        cycle = self._running
        if cycle is None or self.flow.write_paused:
            return False
        if not cycle.disconnected:
            close = b"" if cycle.keep_alive else b"connection: close\r\n"
            date = self.server_state.default_headers[0][1]
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ndate: %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n%s\r\n"
                % (date, kind, len(body), close)
                + body
            )
            cycle.response_started = cycle.response_complete = True
            if not cycle.keep_alive:
                self.transport.close()
            self.on_response_complete()
        return True

    def _check_overhead(self) -> None:
        """Refuse headers without an end, and bodies that are mostly framing (extensions of chunks, trailers)."""
        limit = self._limits.max_header_bytes
        if self._phase is BODY:
            limit += (_CHUNK_OVERHEAD + 1) * self._body_bytes
        if self._received > limit and self._phase in {HEADERS, BODY}:
            self._refuse(too_many_headers(self._limits))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _upgrade(self, rest: bytes) -> None:
        """Pass the connection on to the WebSocket protocol, or ignore the header Upgrade; `rest` comes after it."""
        if not self._should_upgrade():
            self._parse_again(rest)
        elif self._is_answered():
            self.handle_websocket_upgrade()
            if rest:  # a client that does not wait for the answer
                protocol: Any = self.transport.get_protocol()
                protocol.data_received(rest)
        else:
            self._refuse(Problem("invalid", "a connection becomes a WebSocket only after all replies"))

    def _parse_again(self, rest: bytes) -> None:
        """Parse the request without the header Upgrade: the parser takes what follows for another protocol.

        Java's HTTP client, for one, offers HTTP/2 with every first request.
        """
        lines = [b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":  # it may also say `close`
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join([token for token in tokens if token.lower() not in _OF_UPGRADES])  # noqa: PLW2901
            if name not in _OF_UPGRADES:
                lines.append(b"%s: %s\r\n" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._received = 0  # they arrive once more
        self.data_received(b"".join([*lines, b"\r\n", rest]))

    # ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _refuse(self, problem: Problem | None) -> None:
        """Answer with `problem` after the replies that are due, and close the connection; None: only close it."""
        if self.transport.is_closing():
            return
        due = not self._is_answered()
        if self._phase is BODY and self.cycle is not None:
            if self.cycle.response_complete:
                problem = None
            elif self.cycle is self._running:  # the request that is incomplete gets this as its reply
                due = False
                self._interrupt()
                if self.cycle.response_started:
                    problem = None
            else:
                self.pipeline.popleft()
        if problem is None:
            self._linger()
        elif due:
            self._refusal = problem
            self.flow.pause_reading()
        else:
            self._write_refusal(problem)

    def _interrupt(self) -> None:
        """Tell the application that there is nobody any more to reply to."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        then, self.on_disconnect = self.on_disconnect, None
        if then is not None:
            then()

    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete or self.cycle.disconnected

    def _write_refusal(self, problem: Problem) -> None:
        status, headers, body = problem.response()
        lines = [STATUS_LINE[status]]
        for name, value in [*self.server_state.default_headers, *headers, (b"connection", b"close")]:
            lines += [name, b": ", value, b"\r\n"]
        self.transport.write(b"".join([*lines, b"\r\n", body]))
        self._linger()

    def _linger(self) -> None:
        """Close the connection once the client has read everything."""
        self._refusal = None
        if not self.transport.can_write_eof():  # TLS
            self.transport.close()
            return
        self._lingering = True
        self._begin(IDLE)
        self.transport.write_eof()
        self.flow.resume_reading()

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def sweep(self, now: float) -> None:
        """Close the connection if it has waited for too long, or if it is not being read and its client is gone."""
        limits, waited = self._limits, now - self._since
        if self.flow.read_paused and peer_is_gone(self.transport):
            self.transport.abort()
        elif self._blocked_since is not None:
            unsent = self.transport.get_write_buffer_size()
            if unsent < self._unsent:
                self._block(now, unsent)
            elif now - self._blocked_since > limits.body_timeout:
                self.transport.abort()
        elif self._lingering:
            if waited > LINGER_SECONDS:
                self.transport.abort()
        elif self._phase is HEADERS:
            if waited > limits.header_timeout:
                text = f"the headers of the request did not arrive within {limits.header_timeout:g} s"
                self._refuse(Problem("slow-request", text))
        elif self._phase is BODY:
            self._check_rate(now)
        elif self._phase is IDLE and waited > limits.keep_alive:
            self.transport.close()

    def _check_rate(self, now: float) -> None:
        """Refuse a body that does not go on, or that arrives too slowly."""
        limits = self._limits
        elapsed, arrived = now - self._measured_at, self._body_bytes - self._measured_bytes
        if self.flow.read_paused:  # the client could not send any more
            self._since = now
        elif now - self._since > limits.body_timeout:
            self._refuse(
                Problem("slow-request", f"the body of the request did not go on for {limits.body_timeout:g} s")
            )
            return
        elif elapsed <= limits.body_timeout:
            return
        elif arrived < limits.min_body_rate * elapsed:
            text = f"{arrived} bytes of the body arrived in {elapsed:.1f} s: --min-body-rate is {limits.min_body_rate}"
            self._refuse(Problem("slow-request", text))
            return
        self._measured_at, self._measured_bytes = now, self._body_bytes

    def shutdown(self) -> None:
        """Close the connection after the replies that are due."""
        if self._is_answered() and not self.pipeline:
            self.transport.close()
        elif self.cycle is not None:
            self.cycle.keep_alive = False
