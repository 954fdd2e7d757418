"""Third-party peers, which write records by hand and follow the rules loosely."""

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from support.peers import body_of, ready_of, record, request_of

from zmdp.mdp import wire
from zmdp.mdp.codes import Code
from zmdp.mdp.wire import Kind, Message, Route, batch
from zmdp.testing.network import Dealer, Network

from .actors import Process, Stage, Stream, end
from .callers import Wish
from .proxies import Socket
from .rules import check

INTERVAL = 0.4
"""Seconds between two heartbeats."""
PATIENCE = 20.0
"""Seconds of silence after which they leave a broker."""


def commands(message: Message) -> list[Any]:
    """Return the commands in a message of a broker to a client or a worker."""
    found = wire.decode_broker(message)
    if not isinstance(found, wire.Batched):
        return [found]
    if found.bare:
        return [wire.Heartbeat(found.route, found.header)]
    unpack = batch.to_client if found.header == wire.CX1 else batch.to_worker
    return list(unpack(message, found.at))


class LooseWorker(Process):
    """A worker that sends some FINALs twice, ignores CANCEL, and changes its credit at random."""

    def __init__(
        self, world: Stage, name: str, service: bytes, *, header: bytes, credit: int, connect: Callable[..., Socket]
    ) -> None:
        super().__init__(world, name)
        self._service = service
        self._x1 = header == wire.WX1
        self._header = header
        self._route: Route = (b"",) if self._x1 else ()
        self._credit = credit if self._x1 else 1
        self._connect = connect if self._x1 else Dealer
        self._held: set[wire.Address] = set()
        self._done: list[Message] = []
        """FINALs that it sent on this connection."""
        self._open()
        self._beat()

    def _open(self) -> None:
        self._dealer = self._connect(self.world.network, self.name, self._arrived)
        self._heard_at = self.world.now
        self._held, self._done = set(), []
        self._told = self._credit
        self._leaves = False
        if self._x1:
            self._dealer.send(self._message(ready_of(self._service, self._credit)))
        else:
            self._dealer.send(wire.ready(self._route, self._header, self._service))

    def _message(self, packed: bytes) -> Message:
        return [*self._route, self._header, wire.BATCH, packed]

    @property
    def network(self) -> Network | None:
        """The network of the broker that it is connected to."""
        return self._dealer.network if isinstance(self._dealer, Dealer) else None

    def _reopen(self) -> None:
        self._dealer.close()
        self._open()

    def _beat(self) -> None:
        if self.world.now > self._heard_at + PATIENCE:
            self._reopen()
        self._dealer.send(wire.heartbeat(self._route, self._header))
        if self._x1 and not self._leaves:
            self._change_mind()
        self.later(INTERVAL, self._beat)

    def _change_mind(self) -> None:
        if self.world.calm or self.world.chance(0.05):
            credit = self._credit if self.world.calm else self.world.rng.choice([0, 1, 5, 0xFFFFFFFF])
            if credit != self._told:
                self._told = credit
                self._dealer.send(self._message(record(10, 0, struct.pack(">I", credit))))
        elif self.world.chance(0.01):
            self._leaves = True
            self.world.events["stranger leaves"] += 1
            self._dealer.send(wire.disconnect(self._route, self._header))

    def _arrived(self, dealer: Socket, message: Message) -> None:
        self.do(partial(self._receive, dealer, message))

    def _receive(self, dealer: Socket, message: Message) -> None:
        if dealer is not self._dealer:
            return
        self._heard_at = self.world.now
        for command in commands(message):
            self._process(dealer, command)

    def _process(self, dealer: Socket, command: Any) -> None:
        if isinstance(command, wire.Disconnect):
            # It may hold requests: a broker that does not know it, because it was silent or is on another connection,
            # lets it go whatever it holds.  The referee knows whether it may (C16).
            self._reopen()
        elif isinstance(command, wire.Request):
            check(len(self._held) < 1 or self._x1, f"C6: {self.name} got a second request")
            self._held.add(command.id)
            if self._x1 and not self.world.calm and self.world.chance(0.1):
                self._held.remove(command.id)
                self._dealer.send(self._message(record(11, command.id)))
                return
            seconds = self.world.rng.expovariate(10)
            self.later(seconds, partial(self._finish, dealer, command.id, command.body[0]))
        else:
            check(isinstance(command, wire.Heartbeat | wire.Cancel), f"{self.name} got {command}")

    def _finish(self, dealer: Socket, address: wire.Address, number: bytes) -> None:
        if dealer is not self._dealer:
            return
        self._held.discard(address)
        run = f"{self.name}:{self.world.number()}".encode()
        self.world.runs[number].append(self.name)
        body = end(number, run, 0)
        if isinstance(address, int) and self._x1:
            final = self._message(record(4, address, body_of(body)))
        else:
            final = wire.reply_to_broker(self._route, self._header, Kind.FINAL, address, [body])
        self._dealer.send(final)
        if not self.world.calm and self.world.chance(0.3):
            self.world.events["FINAL sent twice"] += 1
            self._dealer.send(self.world.rng.choice([final, *self._done[-3:]]))
        self._done.append(final)

    def die(self) -> None:
        super().die()
        self._dealer.close(silent=self.world.chance(0.3))


