"""One simulation: its participants, the faults, and what must be true at the end.

`Simulation(seed).run()` returns counts of events, or raises `Failed` with the command that reproduces the failure.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

from support.peers import body_of, ready_of, record

from zmdp.mdp import wire
from zmdp.mdp.broker.core.journal import Loss
from zmdp.mdp.limits import Limits
from zmdp.mdp.security.access import Permissions
from zmdp.mdp.service_limits import Limit, ServiceLimits
from zmdp.testing.network import Dealer

from .actors import MOST_PARTS_01, BrokerProcess, Habits, Process, WorkerProcess
from .callers import CallerProcess, Wish
from .pirates import BurstProcess, PirateProcess
from .proxies import Proxy, Socket
from .rogues import Rogue
from .rules import check
from .scenario import Scenario
from .strangers import LooseCaller, LooseWorker

MOST_WORKERS = 8


class Simulation(Scenario):
    """A simulated system, whose every event follows from its seed."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, trace)
        rng = self.world.rng
        self.limits = self._limits()
        self.roles = self._roles() if self.world.chance(0.5) else {}
        self.habits = Habits(
            service_time=rng.choice([0.02, 0.2, 1.0]),
            parts=rng.choice([0, 3, 20]),
            crash=rng.choice([0, 0.05]),
            stuck=0.01,
            fails=rng.choice([0, 0.02, 0.1]),
            looks=self.world.chance(0.5),
            too_large=0 if self.limits.max_frames == Limits().max_frames else self.limits.max_frames + 1,
        )
        self.world.network.slowness = rng.choice([0.01, 0.1, 1.0])
        self.proxy = Proxy(self.world, "p") if self.world.chance(0.3) else None
        self.broker: BrokerProcess | None = None
        self.networks.append(self.world.network)
        self._groups = Random(seed)
        """Of its own, so that seeds without limits stay as they were."""
        self.throttled = self._throttled() if seed % 3 == 2 else {}

    @staticmethod
    def federation(seed: int) -> bool:
        """Return whether the broker of that seed may have links, though it has none: nothing depends on it."""
        return seed % 2 == 0

    def _throttled(self) -> dict[str, ServiceLimits]:
        """Return the operator's limits of one service."""
        rng = self._groups
        rate = {"rate": rng.choice(["1/s", "10/s", "300/min"]), "burst": rng.choice([1, 3])}
        choices = [{"concurrency": rng.choice([1, 2, 5])}, rate, {"concurrency": 2, **rate}]
        service = rng.choice(self.services).decode()
        return {service: ServiceLimits(Limit(**rng.choice(choices)), Limit(**rng.choice([{}, *choices])))}

    def _wish(self) -> Wish:
        wish = super()._wish()
        if wish.service.decode() not in self.throttled:
            return wish
        return replace(wish, options={**wish.options, "group": self._groups.choice(["", "a", "b"])})

    def _limits(self) -> Limits:
        """Return limits: for half of all seeds the defaults, for the others very tight ones."""
        rng = self.world.rng
        heartbeat, liveness = rng.choice([0.5, 1.0, 2.0]), rng.choice([2, 3, 5])
        if self.world.chance(0.5):
            return Limits(heartbeat=heartbeat, liveness=liveness)
        return Limits(
            heartbeat=heartbeat,
            liveness=liveness,
            expiry=rng.choice([1.0, 5.0, 30.0]),
            max_attempts=rng.choice([1, 2, 3]),
            max_queue=rng.choice([1, 3, 10]),
            max_request_bytes=rng.choice([30_000, 60_000, 1_000_000]),
            max_services=rng.choice([len(self.services), len(self.services) + 1, 20]),
            max_unserved=rng.choice([1, 100]),
            max_workers=rng.choice([MOST_WORKERS, 1000]),
            max_frames=rng.choice([MOST_PARTS_01 + 8, 1000]),
            max_credit=rng.choice([3, 10_000]),
            busy_grace=rng.choice([2.0, 60.0]),
        )

    def _roles(self) -> dict[str, Permissions]:
        """Who may do what; empty at a broker without access control."""
        rng = self.world.rng
        names = tuple(service.decode() for service in self.services)
        limits = {
            "outstanding": rng.choice([None, None, 20]),
            "queued_requests": rng.choice([None, None, 10]),
            "request_bytes": rng.choice([None, None, 50_000]),
        }
        roles = [
            Permissions("callers", call=names, mmi=rng.choice(["service", "all"]), **limits),
            Permissions("workers", offer=("*",), mmi="none"),
            Permissions("both", call=names, offer=names, admin=True),
            Permissions("rogues", call=names[:1], offer=names[-1:], mmi=rng.choice(["none", "service"])),
            Permissions("impostors", call=("*",), offer=("*",), mmi="all"),
        ]
        return {role.name: role for role in roles}

    # ── participants ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        world, rng = self.world, self.world.rng
        self._start_broker()
        for number in range(rng.randint(1, MOST_WORKERS - 1)):
            # Each service has a worker, if there are enough.
            service = self.services[number] if number < len(self.services) else rng.choice(self.services)
            self._makers[f"w{number}"] = self._worker_maker(f"w{number}", service)
        if self.world.chance(0.5):
            self._makers["v0"] = partial(
                LooseWorker, world, "v0", rng.choice(self.services),
                header=rng.choice([wire.W02, wire.WX1]), credit=rng.choice([1, 3]), connect=self._way(),
            )  # fmt: skip
        for number in range(rng.randint(1, 6)):
            self._makers[f"c{number}"] = self._client_maker(f"c{number}")
        if self.world.chance(0.5):
            self._makers["b0"] = partial(LooseCaller, world, "b0", self._wish, self.pause, connect=self._way())
        for name in self._makers:
            self._supervise(name)
        for number in range(rng.choice([0, 1, 3])):
            names = f"r{number}", self.services, self._addresses
            Rogue(world, *names, registers=world.chance(0.5), pause=self.pause)
        self._next_fault()

    def _way(self) -> Callable[..., Socket]:
        """Choose how a peer connects: directly or through the proxy."""
        return Dealer if self.proxy is None or self.world.chance(0.5) else self.proxy.connect

    def _worker_maker(self, name: str, service: bytes) -> Callable[[], Process]:
        rng = self.world.rng
        protocol = rng.choice(["0.1", "0.2", "X1", "X1", "X1"])
        return partial(
            WorkerProcess,
            self.world,
            name,
            service,
            protocol=protocol,
            kind=rng.choice(["threads", "asyncio", "fixed"]),
            concurrency=rng.choice([1, 1, 2, 4, 16]),
            heartbeat=rng.choice([0.4, self.limits.heartbeat, 3.0]),
            liveness=rng.choice([2, 3, 5]),
            habits=self.habits,
            connect=self._way() if protocol != "0.2" else Dealer,
        )

    def _client_maker(self, name: str) -> Callable[[], Process]:
        rng = self.world.rng
        protocol = rng.choice(["0.1", "0.2", "X1", "X1", "X1"])
        if protocol != "X1" and self.world.chance(0.7):
            way = self._way() if protocol != "0.2" else Dealer
            return partial(PirateProcess, self.world, name, protocol, self._choose, self.pause, way)
        if protocol != "X1":
            return partial(BurstProcess, self.world, name, protocol, self._choose, self.pause)
        return partial(
            CallerProcess,
            self.world,
            name,
            self._wish,
            self.pause,
            heartbeat=rng.choice([0.3, 1.0, 3.0]),
            liveness=rng.choice([2, 3, 5]),
            cancels=rng.choice([0, 0.3]),
            connect=self._way(),
        )

    def _start_broker(self) -> None:
        self.world.note("broker starts")
        self.broker = BrokerProcess(
            self.world, self.limits, self.roles, self.throttled, federation=self.federation(self.seed)
        )

    def _addresses(self, name: str) -> list[int]:
        """Return the addresses of all requests at workers other than `name`."""
        seats = [] if self.broker is None else self.broker.referee.ledger.seats.items()
        others = [seat for place, seat in seats if not place[0].startswith(name.encode())]
        return [address for seat in others for address in seat.held]

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _faults(self) -> dict[Callable[[], None], float]:
        return {
            self._break_link: 3,
            self._break_link_silently: 1,
            self._stall_link: 3,
            self._kill_worker: 2,
            self._hang_worker: 2,
            self._stop_worker: 1,
            self._kill_client: 1,
            self._stop_client: 0.5,
            self._hang_client: 1,
            self._probe_somebody: 1,
            self._impersonate: 2,
            self._hang_broker: 0.3,
            self._end_broker: 0.3,
        }

    def _hang_broker(self) -> None:
        if self.broker is not None:
            self.broker.hang(10 * self.world.rng.random() ** 2)

    def _probe_somebody(self) -> None:
        """Have the broker probe a peer that may be alive: a reused descriptor can point to the wrong one."""
        identities = [*self.world.network.routes, b"nobody"]
        if self.broker is not None:
            self.broker.do(partial(self.broker.probe, self.world.rng.choice(identities)))

    def _impersonate(self) -> None:
        """A connection of another role says something about a peer that it is not (C45)."""
        if self.broker is None or not self.roles or self.world.now < self.broker.hangs_until:
            return
        rng, ledger = self.world.rng, self.broker.referee.ledger
        messages: list[list[bytes]] = []
        for ticket in list(ledger.tickets.values())[:5]:
            if ticket.numbered:
                head = [*ticket.client, b"", wire.CX1]
                messages += [[*head, wire.BATCH, record(5, ticket.number)], head]
        for seat in list(ledger.seats.values())[:5]:
            if seat.x1:
                head = [*seat.route, wire.WX1]
                forged = [record(6, 0), ready_of(seat.service, 1), record(10, 0, bytes(4))]
                for address in seat.held:
                    forged += [record(4, address, body_of(b"forged")), record(11, address)]
                messages += [head, *([*head, wire.BATCH, each] for each in forged)]
        if messages:
            self.broker.do(partial(self.broker.take_forged, rng.choice(messages)))

    def _end_broker(self) -> None:
        """Kill or drain the broker; start another one later."""
        broker = self.broker
        if broker is None:
            return
        if self.world.chance(0.5) or self.world.now < broker.hangs_until:
            self._replace_broker(broker.die)
        else:
            self.world.note("broker drains")
            broker.drain()
            self.world.clock.after(self.world.rng.uniform(0, 3), partial(self._replace_broker, broker.stop))

    def _replace_broker(self, end: Callable[[], None]) -> None:
        if self.broker is not None and end in {self.broker.die, self.broker.stop}:
            end()
            self.broker = None
            self.world.events["broker started again"] += 1
            self.world.clock.after(self.world.rng.uniform(0, 8), self._start_broker)

    # ── what must be true at the end ─────────────────────────────────────────────────────────────────────────────────

    def _unwell(self) -> list[str]:
        """Return the names of those that have not recovered."""
        if self.broker is None or self.broker.machine.draining:
            return ["broker"]
        seats = self.broker.referee.ledger.seats
        unwell = [client.name for client in self.clients if not isinstance(client, BurstProcess) and not client.idle]
        for worker in self.workers:
            seat = seats.get(worker.route)
            credit = min(worker.session.credit, self.limits.max_credit)
            if not worker.well or seat is None or seat.held or seat.credit != credit:
                unwell.append(worker.name)
        if self.proxy is not None and not self.proxy.dealer.whole:
            unwell.append("the proxy")  # which does not know it yet
        return unwell + [name for name, process in self.processes.items() if not process.alive]

    def _serve_everybody(self) -> None:
        """Check that connections last and that every call is answered."""
        assert self.broker is not None
        connections = [worker.route for worker in self.workers]
        lost = self.broker.machine.stats.lost.copy()
        # A third-party worker that is busy and silent is lost when its grace is over (C34), or when a HEARTBEAT cannot
        # reach it, however well all else is.
        silent = sum(bool(seat.held) and not seat.x1 for seat in self.broker.referee.ledger.seats.values())
        self.world.note("all is well")
        for client in self.clients:
            if isinstance(client, CallerProcess):
                client.check_answered({peer[0] for peer in self.broker.referee.ledger.given_up})
        served = sorted({worker.service for worker in self.workers} & set(self.services))
        for client in self.clients:
            if not isinstance(client, BurstProcess):
                self._serve([(client, self.world.rng.choice(served))])
        for protocol in ("0.1", "0.2"):
            new = [PirateProcess(self.world, f"d{at}", protocol, self._choose, 1.0) for at in range(len(served))]
            self._serve(list(zip(new, served, strict=True)))
        caller = CallerProcess(self.world, "d", self._wish, 1.0)
        self._serve([(caller, service) for service in served])
        caller.check_answered(set())
        check(connections == [worker.route for worker in self.workers], "C13: a worker reconnected without need")
        rogues = self.broker.machine.stats.lost - lost
        for loss in (Loss.SILENT, Loss.UNREACHABLE):
            expected = min(silent, rogues[loss])
            rogues[loss] -= expected
            silent -= expected
        check(not +rogues, f"C13: workers were lost without need: {dict(rogues)}")

    def _end(self) -> None:
        """Check that nothing is left once all peers are gone and the last request has expired."""
        assert self.broker is not None
        self.world.note("all leave")
        for process in list(self.processes.values()):
            if isinstance(process, WorkerProcess) and self.world.chance(0.5):
                process.leave()
            else:
                process.die()
        self.world.clock.run(self.limits.expiry + max(self.limits.patience, self.limits.busy_grace) + 30.0)
        machine, referee = self.broker.machine, self.broker.referee
        directory, registry = machine.directory, machine.registry
        check(directory.services == {} and directory.workers == {}, "a service or worker is left")
        check(directory.proxies == {}, "a connection is left")
        check((registry.queued, registry.request_bytes, registry.running) == (0, 0, 0), "a count is not 0 at the end")
        check(registry.numbered == [], "X1: a number is left")
        check(directory.clients == {}, "a client is left")
        check(machine.deadline() is None, "a timer is left")
        buckets = {**machine._workers.beats._buckets, **registry.expiries._buckets}
        check(buckets == {}, "a timer's bucket is left")
        check(
            referee.ledger.tickets == {} and referee.ledger.seats == {},
            "the referee knows of something that the broker forgot",
        )
        self.broker.count()
