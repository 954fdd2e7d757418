"""The X1 client, driven as its shell drives it: concurrent calls, over one connection after the other."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from zmdp.clients.calls.ask import encode_options
from zmdp.clients.calls.reply import Outcome, Reply
from zmdp.clients.x1.broker_connection import GRACE, BrokerConnection, Call
from zmdp.clients.x1.session import ClientSession
from zmdp.mdp import wire
from zmdp.mdp.codes import Code
from zmdp.mdp.errors import (
    BrokerUnreachable,
    ClosedError,
    RequestRejected,
    RequestTimeout,
    RetryLater,
    ServiceError,
    ServiceNotFound,
    StreamInterrupted,
    WorkerLost,
)
from zmdp.mdp.limits import Limits
from zmdp.mdp.wire import Message, batch
from zmdp.testing.network import Dealer, Network

from .actors import LONGEST_TURN, MILLISECOND, Process, Stage, Stream, tells_failure
from .probing import Probe
from .proxies import Proxy, Socket
from .reading import Peer, hear
from .referee import GRAIN
from .rules import EPSILON, Broken, check

MOST_CALLS = 40
"""Maximum number of outstanding calls of a client: all are sent again over each new connection."""
NEVER = float("inf")
EXCEPTIONS = {
    Code.NO_WORKER: ServiceNotFound,
    Code.TIME_PASSED: RequestTimeout,
    Code.QUEUE_FULL: RetryLater,
    Code.DRAINING: RetryLater,
    Code.WORKER_LOST: WorkerLost,
    Code.NOT_ALLOWED: RequestRejected,
    Code.TOO_LARGE: RequestRejected,
    500: ServiceError,
    418: ServiceError,
}
"""The error that a client must raise for each code that it can get; it sends nothing malformed or too large."""
UNLIMITED = Limits(max_message=1 << 30, max_frames=0xFFFF)


@dataclass(frozen=True)
class Wish:
    """Options of a call of an X1 client."""

    service: bytes
    timeout: float | None = None
    silence: float | None = None
    stream: bool = False
    wait: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    about: bytes = b""
    """The service that an `mmi.*` request asks about."""
    large: bool = False
    """Whether the body has a frame that is sent as an attachment."""

    @property
    def is_mmi(self) -> bool:
        return self.service.startswith(b"mmi.")


@dataclass(eq=False)
class Asked:
    """A call and its state."""

    call: Call
    wish: Wish
    body: list[bytes]
    began: float
    heard: float
    """When it began or the last part of its reply arrived."""
    came: Stream
    """What has arrived for it on this connection."""
    handed_out: Stream
    """What the caller has received."""
    at: Socket | None = None
    """The connection over which it was sent last; None while it has none."""
    placed: float = 0.0
    """When it last lost its connection while there was another."""
    ended: bool = False
    """Whether its FINAL or ERROR arrived on this connection."""
    over: bool = False
    """Whether the caller has received its outcome or has cancelled it."""
    to_cancel: bool = False
    """Whether CANCEL must be among the next commands."""

    @property
    def deadline(self) -> float:
        return NEVER if self.wish.timeout is None else self.began + self.wish.timeout

    @property
    def due(self) -> float:
        """Return when it must be over, whatever happens."""
        due = self.deadline
        if self.wish.timeout is not None:
            due += min(self.wish.timeout * GRACE[0], GRACE[1])
        return due if self.wish.silence is None else min(due, self.heard + self.wish.silence)


class CallerProcess(Process):
    """A `ClientSession` with concurrent calls, driven as its shell drives it."""

    def __init__(
        self,
        world: Stage,
        name: str,
        choose: Callable[[], Wish],
        pause: float,
        *,
        heartbeat: float = 1.0,
        liveness: int = 5,
        cancels: float = 0.0,
        connect: Callable[..., Socket] = Dealer,
        networks: Sequence[Network] = (),
    ) -> None:
        super().__init__(world, name)
        self._networks = {network.name: network for network in networks}
        """The brokers among which the session chooses; if there are none, `connect` chooses."""
        self.session = ClientSession([*self._networks] or [""], heartbeat=heartbeat, liveness=liveness, rng=world.rng)
        self.heartbeat = heartbeat
        self.replies = 0
        self._choose = choose
        self._pause = pause
        self._cancels = cancels
        """Chance that a call is cancelled while it is outstanding."""
        self._connect_to = connect
        self._proxied = isinstance(getattr(connect, "__self__", None), Proxy)
        """It cannot notice that the proxy's connection to the broker ends, except by a timeout."""
        self._dealer: Socket | None = None
        """The socket of the session's current connection."""
        self._connections: dict[Socket, BrokerConnection] = {}
        """All connections, among them those that the session has left, and over which it still waits for replies."""
        self._connected_at = 0.0
        self._flush_due = False
        self._asked: dict[Any, Asked] = {}
        """Calls by number."""
        self._open: dict[Any, Asked] = {}
        """Calls that are not over."""
        self.later(world.rng.expovariate(1 / pause), self._next)

    @property
    def idle(self) -> bool:
        """Return whether no call is outstanding."""
        return not self._open

    def _next(self) -> None:
        if self.world.calm:
            return
        for _ in range(min(self.world.rng.choice([1, 1, 2, 6, 25]), MOST_CALLS - len(self._open))):
            self.begin(self._choose())
        self.later(self.world.rng.expovariate(1 / (2 * self._pause)), self._next)

    def begin(self, wish: Wish) -> None:
        now = self.world.now
        if wish.timeout is None and self._proxied:
            wish = replace(wish, timeout=60.0)
        number = f"{self.name}.{self.world.number()}".encode()
        body = [wish.about] if wish.is_mmi else [number, b"please"]
        if wish.large:
            body.append(bytes(wire.SHARED))
        headers = {"number": number.decode()}
        if wish.timeout is not None:
            headers["until"] = str(now + wish.timeout)
        call = self.session.request(
            wish.service, body, now, timeout=wish.timeout, silence=wish.silence, stream=wish.stream,
            options=encode_options(wish.options, headers, wish.wait),
        )  # fmt: skip
        check(call.number not in self._asked, f"X1: {self.name} uses the number {call.number} twice")
        asked = Asked(call, wish, body, now, now, Stream(number), Stream(number))
        self._asked[call.number] = self._open[call.number] = asked
        self.world.events["X1 call"] += 1
        self._settle()
        if not self.world.calm and self.world.chance(self._cancels):
            self.later(self.world.rng.expovariate(1 / self._pause), partial(self._cancel, asked))

    def _cancel(self, asked: Asked) -> None:
        if asked.over or self.world.calm:
            return
        self.world.note(f"{self.name} cancels {asked.call.number}")
        self.world.events["X1 call cancelled"] += 1
        self.session.cancel(asked.call)
        asked.to_cancel = self._is_connected(asked)
        self._over(asked)
        self._settle()

    def _is_connected(self, asked: Asked) -> bool:
        """Return whether the connection over which a call was sent works; if it has none, whether there is one."""
        connection = self._connections.get(asked.at) if asked.at is not None else None
        return (self.session.current if connection is None else connection).lost is None

    def _over(self, asked: Asked) -> None:
        asked.over = True
        del self._open[asked.call.number]

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    def _connect(self) -> None:
        session, endpoint = self.session, "the broker"
        if self._networks:
            endpoint = session.endpoint
            self._dealer = Dealer(self._networks[endpoint], self.name, self._arrived, lost=self._lost)
        else:
            self._dealer = self._connect_to(self.world.network, self.name, self._arrived, lost=self._lost)
        self.world.events["X1 client connected"] += 1
        self._connected_at = self.world.now
        self._connections[self._dealer] = session.connected(endpoint, self.world.now)
        self._settle()

    def _lost(self, dealer: Socket, reason: str) -> None:
        self.do(partial(self._connection_lost, dealer, reason))

    def _connection_lost(self, dealer: Socket, reason: str) -> None:
        if dealer in self._connections:
            self.world.events["X1 client: old connection lost"] += dealer is not self._dealer
            self.session.lose(reason, self.world.now, self._connections[dealer])
            self._settle()

    def _arrived(self, dealer: Socket, message: Message) -> None:
        self.do(partial(self._receive, dealer, message))

    def _receive(self, dealer: Socket, message: Message) -> None:
        if dealer not in self._connections:
            return  # it was closed while this process hung
        found = wire.decode_broker(message)
        check(isinstance(found, wire.Batched), f"{self.name} got {message}, which is not X1")
        assert isinstance(found, wire.Batched)
        commands = [] if found.bare else batch.to_client(message, found.at)
        if commands and isinstance(commands[0], wire.Disconnect):  # with one broker it changes nothing
            self._process(dealer, message)
            self._settle()
            return
        expected: list[tuple[Asked, Any]] = []
        over = {number for number, asked in self._asked.items() if asked.over}
        for command in commands:
            check(isinstance(command, wire.Reply | wire.Error), f"{self.name} got {command}, which is no reply")
            asked = self._asked.get(command.id)
            check(
                asked is not None and asked.at is dealer,
                f"X1: {self.name} got {command}, which it did not ask for here",
            )
            assert asked is not None
            check(not asked.ended, f"X1: {self.name} got {command} after the end of that request")
            last = isinstance(command, wire.Error) or command.final
            asked.ended = last
            if self._is_refused(asked, command, over=command.id in over):
                self.world.events["X1 client: sent to the next broker"] += 1
                asked.at, asked.ended, asked.placed = None, False, self.world.now
                continue
            asked.heard = self.world.now
            if command.id not in over and (last or asked.wish.stream):
                expected.append((asked, command))
            if isinstance(command, wire.Error):
                self._check_error(asked, command, over=command.id in over)
            elif not asked.wish.is_mmi:
                asked.came.add(command.body)
                check(asked.came.ended == command.final, f"C3: {command} is not what the worker sent")
        self._process(dealer, message)
        self._check_outcomes(expected)
        self._settle()

    def _process(self, dealer: Socket, message: Message) -> None:
        self.world.events["X1 client: reply over an old connection"] += dealer is not self._dealer
        self.session.receive(message, self.world.now, self._connections[dealer])

    def _is_refused(self, asked: Asked, command: Any, *, over: bool) -> bool:
        """Return whether a draining broker refuses a call, which the session then sends to another."""
        refused = isinstance(command, wire.Error) and command.code == Code.DRAINING and not command.detail
        streamed = asked.wish.stream and asked.handed_out.parts + asked.came.parts > 0
        return refused and self.session.failover.several and not (streamed or over)

    def _check_outcomes(self, expected: list[tuple[Asked, Any]]) -> None:
        """Check that the session delivers what has arrived, and nothing else."""
        events = self.session.events
        calls = [call for call, _ in events]
        wanted = [asked.call for asked, _ in expected]
        check(calls == wanted, f"X1: {self.name} handed out {len(calls)} outcomes for {len(wanted)}")
        for (_, outcome), (asked, command) in zip(events, expected, strict=True):
            if isinstance(command, wire.Reply):
                told = isinstance(outcome, ServiceError)
                check(told == tells_failure(command.body), f"{self.name} does not see that {command} is a failure")
                continue
            interrupted = command.code == Code.WORKER_LOST and asked.handed_out.parts + asked.came.parts > 0
            kind = ServiceError if command.detail and not command.reason else EXCEPTIONS.get(command.code)
            if interrupted and asked.wish.stream and not command.detail:
                kind = StreamInterrupted
            check(type(outcome) is kind, f"X1: {self.name} raises {outcome!r} for {command}")

    def _check_error(self, asked: Asked, error: wire.Error, *, over: bool) -> None:
        """Check that the message about a request fits the call."""
        if (error.detail and not error.reason) or error.code in {500, 418}:
            asked.came.add([error.text])
            check(asked.came.ended, f"X1: {error} is not what the worker sent")
        elif over:
            return
        elif error.code == Code.NO_WORKER:
            check(not asked.wish.wait, f"X1: {self.name} was told 404, but wants to wait")
        elif error.code == Code.CANCELLED:
            raise Broken(f"X1: {self.name} was told 499, but has not cancelled {asked.call.number}")

    def _settle(self) -> None:
        """Deliver events, send now or soon, and close the connection if it is lost."""
        for call, outcome in self.session.take_events():
            self._hand_out(self._asked[call.number], outcome)
        self._settle_old()
        if self.session.lost is not None:
            self._close()
        elif self.world.chance(0.5):
            self._flush()
        elif not self._flush_due:
            self._flush_due = True
            self.later(self.world.rng.uniform(0, LONGEST_TURN), self._flush_later)
        self._check_punctual()
        endpoint = self.session.take_probe(self.world.now)
        if endpoint is not None:
            self.world.events["X1 client: probe"] += 1
            Probe(self._networks[endpoint], self.name, lambda answered: self.do(partial(self._probed, answered)))

    def _probed(self, answered: bool) -> None:
        self.world.events["X1 client: returns"] += answered
        self.session.probed(answered, self.world.now)
        self._settle()

    def _settle_old(self) -> None:
        """Send what there is to send over old connections, and close those that have ended."""
        for dealer, connection in list(self._connections.items()):
            if dealer is self._dealer:
                continue
            self._send_over(dealer)
            if connection.lost is not None:
                self.world.note(f"{self.name} closes an old connection: {connection.lost}")
                del self._connections[dealer]
                dealer.close(flush=True)
                self._displace(dealer)

    def _send_over(self, dealer: Socket) -> None:
        """Send what there is to send over a connection."""
        for message in self._connections[dealer].take_messages():
            commands = hear([b"?", *message], UNLIMITED).commands
            self.world.events["batch of a client"] += len(commands) > 1
            for command in commands:
                self._check_sent(command, dealer)
            dealer.send(message)
        silent = [number for number, asked in self._asked.items() if asked.to_cancel and asked.at is dealer]
        check(not silent, f"X1: {self.name} did not send CANCEL of {silent}")

    def _displace(self, dealer: Socket, *, was_current: bool = False) -> None:
        """A connection has ended: what was sent there has no connection."""
        for asked in self._asked.values():
            if asked.at is dealer:
                asked.at, asked.placed = None, self.world.now
                asked.ended = asked.to_cancel = False
                asked.came = Stream(asked.came.number)
            elif asked.at is None and was_current:
                asked.to_cancel = False  # neither the request nor its CANCEL has been sent

    def _close(self) -> None:
        check(not self.session.take_messages(), f"X1: {self.name} sends something, but is not connected")
        if self._dealer is None:
            return
        self.world.note(f"{self.name}: {self.session.lost}")
        dealer, self._dealer = self._dealer, None
        connection = self._connections[dealer]
        if connection.lost is None or connection.unsent:
            self.world.events["X1 client moved"] += 1
            self._settle_old()
            return
        del self._connections[dealer]
        dealer.close()
        self._displace(dealer, was_current=True)

    def _flush_later(self) -> None:
        self._flush_due = False
        if self.session.lost is None:
            self._flush()

    def _flush(self) -> None:
        assert self._dealer is not None
        self._send_over(self._dealer)
        forgotten = [number for number, asked in self._open.items() if asked.at is None]
        check(not forgotten, f"X1: {self.name} is connected and does not send {forgotten}")
        silent = [number for number, asked in self._asked.items() if asked.to_cancel and asked.at is None]
        check(not silent, f"X1: {self.name} did not send CANCEL of {silent}")

    def _check_sent(self, command: Any, dealer: Socket) -> None:
        """Check that a request is sent under its number, once per connection, and never after a part was delivered."""
        if isinstance(command, wire.Heartbeat):
            return
        check(isinstance(command, wire.Request | wire.Cancel), "X1: {} sends {}", self.name, command)
        asked = self._asked.get(command.id)
        check(asked is not None, "X1: {} sends {} under a number of no call", self.name, command)
        assert asked is not None
        if isinstance(command, wire.Cancel):
            check(asked.at is dealer, "X1: {} cancels {}, which it has not sent here", self.name, command)
            asked.to_cancel = False
            return
        check(command.service == asked.wish.service, "X1: {} sends {} to another service", self.name, command)
        check(not asked.over or asked.to_cancel, "X1: {} sends {}, which is over", self.name, command)
        check(asked.at is None, "X1: {} sends {} a second time on a connection", self.name, command)
        check(not asked.handed_out.parts, "C17: {} sends {} after a part of its reply", self.name, command)
        check(command.body == asked.body, "X1: {} sends {}, which is not {}", self.name, command, asked.body)
        wish, ttl = asked.wish, command.ttl
        check(command.options.wait == wish.wait, "X1: {} sends {} with another wait", self.name, command)
        check((ttl is None) == (wish.timeout is None), "X1: {} sends {} with another ttl", self.name, command)
        if ttl is not None:
            packed_at = max(asked.began, self._connected_at, asked.placed)
            left = max(asked.deadline - packed_at, MILLISECOND)
            check(abs(ttl - left) <= MILLISECOND, "X1: {} sends {}, {} s are left", self.name, command, left)
        asked.at = dealer
        self.world.events["X1 request sent again"] += asked.began + LONGEST_TURN < self.world.now

    # ── the caller ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _hand_out(self, asked: Asked, outcome: Outcome) -> None:
        """Deliver a part or the outcome of a call to its caller."""
        events, now, wish = self.world.events, self.world.now, asked.wish
        check(not asked.over, f"X1: {self.name} hands out {outcome!r} after the end of {asked.call.number}")
        if isinstance(outcome, Reply):
            if not wish.is_mmi:
                asked.handed_out.add(outcome)
                check(asked.handed_out.ended == outcome.final, f"X1: {self.name} handed out {outcome}")
            if outcome.final:
                self.replies += 1
                events["X1 client got its reply"] += 1
                self._over(asked)
            else:
                check(wish.stream, f"X1: {self.name} hands out a part of what is no stream")
            return
        self._check_punctual()
        events[f"X1 client: {type(outcome).__name__} {getattr(outcome, 'code', None) or ''}".strip()] += 1
        code = getattr(outcome, "code", None)
        if isinstance(outcome, StreamInterrupted):
            check(asked.handed_out.parts > 0, f"X1: {outcome!r} though no part was handed out")
            if not self._is_connected(asked):
                self._over(asked)
                return
        if isinstance(outcome, RequestTimeout | BrokerUnreachable | StreamInterrupted) and code is None:
            passed = now >= asked.due - EPSILON
            check(passed, f"X1: {self.name} gave up {asked.call.number} at {now}, before {asked.due}: {outcome!r}")
            asked.to_cancel = self._is_connected(asked)
        self._over(asked)

    def _check_punctual(self) -> None:
        """Check that a call is over when its time has passed, or a heartbeat interval after this process runs again."""
        late = self.world.now - GRAIN - EPSILON
        if late > self.hangs_until + self.heartbeat:
            for asked in self._open.values():
                if late > asked.due:
                    number = asked.call.number
                    raise Broken(f"X1: the call {number} of {self.name} is not over, but was due {asked.due}")

    def check_answered(self, given_up: Collection[Peer]) -> None:
        """When nothing is under way, what was sent on this connection has been answered, if the connection lives.

        `given_up` are those on which the broker has given up, because this process did not read: nothing comes there.
        """
        if (
            self._dealer is not None
            and self._dealer.whole
            and self._dealer.path[0] not in given_up
            and not self._proxied
        ):
            here = [(number, asked) for number, asked in self._asked.items() if asked.at is self._dealer]
            silent = [number for number, asked in here if not asked.ended]
            check(not silent, f"X1: {self.name} got neither FINAL nor ERROR for {silent}")

    def tick(self) -> None:
        self.session.tick(self.world.now)
        self._settle()
        if self.session.lost is not None and self.session.outstanding and self.world.now >= self.session.retry_at:
            self._connect()

    def deadline(self) -> float | None:
        return self.session.deadline()

    def leave(self) -> None:
        """Close the client, which cancels outstanding calls."""
        self.session.close(partial(ClosedError, "this client was closed"))
        for call, _ in self.session.events:
            asked = self._asked[call.number]
            asked.to_cancel = self._is_connected(asked)
        self._settle()
        if self.session.lost is None:
            self._flush()
        check(self.idle, f"X1: calls of {self.name} outlive it: {list(self._open)}")
        self.world.events["X1 client closed"] += 1
        for dealer in self._connections:
            dealer.close(flush=True)
        super().die()

    def die(self) -> None:
        super().die()
        for dealer in self._connections:
            dealer.close(silent=self.world.chance(0.3))
