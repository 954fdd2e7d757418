"""The Flux gateway: its UNIX socket, connections, and background tasks."""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Self, cast

from ...gateways.upstream import Handler, Upstream, raise_descriptor_limit
from ...mdp.errors import RequestTimeout, ZmdpError
from ...mdp.limits import limit
from ...mdp.security.keys import ClientKeys
from ...mdp.transport.reading import Reading
from .conversation import Conversation
from .instance import departures, pubsub
from .instance.departures import Departures
from .instance.instance import MAX_SERVICES, Instance
from .instance.pubsub import EVENTS, Publisher, Subscription
from .instance.topology import Topology, ask
from .listener import check_free, listen, remove
from .session.output import OWNER
from .session.session import FluxSession
from .wire.framing import MAX_MESSAGE
from .wire.messages import EAGAIN, EPERM, ROLE_LOCAL, ROLE_USER

GUEST: Final = ROLE_USER | ROLE_LOCAL
ASK_SECONDS: Final = 5.0
"""How often the brokers are asked about the tree, and how long an answer may take."""
START_SECONDS: Final = 1.0
"""How long the first answers may take before the log says that the gateway waits."""
OFFER_SECONDS: Final = 30.0
"""How long the gateway's own services may take until the broker knows them."""
STALLED_SECONDS: Final = 20.0
"""How long a peer may read nothing while something waits for it."""
CLOSE_SECONDS: Final = 5.0
"""How long a peer has for reading the rest when its connection is closed."""
SWEEP_SECONDS: Final = 1.0
"""Interval of the search for peers that do not read."""
CONGESTED: Final = 1 << 20
"""A connection with this many unread bytes is not read."""
BACKLOG: Final = 4096
POLL_SECONDS: Final = 0.02
"""Interval at which a draining gateway checks whether the last requests have ended."""
DESCRIPTORS_PER_SERVICE: Final = 8
"""Each service has two workers."""
_CREDENTIALS: Final = struct.Struct("iII")

log = logging.getLogger("zmdp.gateway")


@dataclass(frozen=True)
class FluxSettings:
    """The settings of a Flux gateway."""

    path: str
    """Path of the socket."""
    size: int = 1
    """Number of brokers in the tree before the gateway begins to serve."""
    guests: bool = False
    """Whether other users are admitted."""
    max_connections: int = limit(10_000, "connections", "Maximum number of connections.")
    max_message: int = limit(MAX_MESSAGE, "bytes", "Maximum size of a message.")
    max_unread: int = limit(64 << 20, "bytes", "Disconnect a program that leaves more unread.")
    max_memory: int = limit(512 << 20, "bytes", "Maximum size of all incomplete and unread messages together.")
    max_services: int = limit(MAX_SERVICES, "services", "Maximum number of services that programs offer.")


