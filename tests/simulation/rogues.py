"""Peers that follow no rules."""

from collections.abc import Callable, Sequence

from zmdp.mdp import wire
from zmdp.mdp.wire import Kind, Message, batch
from zmdp.testing.network import Dealer

from .actors import Process, Stage
from .callers import UNLIMITED
from .reading import hear

OPTIONS = [b"", b"{}", b'{"wait":false}', b'{"wait":false, "other":[1]}']
BROKEN_OPTIONS = [
    b"{",
    b"[]",
    b"1",
    b"\xff",
    b'{"other":1e400}',
    b'{"wait":0}',
    b'{"headers":{"a":1}}',
]


class Rogue(Process):
    """Sends anything: noise, invalid commands, and valid but unexpected ones.

    One that registers as a worker (`registers`) takes requests and never answers them, but answers those of others; any
    other answers requests that it was never given.
    """

    def __init__(
        self,
        world: Stage,
        name: str,
        services: list[bytes],
        addresses: Callable[[str], Sequence[int]],
        *,
        registers: bool,
        pause: float,
    ) -> None:
        super().__init__(world, name)
        self._services = services
        self._addresses = addresses
        self._registers = registers
        self._pause = pause
        self._dealer = Dealer(world.network, name, self._arrived)
        self._bodies: set[bytes] = set()
        """The first frames of all requests that it sent."""
        self._next()

    def _next(self) -> None:
        if self.world.calm:
            self.die()
            return
        make = self.world.rng.choice([self._message, self._batch])
        message = self._spoil(make()) if self.world.chance(0.3) else make()
        commands = hear([b"?", *message], UNLIMITED).commands
        registers = any(isinstance(command, wire.Ready) for command in commands)
        if self._is_known([command for command in commands if isinstance(command, wire.Request)]) and (
            self._registers or not registers
        ):
            self.world.events["rogue message"] += 1
            self._dealer.send(message)
        if self.world.chance(0.1):
            self._dealer.close(flush=True)  # while the broker may have an answer for it
            self._dealer = Dealer(self.world.network, self.name, self._arrived)
        self.later(self.world.rng.expovariate(1 / self._pause), self._next)

    def _body(self) -> list[bytes]:
        """Return a body that identifies a request to the referee."""
        return [f"{self.name}.{self.world.number()}".encode()]

    def _is_known(self, requests: list[wire.Request]) -> bool:
        """Return whether the bodies of these requests are unique."""
        bodies = {request.body[0] for request in requests if not request.service.startswith(b"mmi.")}
        mine = all(body.startswith(self.name.encode() + b".") for body in bodies)
        fresh = len(bodies) == len(requests) and not bodies & self._bodies
        if requests and all(request.service.startswith(b"mmi.") for request in requests):
            return True
        if mine and fresh:
            self._bodies |= bodies
            return True
        return not requests

    def _address(self) -> wire.Address:
        """Return the address of another worker's request, or one that was never used."""
        return self.world.rng.choice([b"nobody", 7, *self._addresses(self.name)[:3]])

    def _route(self) -> wire.Route:
        """Return an envelope, which may be too deep."""
        rng = self.world.rng
        return rng.choice(
            [(), (), (b"",), (b"",), (b"a", b""), (b"2", b"3", b""), (b"x",) * rng.randint(1, 20) + (b"",)]
        )

    def _message(self) -> Message:
        """Return noise, or a message of MDP."""
        rng, route = self.world.rng, self._route()
        service = rng.choice([*self._services, rng.randbytes(2).hex().encode(), b"mmi.service", b"mmi.what"])
        worker = rng.choice([wire.W01, wire.W02])
        kinds = (Kind.FINAL,) if worker == wire.W01 else (Kind.PARTIAL, Kind.FINAL)
        body = [b"a reply that nobody asked for"]
        return rng.choice(
            [
                wire.request_to_broker(route, rng.choice([wire.C01, wire.C02]), service, self._body()),
                wire.ready(route, worker, service),
                wire.reply_to_broker(route, worker, rng.choice(kinds), self._address(), body),
                wire.heartbeat(route, worker),
                wire.disconnect(route, worker),
                [rng.randbytes(rng.randint(0, 8)) for _ in range(rng.randint(1, 6))],
                [*route, rng.choice([wire.CX1, wire.WX1]), rng.choice([b"\x01", b"\x06", b""]), service],
            ]
        )

    def _batch(self) -> Message:
        """Return an X1 message with records of all kinds, a client's or a worker's."""
        rng, route = self.world.rng, self._route()
        header = rng.choice([wire.CX1, wire.WX1])
        packed = batch.Batch(route, header)
        for _ in range(rng.randint(0, 6)):
            if header == wire.CX1:
                self._pack_client(packed)
            else:
                self._pack_worker(packed)
        messages = packed.messages()
        return messages[0] if messages else [*route, header]

    def _pack_client(self, packed: batch.Batch) -> None:
        rng = self.world.rng
        number = rng.choice([1, 2, 3, (1 << 64) - 1])
        service = rng.choice([*self._services, b"mmi.service", b"", b"\xff"])
        match rng.randint(0, 3):
            case 0:
                packed.signal(rng.choice([5, 5, 7, 77]), number)
            case 1:
                ttl, options = rng.choice([0, 0, 1, 900]), rng.choice(BROKEN_OPTIONS)
                packed.request_to_broker(number, ttl, service, options, self._body())
            case _:
                body = [*self._body(), bytes(rng.choice([0, wire.SHARED]))]
                options = rng.choice(OPTIONS)
                packed.request_to_broker(number, rng.choice([0, 1, 900]), service, options, body)

    def _pack_worker(self, packed: batch.Batch) -> None:
        rng, address = self.world.rng, self._address()
        number = address if isinstance(address, int) else 0
        match rng.randint(0, 6):
            case 0:
                packed.ready(rng.choice([0, 1, 50, 0xFFFFFFFF]), rng.choice([*self._services, b"mmi.x"]), b"")
            case 1:
                packed.credit(rng.choice([0, 1, 50, 0xFFFFFFFF]))
            case 2:
                packed.signal(rng.choice([6, 8, 11]), number)
            case 3:
                packed.error(7, number, rng.choice([500, 404, 1000]), b"a failure that nobody asked for", [])
            case _:
                packed.reply(rng.choice([3, 4, 88]), number, [b"a reply that nobody asked for"])

    def _spoil(self, message: Message) -> Message:
        """Remove, repeat, empty or change a frame."""
        at = self.world.rng.randrange(len(message))
        changed = self.world.rng.choice([[], [message[at]] * 2, [b""], [self.world.rng.randbytes(3)]])
        return [*message[:at], *changed, *message[at + 1 :]] or [b""]

    def _arrived(self, dealer: Dealer, message: Message) -> None:
        pass

    def die(self) -> None:
        super().die()
        self._dealer.close()
