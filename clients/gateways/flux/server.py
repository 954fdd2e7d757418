"""The Flux gateway's shell: the UNIX socket, its connections, and the tasks that all connections share."""

import asyncio
import logging
import os
import resource
import socket
import stat
import struct
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, cast

from ....mdp.errors import BindError, RequestTimeout, SettingError, ZmdpError
from ....mdp.keys import ClientKeys
from ..conversation import Conversation
from ..reading import Reading
from ..upstream import Handler, Upstream
from . import departures, events
from .departures import Departures
from .events import EVENTS, Publisher, Subscription
from .framing import MAX_MESSAGE
from .instance import Instance
from .messages import EAGAIN, EPERM, ROLE_LOCAL, ROLE_USER
from .session import Session
from .topology import Topology, ask
from .writer import OWNER

GUEST: Final = ROLE_USER | ROLE_LOCAL
ASK_SECONDS: Final = 5.0
"""How often the brokers are asked about the tree, and how long an answer may take."""
START_SECONDS: Final = 1.0
"""How long the first answers may take before the log says that the gateway waits."""
OFFER_SECONDS: Final = 10.0
"""How long the gateway's own services may take until the broker knows them."""
MAX_UNREAD: Final = 64 << 20
"""Replies may be large, and arrive faster than a peer reads them."""
CONGESTED: Final = 1 << 20
"""Unread bytes from which on nothing is read from a connection."""
BACKLOG: Final = 4096
DESCRIPTORS: Final = 200
"""Descriptors that the gateway needs besides its connections."""
_CREDENTIALS: Final = struct.Struct("iII")

log = logging.getLogger("zmdp.gateway")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a gateway is to run."""

    path: str
    """Of the socket."""
    rank: int | None = None
    """The rank that the gateway's broker must have."""
    size: int = 1
    """Number of brokers that must be there before the gateway begins to serve."""
    guests: bool = False
    """Whether other users are admitted."""
    max_connections: int = 10_000
    max_message: int = MAX_MESSAGE
    max_unread: int = MAX_UNREAD
    """Bytes that a connection may leave unread."""