class FluxGateway:
    """A Flux gateway: `async with FluxGateway(…)` serves until the block ends.  Raises `BindError`.

    Args:
        broker: An endpoint, or several in order of preference.
        settings: Its settings.
        keys: The gateway's key and the broker's, for brokers that require them.
    """

    def __init__(self, broker: str | Sequence[str], settings: FluxSettings, *, keys: ClientKeys | None = None) -> None:
        self.uri = f"local://{settings.path}"
        """Where Flux programs find it: their FLUX_URI."""
        self.connections: set[FluxConnection] = set()
        self.settings = settings
        self.memory = 0
        """Bytes of incomplete and of unread messages, of all connections together."""
        self.holders: set[FluxConnection] = set()
        """The connections to which these bytes belong."""
        self._broker = broker
        self._keys = keys
        self._stack = AsyncExitStack()
        self._publisher = Publisher()
        self.remove_socket: Callable[[], object] = lambda: None
        """Removes the file of the socket."""
        self._close_listener: Callable[[], object] = lambda: None

    async def __aenter__(self) -> Self:
        check_free(self.settings.path)  # early, because the broker may have to be waited for
        async with AsyncExitStack() as stack:
            self.upstream = upstream = await stack.enter_async_context(Upstream(self._broker, keys=self._keys))
            self._departures = Departures(upstream.client)
            stack.callback(self._departures.close)
            self.instance = Instance(self._departures, self.uri, self.settings.max_services)
            await self._find_place()
            await self._offer(self._departures.service, self._departures.handle, departures.CONCURRENCY)
            if self.instance.rank == 0:
                stack.callback(self._publisher.close)
                await self._publish_events()
            subscription = Subscription(self.instance.subscribers, upstream.client)
            stack.callback(subscription.close)
            listener = listen(self.settings.path, 0o666 if self.settings.guests else 0o600)
            self.remove_socket = partial(remove, self.settings.path, os.stat(self.settings.path))
            stack.callback(self.remove_socket)
            stack.callback(self._end_connections)
            settings = self.settings
            raise_descriptor_limit(settings.max_connections + DESCRIPTORS_PER_SERVICE * settings.max_services)
            loop = asyncio.get_running_loop()
            server = await loop.create_unix_server(lambda: FluxConnection(self), sock=listener, backlog=BACKLOG)
            stack.callback(server.close)
            self._close_listener = server.close
            asking = asyncio.create_task(self._ask_again())
            stack.callback(asking.cancel)
            sweeper = asyncio.create_task(self._sweep())
            stack.callback(sweeper.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def drain(self, timeout: float) -> int:
        """Admit no more programs, and wait until no request of theirs or to them is in progress.

        Returns how many still are after `timeout` seconds.
        """
        until = asyncio.get_running_loop().time() + timeout
        self._close_listener()
        for connection in list(self.connections):
            connection.drain()
        while self.in_progress and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(POLL_SECONDS)
        return self.in_progress

    @property
    def in_progress(self) -> int:
        """Number of requests of programs and to them that have not ended."""
        return sum(each.outstanding + each.serving for each in list(self.connections))

    def _end_connections(self) -> None:
        for connection in list(self.connections):
            connection.end()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep(asyncio.get_running_loop().time())

    def sweep(self, now: float) -> None:
        """End the connections whose peers have stopped reading."""
        for connection in list(self.holders):
            connection.sweep(now)

    # ── the tree ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _find_place(self) -> None:
        """Ask until the broker answers, and the tree is large enough."""
        waiting = False
        while True:
            with suppress(RequestTimeout):
                await self._ask(ASK_SECONDS if waiting else START_SECONDS)
                if self.instance.topology.size >= self.settings.size:
                    break
                await asyncio.sleep(0.1)
            if not waiting:
                waiting = True
                log.info("waiting for the broker, and for a tree of %d", self.settings.size)

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
            await self._offer(EVENTS, self._publisher.handle, pubsub.CONCURRENCY)


class FluxConnection(asyncio.Protocol):
    """One connection: the `Peer` of its conversation."""

    def __init__(self, gateway: FluxGateway) -> None:
        self._gateway = gateway
        self.user = ""
        """The user at the other end."""
        self._conversation: Conversation | None = None
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._written = 0
        """Bytes written to the transport."""
        self._read = 0
        """How many of them the peer had read at `_read_at`."""
        self._read_at = 0.0
        """When the peer was last seen to read; 0 if nothing is unread."""
        self._held = 0
        """The connection's part of the gateway's memory."""
        self._closing: asyncio.TimerHandle | None = None

    @property
    def outstanding(self) -> int:
        """Number of its requests that have not ended."""
        return 0 if self._conversation is None else self._conversation.outstanding

    @property
    def serving(self) -> int:
        """Number of requests that were passed to its program and are not answered."""
        return 0 if self._conversation is None else self._conversation.serving

    def drain(self) -> None:
        """Take no more requests for the services of its program."""
        if self._conversation is not None:
            self._conversation.drain()

    # ── the transport ────────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit or refuse the user at the other end."""
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
            self._name = self.user = name = f"user {userid}"
            self._session = session = FluxSession(
                self._gateway.instance, userid, role, max_message=settings.max_message
            )
            conversation = Conversation(
                session, self, self._gateway.upstream, name=name, max_unread_bytes=settings.max_unread
            )
            session.output.wake = conversation.act
            self._conversation = conversation
            self._transport.set_write_buffer_limits(CONGESTED)
            self._transport.write(b"\0")

    def _refuse(self, errno: int, why: str) -> None:
        log.warning("refused a connection: %s", why)
        self._transport.write(bytes([errno]))
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Pass on bytes that have arrived."""
        if self._conversation is not None:
            self._conversation.received(data)
            self._count()

    def pause_writing(self) -> None:
        """Take in that the peer leaves much unread."""
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
        if self._closing is not None:
            self._closing.cancel()
        self._hold(0)
        if self._conversation is not None:
            self._conversation.lost()

    def end(self) -> None:
        """End the connection at once."""
        self._flush()
        self._transport.abort()
        if self._conversation is not None:
            self._conversation.lost()  # now, while the client is still open

    # ── memory and time ──────────────────────────────────────────────────────────────────────────────────────────────

    def _count(self) -> None:
        """Count the memory of the connection, and end it if that has grown past the limit."""
        held = self._session.buffered + self.unread_bytes()
        if held == self._held:
            return
        grew = held > self._held
        self._hold(held)
        limit = self._gateway.settings.max_memory
        if grew and self._gateway.memory > limit:
            self._give_up(f"incomplete messages and unread ones take more than {limit} bytes (--max-memory)")

    def _hold(self, size: int) -> None:
        self._gateway.memory += size - self._held
        self._held = size
        if size:
            self._gateway.holders.add(self)
        else:
            self._gateway.holders.discard(self)

    def _give_up(self, why: str) -> None:
        if not self._transport.is_closing():
            log.warning("%s: disconnected: %s", self._name, why)
        self.abort()

    def sweep(self, now: float) -> None:
        """End the connection if its peer has read nothing for a while."""
        unread = self._transport.get_write_buffer_size()
        read = self._written - unread
        if not unread:
            self._read_at = 0.0
        elif not self._read_at or read != self._read:
            self._read, self._read_at = read, now
        elif now - self._read_at > STALLED_SECONDS:
            self._give_up(f"it has read nothing for {STALLED_SECONDS:g} s")
        self._count()

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
            data = unsent[0] if len(unsent) == 1 else b"".join(unsent)
            self._written += len(data)
            self._transport.write(data)
            self._count()

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
        self._closing = self._loop.call_later(CLOSE_SECONDS, self._transport.abort)

    def abort(self) -> None:
        """Close the connection immediately."""
        self._unsent, self._unsent_bytes = [], 0
        self._transport.abort()
