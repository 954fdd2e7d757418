"""MDP/0.2 and 0.1 clients: one that retries, driven as its shell drives it, and one that sends bursts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from zmdp.clients.calls.reply import Reply
from zmdp.clients.legacy.session import LegacySession, Resend
from zmdp.mdp import wire
from zmdp.mdp.wire import Message
from zmdp.testing.network import Dealer

from .actors import Process, Stage, Stream, tells_failure
from .proxies import Socket
from .rules import EPSILON, check


@dataclass(frozen=True)
class Call:
    """Options of a call of a 0.2 or 0.1 client."""

    service: bytes
    timeout: float
    retries: int
    stream: bool
    about: bytes = b""
    """The service that an `mmi.*` request asks about."""

    @property
    def is_mmi(self) -> bool:
        return self.service.startswith(b"mmi.")


class PirateProcess(Process):
    """A `LegacySession`, driven as `Client` drives it: one call after the other."""

    def __init__(
        self,
        world: Stage,
        name: str,
        protocol: str,
        choose: Callable[[], Call],
        pause: float,
        connect: Callable[..., Socket] = Dealer,
    ) -> None:
        super().__init__(world, name)
        self.session = LegacySession(protocol)
        self._protocol = protocol
        self._connect = connect
        self.idle = True
        """Between two calls."""
        self.replies = 0
        self._choose = choose
        self._pause = pause
        self._dealer: Socket | None = None
        self._call: Call | None = None
        self._heard_at = 0.0
        """When the call was sent or the last part of its reply arrived."""
        self._came = Stream(b"")
        """What has arrived on this connection for the request that was sent there last."""
        self._handed_out = Stream(b"")
        """What the caller has received."""
        self.later(world.rng.expovariate(1 / pause), self._next)

    @property
    def connected(self) -> bool:
        """Return whether its connection works, or it has none and would open one."""
        return self._dealer is None or self._dealer.whole

    def _next(self) -> None:
        if not self.world.calm and self.idle:
            self.begin(self._choose())

    def begin(self, call: Call) -> None:
        self.idle = False
        self._call = call
        self._heard_at = self.world.now
        number = f"{self.name}.{self.world.number()}".encode()
        body = [call.about] if call.is_mmi else [number, b"please"]
        self._came, self._handed_out = Stream(number), Stream(number)
        self.session.request(
            call.service, body, self.world.now, timeout=call.timeout, retries=call.retries, stream=call.stream
        )
        self._send()

    def _send(self) -> None:
        for message in self.session.take_messages():
            if self._dealer is None:
                self._dealer = self._connect(self.world.network, self.name, self._arrived)
            self._dealer.send(message)

    def _arrived(self, dealer: Socket, message: Message) -> None:
        self.do(partial(self._receive, dealer, message))

    def _receive(self, dealer: Socket, message: Message) -> None:
        if dealer is not self._dealer:
            return  # it was closed while this process hung
        answer = wire.decode_broker(message)
        call = self._call
        check(isinstance(answer, wire.Reply) and call is not None, f"{self.name} got {message}, which is no reply")
        assert isinstance(answer, wire.Reply)
        assert call is not None
        check(not self.idle, f"C3: {self.name} got {message}, but waits for nothing")
        check(answer.service == call.service, f"C18: {self.name} asked {call.service!r} and got {message}")
        if not call.is_mmi:
            self._came.add(answer.body)
            check(self._came.ended == answer.final, f"C3: {message} is not what the worker sent")
        self._heard_at = self.world.now
        self.session.receive(message, self.world.now)
        replies = self.session.take_events()
        check(len(replies) == (answer.final or call.stream), f"C5: handed out {replies} for {message}")
        if not replies:
            return
        (reply,) = replies
        assert isinstance(reply, Reply)
        if not call.is_mmi:
            self._handed_out.add(reply)
            check(self._handed_out.ended == reply.final, f"C5: handed out {reply}")
        # A 0.1 client gets the frames of the PARTIALs in front, so it cannot know a failure after them for what it is.
        failed = tells_failure(reply) and (self._protocol != "0.1" or len(reply) == 3)
        check((reply.failure is not None) == failed, f"{self.name} does not see that {reply} is a failure")
        if reply.final:
            self.replies += reply.failure is None
            self.world.events["client got its reply" if reply.failure is None else "client was told of a failure"] += 1
            self._ended()

    def tick(self) -> None:
        self.session.tick(self.world.now)
        for event in self.session.take_events():
            assert self._call is not None
            silence = self.world.now - self._heard_at
            check(silence >= self._call.timeout - EPSILON, f"C5: {self.name} waited for {silence} s only")
            self._heard_at = self.world.now
            assert self._dealer is not None
            self._dealer.close()
            self._dealer = None
            if isinstance(event, Resend):
                self.world.events["client sent again"] += 1
                self._came = Stream(self._came.number)
            else:
                self.world.note(f"{self.name} gives up")
                self.world.events["stream interrupted" if self.session.streamed else "client gave up"] += 1
                self._ended()
        self._send()

    def _ended(self) -> None:
        self.idle = True
        check(not self.session.waiting, f"C4: {self.name}'s call has ended, but its session waits")
        self.later(self.world.rng.expovariate(1 / self._pause), self._next)

    def deadline(self) -> float | None:
        return self.session.deadline()

    def die(self) -> None:
        super().die()
        if self._dealer is not None:
            self._dealer.close(silent=self.world.chance(0.3))


class BurstProcess(Process):
    """A client that sends many requests at once, reads replies in any order, and never retries."""

    def __init__(self, world: Stage, name: str, protocol: str, choose: Callable[[], Call], pause: float) -> None:
        super().__init__(world, name)
        self.session = LegacySession(protocol)
        self._choose = choose
        self._pause = pause
        self._dealer = Dealer(world.network, name, self._arrived)
        self._asked: dict[bytes, tuple[bytes, Stream]] = {}
        self._next()

    def _next(self) -> None:
        if self.world.calm:
            return
        call = self._choose()
        for _ in range(0 if call.is_mmi else self.world.rng.randint(1, 12)):
            number = f"{self.name}.{self.world.number()}".encode()
            self._asked[number] = (call.service, Stream(number))
            self._dealer.send(self.session.encode(call.service, [number, b"please"]))
        self.later(self.world.rng.expovariate(1 / (8 * self._pause)), self._next)

    def _arrived(self, dealer: Dealer, message: Message) -> None:
        self.do(partial(self._receive, message))

    def _receive(self, message: Message) -> None:
        reply = self.session.decode(message)
        check(reply is not None, f"{self.name} got {message}, which is no reply")
        assert reply is not None
        number = reply[-1].partition(b"|")[0]
        check(number in self._asked, f"C3: {self.name} got {message}, which it did not ask for")
        service, stream = self._asked[number]
        check(reply.service.encode() == service, f"C18: {self.name} asked {service!r} and got {message}")
        stream.add(reply)
        check(stream.ended == reply.final, f"C3: {message} is not what the worker sent")
        if reply.final:
            self.world.events["client got its reply"] += 1

    def die(self) -> None:
        super().die()
        self._dealer.close(silent=self.world.chance(0.3))
