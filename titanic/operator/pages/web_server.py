"""The web server of a Titanic: a thread with an event loop, and database connections, of its own."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, Self

import uvloop
from sqlalchemy.engine import URL

from ....dashboard.shell.shell import Shell
from ....dashboard.shell.visitors import Visitor, Visitors, limits_for
from ....mdp.http.server import Server
from ....mdp.security.access import Access
from ....mdp.transport.listening import is_loopback, listen, shown_address
from .database import AdminDatabase
from .section import TitanicSection

END_SECONDS: Final = 5.0
"""How long the thread may take to end."""

log = logging.getLogger("zmdp.titanic")


class WebServer:
    """Serves a Titanic's pages from `start` to the end of the `with` block.

    Args:
        host: The address to listen at.
        port: The port; 0 for a free one.
        access: The roles whose tokens let visitors look and act.  None for everybody.

    Raises:
        BindError: It cannot listen.
    """

    def __init__(self, host: str, port: int, *, access: Access | None) -> None:
        self._listener = listen(host, port)
        self._visitors = Visitors(visitors(access))
        self._limits = limits_for(everybody=access is None, local=is_loopback(host))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Future[None] | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{shown_address(self._listener)}/"

    def start(self, db: URL, snapshot: Callable[[], dict[str, Any]]) -> None:
        """Start the thread, from the event loop of the Titanic with this database."""
        watched = asyncio.get_running_loop()

        async def turn() -> None:
            turned: Future[None] = Future()
            with suppress(RuntimeError):  # the Titanic has ended
                watched.call_soon_threadsafe(turned.set_result, None)
                await asyncio.wrap_future(turned)

        self._thread = threading.Thread(target=self._run, args=(db, snapshot, turn), name="titanic-web", daemon=True)
        self._thread.start()

    def _run(self, db: URL, snapshot: Callable[[], dict[str, Any]], turn: Callable[[], Awaitable[None]]) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(db, snapshot, turn))
        except Exception:
            log.exception("the web server has ended")

    async def _serve(
        self, db: URL, snapshot: Callable[[], dict[str, Any]], turn: Callable[[], Awaitable[None]]
    ) -> None:
        database = AdminDatabase(db)
        section = TitanicSection(snapshot, turn, database)
        shell = Shell(lambda: "Titanic", [section.section()], self._visitors)
        server = Server(shell.application, self._limits, self._listener)
        self._loop = asyncio.get_running_loop()
        looking = asyncio.ensure_future(section.run())
        self._serving = serving = asyncio.ensure_future(server.run())
        try:
            done, _ = await asyncio.wait([looking, serving], return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                with suppress(asyncio.CancelledError):  # by `__exit__`
                    each.result()
        finally:
            for task in (looking, serving):
                task.cancel()
            await asyncio.gather(looking, serving, return_exceptions=True)
            database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            if self._loop is not None and self._serving is not None:
                with suppress(RuntimeError):  # its event loop has ended already
                    # Not an orderly end: pages that follow changes never end by themselves.
                    self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join(END_SECONDS)
        self._listener.close()


def visitors(access: Access | None) -> Mapping[bytes, Visitor] | None:
    """Return the visitors by the digests of their tokens, as an access file says; None for everybody.

    A role may look if it may ask the broker everything, and act if it is an admin.
    """
    if access is None:
        return None
    found = {digest: (name, access.roles[name]) for digest, name in access.tokens.items()}
    return {digest: Visitor(name, role.mmi == "all", role.admin) for digest, (name, role) in found.items()}
