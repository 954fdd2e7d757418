"""Accepts HTTP connections, and stops in an orderly way."""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Collection
from email.utils import formatdate
from pathlib import Path
from typing import Any, Final

import uvloop
from uvicorn.config import Config
from uvicorn.server import ServerState

from ..errors import SettingError
from ..transport.tcp import BACKLOG
from .connection import Connection, Owner
from .limits import ConnectionLimits

POLL_SECONDS: Final = 0.05
"""How often to see whether the last connections have ended, while the server stops."""

log = logging.getLogger("zmdp.http")


def tls_context(certificate: Path, key: Path | None, client_ca: Path | None) -> ssl.SSLContext:
    """Return the TLS settings.  With `client_ca`, clients may show a certificate.  Raises `SettingError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise SettingError(
            f"cannot use the certificate {certificate} with the key {key or 'in the same file'}: {error}"
            f"{'' if key else '; --tls-key names the file of the key'}"
        ) from None
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except (OSError, ssl.SSLError) as error:
            raise SettingError(f"cannot use {client_ca}, the certificates of clients' CAs: {error}") from None
        context.verify_mode = ssl.CERT_OPTIONAL  # other clients have a token
    return context


class _Alone:
    """The owner of connections that share nothing with anything else."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.memory = 0


class Server:
    """Serves an ASGI application at a socket, within `limits`.

    `owner` counts the memory that connections use.  `websockets` is uvicorn's setting `ws`.
    """

    def __init__(
        self,
        application: Any,
        limits: ConnectionLimits,
        listener: socket.socket,
        tls: ssl.SSLContext | None = None,
        *,
        owner: Owner | None = None,
        websockets: Any = "none",
    ) -> None:
        self._limits = limits
        self._owner = owner or _Alone(limits)
        self._listener = listener
        self._tls = tls
        self._state = ServerState()
        self._config = Config(
            application, log_config=None, access_log=False, lifespan="off", proxy_headers=False, server_header=False,
            ws=websockets,
        )  # fmt: skip
        self._stopping = asyncio.Event()
        self.forced = False
        """A second signal stopped it."""
        self.cut_off = False
        """Connections were ended before their requests were finished."""

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return f"http{'s' if self._tls else ''}://{shown}:{port}"

    async def run(self) -> None:
        """Serve until `stop` is called; then finish the requests in progress."""
        loop = asyncio.get_running_loop()
        self._config.load()
        self._tell_date()
        handshake_timeout = self._limits.header_timeout if self._tls else None
        server = await loop.create_server(
            self._connection, sock=self._listener, ssl=self._tls, backlog=BACKLOG,
            ssl_handshake_timeout=handshake_timeout,
        )  # fmt: skip
        sweeper = loop.create_task(self._sweep())
        try:
            await self._stopping.wait()
            server.close()
            await self._drain()
        finally:
            sweeper.cancel()
            for connection in list(self.connections):
                connection.transport.abort()
            if self._state.tasks:  # those that notice that nobody listens any more end without an error
                await asyncio.wait(self._state.tasks, timeout=POLL_SECONDS)
            tasks = list(self._state.tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def stop(self) -> None:
        """Stop accepting connections and finish the requests in progress; the second time, abandon them."""
        self.forced = self._stopping.is_set()
        self._stopping.set()

    def _connection(self) -> Connection:
        return Connection(self._config, self._state, self._owner, asyncio.get_running_loop())

    @property
    def connections(self) -> Collection[Any]:
        """The open connections: each is a `Connection`, or what `websockets` has made of it."""
        return self._state.connections

    async def _sweep(self) -> None:
        """Enforce the timeouts, and keep the date that responses have."""
        limits, loop = self._limits, asyncio.get_running_loop()
        shortest = min(limits.header_timeout, limits.body_timeout, limits.keep_alive)
        while True:
            await asyncio.sleep(min(1.0, shortest / 4))
            self._tell_date()
            now = loop.time()
            for connection in list(self.connections):
                if isinstance(connection, Connection):  # not a WebSocket
                    connection.sweep(now)

    def _tell_date(self) -> None:
        # The same list, since WebSocket connections keep it.
        self._state.default_headers[:] = [(b"date", formatdate(time.time(), usegmt=True).encode())]

    async def _drain(self) -> None:
        """Wait until every connection has ended, for a limited time."""
        limit = asyncio.get_running_loop().time() + self._limits.drain_timeout
        for connection in list(self.connections):
            connection.shutdown()
        while self._state.connections or self._state.tasks:
            if self.forced or asyncio.get_running_loop().time() > limit:
                self.cut_off = True
                log.warning(
                    "gave up the requests of %d connections, which had %g s to finish",
                    len(self._state.connections), self._limits.drain_timeout,
                )  # fmt: skip
                break
            await asyncio.sleep(POLL_SECONDS)


def run(main: Any) -> int:
    """Run a coroutine function in uvloop's event loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code: int = runner.run(main())
        return code
