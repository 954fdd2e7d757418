"""Peers that know no rules."""

from collections.abc import Callable

from zmdp.mdp import wire
from zmdp.mdp.fake_network import Dealer
from zmdp.mdp.wire import Message

from .actors import Process, Stage

OPTIONS = [b"", b"{}", b'{"ttl":0}', b'{"ttl":700}', b'{"wait":false}', b'{"ttl":9e9, "wait":false, "other":[1]}']
BROKEN_OPTIONS = [
    b"{",
    b"[]",
    b"1",
    b"\xff",
    b'{"ttl":-1}',
    b'{"ttl":"1"}',
    b'{"ttl":1e400}',
    b'{"wait":0}',
    b'{"headers":{"a":1}}',
]


class Rogue(Process):
    """Sends whatever it likes: noise, broken commands, and valid ones that nobody expects.

    One that registers as a worker (`registers`) takes requests and never answers them, but leaves the clients alone;
    any other answers requests that it was never given.
    """

    def __init__(
        self,
        world: Stage,
        name: str,
        services: list[bytes],
        clients: Callable[[], list[bytes]],
        *,
        registers: bool,
        pause: float,
    ) -> None:
        super().__init__(world, name)
        self._services = services
        self._clients = clients
        self._registers = registers
        self._pause = pause
        self._dealer = Dealer(world.network, name, self._arrived)
        self._next()

    def _next(self) -> None:
        if self.world.calm:
            self.die()
            return
        message = self._spoil(self._message()) if self.world.chance(0.3) else self._message()
        command = wire.decode_peer([b"?", *message], max_message=1 << 30, max_frames=1 << 30)
        if isinstance(command, wire.Request) and not command.service.startswith(b"mmi."):
            # With a number, so that the referee can tell it from others.
            body = [f"{self.name}.{self.world.number()}".encode()]
            message = wire.request(command.route[1:], command.header, command.service, body, command.options.raw)
        if self._registers or not isinstance(command, wire.Ready):
            self._dealer.send(message)
        if self.world.chance(0.1):
            self._dealer.close(flush=True)  # while the broker may have an answer for it
            self._dealer = Dealer(self.world.network, self.name, self._arrived)
        self.later(self.world.rng.expovariate(1 / self._pause), self._next)

    def _message(self) -> Message:
        rng = self.world.rng
        route = rng.choice([(), (), (b"",), (b"a", b""), (b"x",) * rng.randint(1, 20) + (b"",)])
        service = rng.choice([*self._services, rng.randbytes(2).hex().encode(), b"mmi.service", b"mmi.what"])
        worker = rng.choice([wire.W01, wire.W02, wire.WX1])
        address = b"nobody" if self._registers else rng.choice([b"nobody", *self._clients()])
        kinds = (wire.Kind.FINAL,) if worker == wire.W01 else (wire.Kind.PARTIAL, wire.Kind.FINAL)
        return rng.choice(
            [
                wire.request(route, rng.choice([wire.C01, wire.C02]), service, [b"?"]),
                wire.ready(route, worker, service),
                wire.reply(route, worker, rng.choice(kinds), address, [b"a reply that nobody asked for"]),
                wire.failure(route, address, rng.choice([500, 7]), "a failure that nobody asked for"),
                wire.heartbeat(route, worker),
                wire.disconnect(route, worker),
                [rng.randbytes(rng.randint(0, 8)) for _ in range(rng.randint(1, 6))],
                *[self._message_x1(route, service) for _ in range(3)],
            ]
        )

    def _message_x1(self, route: wire.Route, service: bytes) -> Message:
        """What an X1 client might send, or should not; its few numbers are soon used again."""
        rng = self.world.rng
        number = rng.choice([route, (b"1", b""), (b"1", b""), (b"2", b"3", b"")])
        return rng.choice(
            [
                wire.request(number, wire.CX1, service, [b"?"], rng.choice(OPTIONS)),
                wire.request(number, wire.CX1, service, [b"?"], rng.choice(BROKEN_OPTIONS)),
                wire.cancel(number, service),
                wire.heartbeat(number, wire.CX1),
                [*number, wire.CX1, rng.choice([b"\x02", b"\x03", b"\x04", b"\x07", b"\x09", b""]), service],
            ]
        )

    def _spoil(self, message: Message) -> Message:
        """Lose, double, empty or change a frame."""
        at = self.world.rng.randrange(len(message))
        changed = self.world.rng.choice([[], [message[at]] * 2, [b""], [self.world.rng.randbytes(3)]])
        return [*message[:at], *changed, *message[at + 1 :]] or [b""]

    def _arrived(self, dealer: Dealer, message: Message) -> None:
        pass

    def tick(self) -> None:
        pass

    def deadline(self) -> float | None:
        return None

    def die(self) -> None:
        super().die()
        self._dealer.close()
