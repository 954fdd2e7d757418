"""Programs that pretend to be a broker: they ask for a link, and then follow no rules."""

import json

from support.peers import record, request_of

from zmdp.mdp import wire
from zmdp.mdp.wire import Message, batch
from zmdp.testing.network import Dealer, Network

from .actors import Process, Stage, end
from .crossing import commands

INTERVAL = 0.3
"""Seconds between two heartbeats."""


class Liar(Process):
    """Announces that it reaches everything; it answers some requests, keeps some, and returns some.

    It answers requests that it was never given, sends back requests that it was given, and announces nonsense.
    """

    def __init__(self, world: Stage, name: str, services: list[bytes], networks: list[Network], pause: float) -> None:
        super().__init__(world, name)
        self._services = services
        self._networks = networks
        self._pause = pause
        self._open()
        self._beat()
        self._lie()

    def _open(self) -> None:
        rng = self.world.rng
        self._dealer = Dealer(rng.choice(self._networks), self.name, self._arrived)
        self._held: dict[int, wire.Request] = {}
        self._seen: list[int] = [1]
        """The addresses of all requests that it was given."""
        name = rng.choice([self.name, self.name, rng.choice(self._networks).name, "", "with space"])
        kind = rng.choice(["peer", "parent", "child", "child", "what"])
        hello = {
            "name": name,
            "instance": f"{self.name}{self.world.number()}",
            "heartbeat": 1.0,
            "kind": kind,
            "link": 1,
        }
        body = rng.choice([json.dumps(hello).encode()] * 5 + [b"{", b"[]", b"{}", b'{"name":7}'])
        self._dealer.send([wire.CL1, wire.BATCH, request_of(1, wire.HELLO, body)])

    def _beat(self) -> None:
        if self.world.calm:
            self._dealer.close()
            self.die()
            return
        self._dealer.send([wire.WL1])
        self.later(INTERVAL, self._beat)

    def _lie(self) -> None:
        if self.world.calm:
            return
        packed = batch.Batch((), wire.WL1)
        for _ in range(self.world.rng.randint(1, 4)):
            self._add_lie(packed)
        for message in packed.messages():
            self._dealer.send(message)
        if self.world.chance(0.2):
            self._request()
        if self.world.chance(0.05):
            frames = [[record(6, 0)], [record(6, 0, b"why")], [b"junk"]]
            self._dealer.send(
                [wire.WL1, *self.world.rng.choice([[b"\x77"], *([wire.BATCH, *each] for each in frames)])]
            )
        if self.world.chance(0.1):
            self._dealer.close(flush=True)
            self._open()
        self.later(self.world.rng.expovariate(1 / self._pause), self._lie)

    def _add_lie(self, packed: batch.Batch) -> None:
        rng = self.world.rng
        address = max(0, rng.choice(self._seen) - rng.randint(0, 3))  # not one that is on its way
        if address in self._held:
            address = 0
        match rng.randint(0, 5):
            case 0 | 1 | 2:
                name = rng.choice(
                    [
                        *self._services,
                        b"mmi.service",
                        b"mmi.broker.b0",
                        b"mmi.broker.x",
                        rng.randbytes(2).hex().encode(),
                    ]
                )
                hops, free = rng.choice([0, 1, 1, 2, 17, 1 << 31]), rng.choice([0, 3, 1 << 31])
                options = rng.choice([b'{"hops":%d,"free":%d}' % (hops, free)] * 4 + [b"{}", b'{"hops":-1}', b"{"])
                packed.ready(rng.choice([0, 1, 5, 0xFFFFFFFF]), name, options)
            case 3:
                packed.reply(rng.choice([3, 4]), address, [b"forged|by|end|0"])
            case 4:
                packed.error(7, address, rng.choice([404, 500, 502]), b"forged", [])
            case 5:
                packed.signal(11, address)

    def _request(self) -> None:
        """Send a request that has already been at that broker, or has passed too many."""
        rng = self.world.rng
        names = [network.name for network in self._networks]
        via = rng.choice(
            [[self._dealer.network.name], names, [f"x{each}" for each in range(17)], [], ["x", 7], "x", None]
        )
        options = json.dumps({"via": via, "user": rng.choice(["both", 7])}).encode()
        packed = batch.Batch((), wire.CL1)
        number = f"{self.name}.{self.world.number()}".encode()
        packed.request_to_broker(self.world.number(), 900, rng.choice(self._services), options, [number, b"please"])
        packed.signal(5, rng.choice([1, 7]))
        for message in packed.messages():
            self._dealer.send(message)

    def _arrived(self, dealer: Dealer, message: Message) -> None:
        self.do(lambda: self._receive(dealer, message))

    def _receive(self, dealer: Dealer, message: Message) -> None:
        if dealer is not self._dealer:
            return
        for header, command in commands(message):
            if header == wire.CL1 and isinstance(command, wire.Request) and isinstance(command.id, int):
                self.world.events["request to a liar"] += 1
                self._held[command.id] = command
                self._seen.append(command.id)
                self.later(self.world.rng.expovariate(1), lambda held=command: self._deal_with(dealer, held))

    def _deal_with(self, dealer: Dealer, command: wire.Request) -> None:
        if dealer is not self._dealer or self._held.pop(command.id, None) is None:
            return
        rng, packed = self.world.rng, batch.Batch((), wire.WL1)
        number, run = command.body[0], f"{self.name}:{self.world.number()}".encode()
        match rng.randint(0, 4):
            case 0:
                self._held[command.id] = command  # for ever
            case 1:
                packed.signal(11, command.id)
            case 2:
                packed.error(7, command.id, 502, b"a hop was lost", [])
            case _:
                self.world.runs[number].append(self.name)
                for _ in range(rng.choice([1, 1, 2])):
                    packed.reply(4, command.id, [end(number, run, 0)])
        for message in packed.messages():
            self._dealer.send(message)