class LooseCaller(Process):
    """An X1 client that sends many requests at once, cancels some, and repeats none."""

    def __init__(
        self, world: Stage, name: str, choose: Callable[[], Wish], pause: float, *, connect: Callable[..., Socket]
    ) -> None:
        super().__init__(world, name)
        self._choose = choose
        self._pause = pause
        self._dealer: Socket = connect(world.network, name, self._arrived)
        self._asked: dict[wire.RequestId, tuple[Wish, Stream]] = {}
        self._cancelled: set[wire.RequestId] = set()
        self._next()

    def _next(self) -> None:
        if self.world.calm:
            return
        for _ in range(self.world.rng.randint(0, 10)):
            self._ask(self._choose())
        self._dealer.send(wire.heartbeat((b"",), wire.CX1))
        self.later(self.world.rng.expovariate(1 / (4 * self._pause)), self._next)

    def _ask(self, wish: Wish) -> None:
        unique = self.world.number()
        body = f"{self.name}.{unique}".encode()
        self._asked[unique] = wish, Stream(body)
        options = b"" if wish.wait else b'{"wait":false}'
        ttl = round(1000 * (wish.timeout or 30.0))
        frame = wish.about if wish.is_mmi else body
        self._send(request_of(unique, wish.service, frame, ttl=ttl, options=options))
        if self.world.chance(0.1):
            self._cancelled.add(unique)
            self.later(self.world.rng.expovariate(1), partial(self._send, record(5, unique)))

    def _send(self, packed: bytes) -> None:
        self._dealer.send([b"", wire.CX1, wire.BATCH, packed])

    def _arrived(self, dealer: Socket, message: Message) -> None:
        self.do(partial(self._receive, message))

    def _receive(self, message: Message) -> None:
        for command in commands(message):
            if not isinstance(command, wire.Heartbeat | wire.Disconnect):
                self._process(command)

    def _process(self, command: Any) -> None:
        check(isinstance(command, wire.Reply | wire.Error), f"X1: {self.name} got {command}, which is no reply")
        if isinstance(command, wire.Error) and command.code == Code.MALFORMED:
            check(command.id in self._cancelled, f"X1: {self.name} got {command}, but said nothing malformed")
            return  # the request was lost with an earlier connection
        check(command.id in self._asked, f"X1: {self.name} got {command}, which it did not ask for")
        wish, stream = self._asked[command.id]
        if isinstance(command, wire.Reply):
            if not wish.is_mmi:
                stream.add(command.body)
                check(stream.ended == command.final, f"C3: {command} is not what the worker sent")
            self.world.events["stranger got its reply"] += command.final
        if isinstance(command, wire.Error) or command.final:
            del self._asked[command.id]

    def die(self) -> None:
        super().die()
        self._dealer.close(silent=self.world.chance(0.3))
