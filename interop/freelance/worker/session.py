"""A server's side of FLP (C46) as a state machine: requests from any number of clients, without a broker.

It uses no socket and no clock.  To its shell it is a worker's session whose connection is never lost: the socket to
which clients connect.  The shell reports messages that cannot be sent with `gone` and `not_read`, and logs the dropped
messages that `take_reports` returns.

The machine answers a PING immediately, whatever the handlers do.  It holds a limited number of requests, and of bytes,
and ignores those beyond the limit: clients then try another server.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from ....mdp import wire
from ....mdp.codes import Code
from ....mdp.limits import Limits
from ....mdp.wire import Address, Invalid, Message, flp
from ....workers.session.held import CreditController
from ....workers.session.outgoing import LegacyOutgoing
from ....workers.session.request import Request
from ....workers.session.session import WorkerSession
from ....workers.session.states import SERVING, SessionSettings

MAX_WAITING: Final = 10_000
"""Maximum number of requests that wait for a handler."""
MAX_WAITING_BYTES: Final = 1 << 28
"""Maximum memory of these requests."""
FRAME_COST_BYTES: Final = 100
"""Memory charged for each frame, in addition to its content."""
REPORT_SECONDS: Final = 10.0
"""Interval in which dropped messages are reported, at most once."""

MALFORMED: Final = "malformed"
TOO_LARGE: Final = "too-large"
QUEUE_FULL: Final = "queue-full"
STOPPING: Final = "stopping"
CLIENT_GONE: Final = "client-gone"
SLOW_READER: Final = "slow-reader"
UNKNOWN_KEY: Final = "unknown-key"


class Replies(LegacyOutgoing):
    """The messages of a server: PONGs, and replies, which are whole as those of 0.1."""

    def __init__(self) -> None:
        super().__init__((), wire.W01)
        self.clients: dict[Address, tuple[bytes, bytes]] = {}
        """The client of each request that has not ended, and its control frame, by address."""

    def send(self, message: Message) -> None:
        """Add a PONG, or a reply to what is no request."""
        self._add(message)

    def drop(self, address: Address) -> None:
        """Send no reply to a request."""
        self.clients.pop(address, None)
        if self._partials:
            self._partials.pop(address, None)

    def ready(self, credit: int, service: bytes, options: bytes) -> None:
        """Do nothing: clients are not told."""

    def disconnect(self, text: bytes = b"") -> None:
        """Do nothing: clients are not told."""

    def discard(self) -> None:
        """Forget everything that has not been taken, and all requests."""
        super().discard()
        self.clients.clear()

    def _reply(self, kind: wire.Kind, address: Address, body: Sequence[bytes]) -> None:
        client, control = self.clients.pop(address)
        self._add(flp.exchange(client, control, body))


class FreelanceServerSession(WorkerSession):
    """One server's exchange with its clients; `service` is the name that its requests show to the handler."""

    def __init__(
        self,
        service: bytes,
        settings: SessionSettings | None = None,
        *,
        concurrency: int = 1,
        max_waiting: int = MAX_WAITING,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        max_message: int = Limits().max_message,
        max_frames: int = Limits().max_frames,
    ) -> None:
        super().__init__(service, settings, controller=CreditController(concurrency))
        self.dropped: Counter[str] = Counter()
        """Number of requests, replies and other messages that were dropped, by reason."""
        self._x1 = False
        self._outgoing = self._replies = Replies()
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._max_message = max_message
        self._max_frames = max_frames
        self._last_address = 0
        self._waiting_bytes: dict[Address, int] = {}
        """Memory of each request that has not begun, by address, which the handler may see."""
        self._all_waiting_bytes = 0
        self._reports: list[Counter[str]] = []
        self._reported: Counter[str] = Counter()
        self._report_at = 0.0
        """When dropped messages may be reported again."""

    def connected(self, now: float) -> None:
        """Serve: clients can connect."""
        super().connected(now)
        self.heartbeats.heard = True  # nobody has to answer

    def receive(self, message: Message, now: float, user: str = "", *, allowed: bool = True) -> None:
        """Process a message: with access control, from a client of the role `user`, which may make requests or not."""
        command = flp.decode_client(message)
        size = sum(map(len, message))
        if size > self._max_message or len(message) > self._max_frames:
            self.dropped[TOO_LARGE] += 1
        elif isinstance(command, Invalid):
            self.dropped[MALFORMED] += 1
        elif self.state is not SERVING:
            self.dropped[STOPPING] += 1  # a PING as well: clients should prefer other servers
        elif isinstance(command, flp.Ping):
            self._replies.send(flp.pong(command.peer))
        elif not allowed:
            text = f"the role {user} may not call {self._name!r}"
            body = wire.error_body(Code.NOT_ALLOWED, text)
            self._replies.send(flp.exchange(command.peer, command.control, body))
        else:
            self._take(command, size + FRAME_COST_BYTES * len(message), user)

    def _take(self, command: flp.Exchange, cost: int, user: str) -> None:
        if self.waiting >= self._max_waiting or self._all_waiting_bytes + cost > self._max_waiting_bytes:
            self.dropped[QUEUE_FULL] += 1
            return
        self._last_address += 1
        address = self._last_address
        options = wire.Options(wire.encode_options({"user": user})) if user else wire.NO_OPTIONS
        self._requests.add(Request(command.body, service=self._name, client=address, options=options))
        self._replies.clients[address] = command.peer, command.control
        self._waiting_bytes[address] = cost
        self._all_waiting_bytes += cost

    def begin(self, now: float) -> Request | None:
        """Return the next request for a handler, or None if there is none or enough handlers are running."""
        request = super().begin(now)
        if request is not None:
            self._all_waiting_bytes -= self._waiting_bytes.pop(request.address)
        return request

    def leave(self, now: float) -> None:
        """Take no more requests, and drop those that have not begun: their clients try other servers."""
        for address in self._requests.release(0):
            self._replies.drop(address)
            self.dropped[STOPPING] += 1
        self._waiting_bytes.clear()
        self._all_waiting_bytes = 0
        super().leave(now)

    def abandon(self, request: Request, now: float, *, ended: bool = False) -> None:
        """End a request without a reply: its client tries another server."""
        self._replies.drop(request.address)
        self._finish(request, now)
        if self.state is not SERVING:
            self._settle(now)

    # ── clients that cannot be sent a message, and reports ───────────────────────────────────────────────────────────

    def gone(self, client: bytes) -> None:
        """Report that a client is gone, because a message to it could not be sent: its requests are cancelled."""
        self.dropped[CLIENT_GONE] += 1
        for address, request in self.held.items():
            if self._replies.clients[address][0] == client:
                request.cancelled = True

    def not_read(self) -> None:
        """Report that a message was dropped because its client does not read."""
        self.dropped[SLOW_READER] += 1

    def tick(self, now: float) -> None:
        """Report what was dropped since the last report, if that is due."""
        if now >= self._report_at and self.dropped != self._reported:
            self._reports.append(self.dropped - self._reported)
            self._reported = Counter(self.dropped)
            self._report_at = now + REPORT_SECONDS

    def deadline(self) -> float | None:
        """Return when `tick` has something to report, or None; without a socket, when to open one."""
        if not self.state.connected:
            return super().deadline()
        return None if self.dropped == self._reported else self._report_at

    def take_reports(self) -> list[Counter[str]]:
        """Return the reports: for each, the number of messages that were dropped since the one before, by reason."""
        reports, self._reports = self._reports, []
        return reports
