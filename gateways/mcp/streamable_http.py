"""MCP over streamable HTTP, for callers with tokens."""

import asyncio
import socket
import ssl
from contextlib import suppress
from typing import Any, Final

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.transport_security import TransportSecuritySettings

from ...mdp.http.asgi import respond
from ...mdp.http.problems import Problem
from ...mdp.http.server import Server
from ..gateway import Gateway
from .protocol import MAX_SESSIONS, McpServer

PATH: Final = "/mcp"


class Door:
    """The ASGI application: it admits callers, and ends their streams when the server stops."""

    def __init__(self, gateway: Gateway, server: McpServer) -> None:
        self._gateway = gateway
        self._server = server
        self._application = server.streamable_http_app(
            streamable_http_path=PATH, max_request_body_size=gateway.settings.max_body, max_sessions=MAX_SESSIONS,
            transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),  # `Guard` has it
        )  # fmt: skip
        self._streams: set[asyncio.Task[Any]] = set()
        """Streams of clients that only listen."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        try:
            caller = self._gateway.caller(scope)
        except Problem as problem:
            await respond(send, *problem.response())
            return
        scope = {**scope, "state": {**scope.get("state", {}), "caller": caller}}
        if caller.role is not None:  # a session belongs to the role that opened it
            scope["user"] = AuthenticatedUser(AccessToken(token="", client_id=caller.role, scopes=[]))
        answering = asyncio.ensure_future(self._application(scope, receive, send))
        if scope["method"] == "GET":
            self._streams.add(answering)
            answering.add_done_callback(self._streams.discard)
        try:
            await asyncio.wait({answering})
        finally:
            answering.cancel()
        if not answering.cancelled():
            answering.result()

    def end_streams(self) -> None:
        """End the streams of clients that only listen."""
        self._server.listeners.close()
        for stream in self._streams:
            stream.cancel()


class McpHttpServer(Server):
    """The HTTP server of a `Door`."""

    def __init__(
        self, gateway: Gateway, server: McpServer, listener: socket.socket, tls: ssl.SSLContext | None
    ) -> None:
        self._door = Door(gateway, server)
        self._mcp = server
        super().__init__(self._door, gateway.settings, listener, tls, owner=gateway)
        self.url += PATH

    async def run(self) -> None:
        """Serve until `stop` is called; then finish the calls in progress."""
        async with self._mcp.session_manager.run():
            watching = asyncio.ensure_future(self._mcp.watch())
            try:
                await super().run()
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching

    def stop(self) -> None:
        """Stop accepting connections, end the streams, and finish the calls in progress."""
        self._door.end_streams()
        super().stop()
