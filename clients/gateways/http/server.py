"""Accepts HTTP connections, and stops in an orderly way; runs the gateway."""

import asyncio
import logging
import signal
import socket
import ssl
import time
from collections.abc import Iterable
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path
from typing import Any, Final

import uvloop
from uvicorn.config import Config
from uvicorn.server import ServerState

from ....mdp.errors import AccessError, SettingError
from ....mdp.transport.tcp import BACKLOG
from . import websocket
from .access import load
from .app import application
from .connection import Connection, Owner
from .gateway import Gateway
from .settings import Settings

POLL_SECONDS: Final = 0.05
"""How often to see whether the last connections have ended, while the gateway stops."""

log = logging.getLogger("zmdp.gateway")


def tls_context(certificate: Path, key: Path | None, client_ca: Path | None) -> ssl.SSLContext:
    """Return the TLS settings.  With `client_ca`, clients may show a certificate.  Raises `SettingError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise SettingError(
            f"cannot use the certificate {certificate} with the key {key or certificate}: {error}"
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

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.memory = 0


class Server:
    """Serves an ASGI application at a socket, within the limits that `settings` has for connections.

    `owner` counts the memory that connections use.  `websockets` is uvicorn's setting `ws`.
    """

    def __init__(
        self,
        application: Any,
        settings: Settings,
        listener: socket.socket,
        tls: ssl.SSLContext | None = None,
        *,
        owner: Owner | None = None,
        websockets: Any = "none",
    ) -> None:
        self._settings = settings
        self._owner = owner or _Alone(settings)
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
        handshake_timeout = self._settings.header_timeout if self._tls else None
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
            for connection in list(self._connections()):
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

    def _connections(self) -> Iterable[Any]:
        return self._state.connections

    async def _sweep(self) -> None:
        """Enforce the timeouts, and keep the date that responses have."""
        settings, loop = self._settings, asyncio.get_running_loop()
        shortest = min(settings.header_timeout, settings.body_timeout, settings.keep_alive)
        while True:
            await asyncio.sleep(min(1.0, shortest / 4))
            self._tell_date()
            now = loop.time()
            for connection in list(self._connections()):
                if isinstance(connection, Connection):  # not a WebSocket
                    connection.sweep(now)

    def _tell_date(self) -> None:
        # The same list, since WebSocket connections keep it.
        self._state.default_headers[:] = [(b"date", formatdate(time.time(), usegmt=True).encode())]

    async def _drain(self) -> None:
        """Wait until every connection has ended, for a limited time."""
        limit = asyncio.get_running_loop().time() + self._settings.drain_timeout
        for connection in list(self._connections()):
            connection.shutdown()
        while self._state.connections or self._state.tasks:
            if self.forced or asyncio.get_running_loop().time() > limit:
                self.cut_off = True
                log.warning("stopped with %d connections open", len(self._state.connections))
                break
            await asyncio.sleep(POLL_SECONDS)


def gateway_server(gateway: Gateway, listener: socket.socket, tls: ssl.SSLContext | None = None) -> Server:
    """Return the server of a gateway."""
    return Server(
        application(gateway), gateway.settings, listener, tls, owner=gateway, websockets=websocket.protocol(gateway)
    )


def reload(gateway: Gateway) -> None:
    """Read the access file again.  If it is invalid, what it said before still applies."""
    access = gateway.access
    if access is None:
        log.info("there is no access file to read again")
        return
    try:
        gateway.access = load(access.path)
    except AccessError as error:
        log.error("what the access file said before still applies: %s", error)
    else:
        log.info("read the access file again: %d roles", len(gateway.access.roles))


async def serve(gateway: Gateway, server: Server) -> int:
    """Serve until SIGTERM or SIGINT.  Return the exit code."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    loop.add_signal_handler(signal.SIGHUP, reload, gateway)
    try:
        await server.run()
    finally:
        with suppress(asyncio.CancelledError):
            await gateway.upstream.close()
    return int(server.cut_off)


def run(main: Any) -> int:
    """Run a coroutine function in uvloop's event loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code: int = runner.run(main())
        return code