class Gateway:
    """A Flux gateway: `async with Gateway(…)` serves until the block ends.  Raises `BindError` and `SettingError`.

    Args:
        broker: An endpoint, or several in order of preference.
        settings: How to run.
        keys: The gateway's key and the broker's, for brokers that require them.
    """

    def __init__(self, broker: str | Sequence[str], settings: Settings, *, keys: ClientKeys | None = None) -> None:
        self.uri = f"local://{settings.path}"
        """Where Flux programs find it: their FLUX_URI."""
        self.connections: set[Connection] = set()
        self.settings = settings
        self._broker = broker
        self._keys = keys
        self._stack = AsyncExitStack()
        self._publisher = Publisher()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self.upstream = upstream = await stack.enter_async_context(Upstream(self._broker, keys=self._keys))
            self._departures = Departures(upstream.client)
            stack.callback(self._departures.close)
            self.instance = Instance(self._departures, self.uri)
            await self._find_place()
            await self._offer(self._departures.service, self._departures.handle, departures.CONCURRENCY)
            if self.instance.rank == 0:
                stack.callback(self._publisher.close)
                await self._publish_events()
            subscription = Subscription(self.instance.subscribers, upstream.client)
            stack.callback(subscription.close)
            listener = listen(self.settings.path, 0o666 if self.settings.guests else 0o600)
            stack.callback(remove, self.settings.path, os.stat(self.settings.path))
            stack.callback(self._end_connections)
            raise_descriptor_limit(self.settings.max_connections + DESCRIPTORS)
            loop = asyncio.get_running_loop()
            server = await loop.create_unix_server(lambda: Connection(self), sock=listener, backlog=BACKLOG)
            stack.callback(server.close)
            asking = asyncio.create_task(self._ask_again())
            stack.callback(asking.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _end_connections(self) -> None:
        for connection in list(self.connections):
            connection.end()

    # ── the tree ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _find_place(self) -> None:
        """Ask until the broker answers and knows as many others as it should."""
        waiting = False
        while True:
            with suppress(RequestTimeout):
                await self._ask(START_SECONDS)
                if self.instance.topology.size >= self.settings.size:
                    break
                await asyncio.sleep(0.1)
            if not waiting:
                waiting = True
                log.info("waiting for the broker, and for a tree of %d", self.settings.size)
        rank = self.instance.rank
        if self.settings.rank not in (None, rank):
            name = self.instance.broker
            raise SettingError(f"broker {name!r} has rank {rank}, not {self.settings.rank} (--rank)")

    async def _ask(self, timeout: float = ASK_SECONDS) -> None:
        seen = await ask(self.upstream.client, timeout)
        if self.instance.topology.size < self.settings.size:
            self.instance.topology = Topology()  # ranks are given when all are there
        self.instance.topology.update(seen)
        self.instance.broker = seen.own
        self.instance.changed()

    async def _ask_again(self) -> None:
        while True:
            await asyncio.sleep(ASK_SECONDS)
            try:
                await self._ask()
            except ZmdpError as error:
                log.warning("cannot ask for the tree of brokers: %s", error)

    # ── services of the gateway ──────────────────────────────────────────────────────────────────────────────────────

    async def _offer(self, service: str, handler: Handler, concurrency: int) -> None:
        """Offer a service, and wait until the broker knows it.  Raises `RequestTimeout`: perhaps it refuses."""
        self.upstream.offer(service, handler, concurrency=concurrency)
        async for _ in self.upstream.client.stream(service, b"", deadline=OFFER_SECONDS):
            break

    async def _publish_events(self) -> None:
        if await self.upstream.client.available(EVENTS):
            log.warning("another gateway publishes the events already")
        else:
            await self._offer(EVENTS, self._publisher.handle, events.CONCURRENCY)


class Connection(asyncio.Protocol):
    """One connection: the `Peer` of its conversation."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._conversation: Conversation | None = None
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0

    # ── the transport ────────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit the user at the other end, or not."""
        self._transport = cast("asyncio.Transport", transport)
        self._reading = Reading(self._transport)
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket = self._transport.get_extra_info("socket")
        settings = self._gateway.settings
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, userid, _ = _CREDENTIALS.unpack(raw)
        is_owner = userid == os.getuid()
        if not is_owner and not settings.guests:
            self._refuse(EPERM, f"user {userid} is not admitted (--allow-guests)")
        elif len(self._gateway.connections) >= settings.max_connections:
            self._refuse(EAGAIN, f"there are {settings.max_connections} connections (--max-connections)")
        else:
            self._gateway.connections.add(self)
            role = OWNER if is_owner else GUEST
            session = Session(self._gateway.instance, userid, role, max_message=settings.max_message)
            conversation = Conversation(
                session, self, self._gateway.upstream, name=f"user {userid}", max_unread_bytes=settings.max_unread
            )
            session.deliver = conversation.do
            self._conversation = conversation
            self._transport.set_write_buffer_limits(CONGESTED)
            self._transport.write(b"\0")

    def _refuse(self, errno: int, why: str) -> None:
        log.warning("refused a connection: %s", why)
        self._transport.write(bytes([errno]))
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Pass on what has arrived."""
        if self._conversation is not None:
            self._conversation.received(data)

    def pause_writing(self) -> None:
        """Take in that much is unread."""
        if self._conversation is not None:
            self._conversation.congested(True)

    def resume_writing(self) -> None:
        """Take in that most has been read."""
        if self._conversation is not None:
            self._conversation.congested(False)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the conversation."""
        del exc
        self._gateway.connections.discard(self)
        self._reading.stop()
        if self._conversation is not None:
            self._conversation.lost()

    def end(self) -> None:
        """End the connection at once."""
        self._flush()
        self._transport.abort()
        if self._conversation is not None:
            self._conversation.lost()  # now, while there is a broker to tell

    # ── the peer ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, data: bytes) -> None:
        """Send bytes at the end of this turn of the event loop, together with others."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)
        self._unsent_bytes += len(data)

    def _flush(self) -> None:
        if self._unsent:
            unsent, self._unsent, self._unsent_bytes = self._unsent, [], 0
            self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))

    def unread_bytes(self) -> int:
        """Return how many bytes that were written have not been sent yet."""
        return self._unsent_bytes + self._transport.get_write_buffer_size()

    def pause(self) -> None:
        """Read nothing for now."""
        self._reading.pause()

    def resume(self) -> None:
        """Read again."""
        self._reading.resume()

    def close(self) -> None:
        """Close the connection after what was written before."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection immediately."""
        self._unsent.clear()
        self._transport.abort()


def listen(path: str, mode: int) -> socket.socket:
    """Return a socket that is bound to `path`, whose file never has more permissions than `mode`.

    Raises `BindError` if another program listens there, or if something else is in the way.
    """
    _check_free(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o777 & ~mode)
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, mode)  # a default ACL of the folder replaces the umask
    except OSError as error:
        listener.close()
        raise BindError(f"cannot listen on {path}: {error.strerror or error}") from None
    finally:
        os.umask(umask)
    listener.setblocking(False)
    return listener


def _check_free(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise BindError(f"cannot listen on {path}: it exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return  # left behind by a process that is gone
        except OSError as error:
            raise BindError(f"cannot listen on {path}: {error.strerror or error}") from None
    raise BindError(f"cannot listen on {path}: another gateway is running there")


def remove(path: str, created: os.stat_result) -> None:
    """Remove the socket's file, unless it has been replaced."""
    with suppress(OSError):
        found = os.stat(path)
        if (found.st_dev, found.st_ino) == (created.st_dev, created.st_ino):
            Path(path).unlink()


def raise_descriptor_limit(wanted: int) -> None:
    """Let this process have `wanted` descriptors, or as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            log.warning("the system allows %d descriptors, which limits the number of connections (ulimit -n)", hard)
