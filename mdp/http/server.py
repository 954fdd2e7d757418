"""Accepts HTTP connections, and stops in an orderly way."""

import asyncio
import logging
import socket
import ssl
from pathlib import Path
from typing import Any, Final

import uvicorn
import uvloop
from uvicorn import Config

from ..errors import SettingError
from ..transport.tcp import BACKLOG, shown_address
from .connection import CONNECTION, Connection
from .connections import Connections, Owner
from .guard import Guard
from .limits import ConnectionLimits

LISTENERS: Final = 16
"""How often to listen at the socket.  For each, uvloop accepts one connection in a turn of its loop: with one, a caller
waits for as many turns as there are others that connect, however long these are."""
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

    memory = 0


class Server:
    """Serves an ASGI application at a socket: uvicorn, within `limits`.

    Args:
        application: The application.  A scope's state has the `Connection` over which it came.
        limits: What clients may do.
        listener: The socket, which listens.
        tls: The TLS settings, if the server is to use it.
        name: What refusals call the server.
        owner: Counts the memory that connections use.
    """

    def __init__(
        self,
        application: Any,
        limits: ConnectionLimits,
        listener: socket.socket,
        tls: ssl.SSLContext | None = None,
        *,
        name: str = "the server",
        owner: Owner | None = None,
    ) -> None:
        self.connections: Connections[Connection] = Connections(limits, owner or _Alone())
        self._limits = limits
        self._name = name
        self._listener = listener
        self._tls = tls
        settings: Any = {"timeout_keep_alive": limits.keep_alive}  # uvicorn's annotation is int, but any number works
        config: Any = Config(
            Guard(application, self.connections), http="httptools", ws="none", lifespan="off", log_config=None,
            log_level="error", access_log=False, proxy_headers=False, server_header=False, **settings,
        )  # fmt: skip
        config.load()
        self._config = config
        self._uvicorn = uvicorn.Server(config)
        self._stopping = asyncio.Event()
        self.forced = False
        """A second signal stopped it."""
        self.cut_off = False
        """Connections were ended before their requests were finished."""

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http{'s' if self._tls else ''}://{shown_address(self._listener)}"

    async def run(self) -> None:
        """Serve until `stop` is called; then finish the requests in progress."""
        loop = asyncio.get_running_loop()
        tasks = self._uvicorn.server_state.tasks
        handshake_timeout = self._limits.header_timeout if self._tls else None
        listeners = [self._listener, *(self._listener.dup() for _ in range(1, LISTENERS))]
        servers = [
            await loop.create_server(
                self._accepted, sock=each, ssl=self._tls, backlog=BACKLOG, ssl_handshake_timeout=handshake_timeout
            )
            for each in listeners
        ]
        helpers = [loop.create_task(self._uvicorn.main_loop()), loop.create_task(self._sweep())]
        try:
            await self._stopping.wait()
            for server in servers:
                server.close()
            await self._drain()
        finally:
            for connection in list(self.connections):
                connection.abort()
            if tasks:  # those that notice that nobody listens any more end without an error
                await asyncio.wait(tasks, timeout=POLL_SECONDS)
            remaining = [*tasks, *helpers]
            for task in remaining:
                task.cancel()
            await asyncio.wait(remaining)

    def stop(self) -> None:
        """Stop accepting connections and finish the requests in progress; the second time, abandon them."""
        self.forced = self._stopping.is_set()
        self._stopping.set()

    def _accepted(self) -> Connection:
        """Return the protocol of a new connection."""
        connection = Connection(self.connections, self._name)
        connection.inner = self._config.http_protocol_class(
            config=self._config, server_state=self._uvicorn.server_state, app_state={CONNECTION: connection}
        )
        return connection

    async def _sweep(self) -> None:
        """Enforce the timeouts."""
        limits, loop = self._limits, asyncio.get_running_loop()
        shortest = min(limits.header_timeout, limits.body_timeout, limits.ping_interval)
        while True:
            await asyncio.sleep(min(1.0, shortest / 4))
            now = loop.time()
            for connection in list(self.connections):
                connection.sweep(now)

    async def _drain(self) -> None:
        """Wait until every connection has ended, for a limited time."""
        limit = asyncio.get_running_loop().time() + self._limits.drain_timeout
        self.connections.draining = True
        for connection in list(self.connections):
            connection.close_if_idle()
        while len(self.connections) or self._uvicorn.server_state.tasks:
            if self.forced or asyncio.get_running_loop().time() > limit:
                self.cut_off = True
                log.warning(
                    "gave up the requests of %d connections, which had %g s to finish",
                    len(self.connections), self._limits.drain_timeout,
                )  # fmt: skip
                break
            await asyncio.sleep(POLL_SECONDS)


def run(main: Any) -> int:
    """Run a coroutine function in uvloop's event loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code: int = runner.run(main())
        return code
