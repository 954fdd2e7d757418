"""Runs uvicorn, and stops it in an orderly way."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from uvicorn import Config

from ..errors import SettingError
from ..program.logs import counted
from ..transport.listening import BACKLOG, shown_address
from .guard import Alone, Guard, Owner
from .limits import ServerLimits

log = logging.getLogger("zmdp.http")


def tls_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """Return the TLS settings.  Raises `SettingError`."""
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
    return context


class _Uvicorn(uvicorn.Server):
    """uvicorn, which leaves signals to the program."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Server:
    """Serves an ASGI application at a socket: uvicorn, within `limits`.

    Args:
        application: The application.
        limits: What clients may do.
        listener: The socket, which listens.  The server closes it.
        tls: The TLS settings, if the server is to use it.
        owner: Counts the memory of bodies that have not arrived completely.
    """

    def __init__(
        self,
        application: Any,
        limits: ServerLimits,
        listener: socket.socket,
        tls: ssl.SSLContext | None = None,
        *,
        owner: Owner | None = None,
    ) -> None:
        self._guard = Guard(application, limits, owner or Alone())
        self._limits = limits
        self._listener = listener
        self.url = f"http{'s' if tls else ''}://{shown_address(listener)}"
        """Where it listens."""
        # uvicorn's annotation of these is int, but any number works.
        times: Any = {"timeout_keep_alive": limits.keep_alive, "timeout_graceful_shutdown": limits.drain_timeout}
        config = Config(
            self._guard, http="h11", ws="none", lifespan="off", log_config=None, log_level="critical",
            access_log=False, proxy_headers=False, server_header=False, backlog=BACKLOG,
            limit_concurrency=limits.max_connections, h11_max_incomplete_event_size=limits.max_header_bytes,
            ssl_context_factory=None if tls is None else lambda *_: tls, **times,
        )  # fmt: skip
        self._uvicorn = _Uvicorn(config)
        self._serving: asyncio.Task[None] | None = None
        self.cut_off = False
        """Requests were ended before they were finished."""

    @property
    def outstanding(self) -> int:
        """Requests that have not been answered."""
        return self._guard.outstanding

    async def run(self) -> None:
        """Serve until `stop` is called; then finish the requests in progress."""
        self._serving = asyncio.ensure_future(self._uvicorn.serve([self._listener]))
        try:
            await asyncio.wait([self._serving])
        finally:
            self._serving.cancel()
            tasks = list(self._uvicorn.server_state.tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait([self._serving, *tasks])
            if self._uvicorn.started:  # else there are none
                for server in self._uvicorn.servers:
                    server.close()
            self.cut_off = self._guard.cut_off > 0
        if self.cut_off:
            log.warning(
                "gave up %s, which had %g s to finish",
                counted(self._guard.cut_off, "request"), self._limits.drain_timeout,
            )  # fmt: skip
        if not self._serving.cancelled():
            self._serving.result()

    def stop(self) -> None:
        """Stop accepting connections and finish the requests in progress; the second time, abandon them."""
        if self._uvicorn.should_exit and self._serving is not None:
            self._serving.cancel()
        self._uvicorn.should_exit = True


def run(main: Any) -> int:
    """Run a coroutine function in uvloop's event loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code: int = runner.run(main())
        return code
