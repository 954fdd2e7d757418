"""Simulations of several brokers: meshes and trees, whose brokers are killed and whose links are cut.

`LinkedSimulation("mesh5", seed).run()` returns counts of events, or raises `Failed`.  There is no referee at the
brokers: the rules are checked where requests begin and end, and where messages pass a link.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from zmdp.mdp.broker.machine import TURN_WORK
from zmdp.mdp.limits import Limits
from zmdp.mdp.security.access import Permissions
from zmdp.mdp.wire import Message
from zmdp.testing.network import START, Dealer, Network, NetworkLink

from .actors import BrokerShell, Habits, Process, WorkerProcess
from .brokers import Kind, LinkedBroker, NextBroker, Settings
from .callers import CallerProcess, Wish
from .liars import Liar
from .pirates import PirateProcess
from .rules import check
from .scenario import UNSERVED, Scenario
from .strangers import LooseCaller, LooseWorker

TOPOLOGIES = ["mesh2", "mesh5", "tree"]
TREE = {"b1": "b0", "b2": "b0", "b3": "b1", "b4": "b1", "b5": "b2", "b6": "b2"}
"""The parent of each broker of a tree of depth 3."""
LONGEST_CUT = 40.0
"""Maximum duration of a cut between two brokers, in seconds."""


class LinkedSimulation(Scenario):
    """Brokers of a `topology` ("mesh2", "mesh5" or "tree"), with peers that move on to the next broker."""

    def __init__(self, topology: str, seed: int, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, trace)
        self.arguments = f"--brokers {topology} "
        world, rng = self.world, self.world.rng
        self.limits = Limits(
            heartbeat=rng.choice([0.5, 1.0, 2.0]), liveness=rng.choice([2, 3, 5]), expiry=rng.choice([20.0, 60.0]),
            busy_grace=rng.choice([5.0, 20.0]), max_attempts=rng.choice([1, 3, 3]),
            max_credit=rng.choice([3, 10_000, 10_000]), max_queue=rng.choice([10, 10_000, 10_000]),
        )  # fmt: skip
        self.habits = Habits(
            service_time=rng.choice([0.02, 0.2, 1.0]),
            parts=rng.choice([0, 3, 20]),
            crash=rng.choice([0, 0.05]),
            stuck=0.01,
            fails=rng.choice([0, 0.02, 0.1]),
            looks=world.chance(0.5),
        )
        self.links: list[tuple[str, Kind, str]] = []
        """Who opens a link, of which kind, to whom."""
        self.wrong: list[tuple[str, Kind, str]] = []
        """Links among them that are a mistake."""
        self._circle = False
        """Whether brokers are linked in a circle."""
        self.networks = [Network(world, name) for name in self._plan(topology)]
        self._others: list[Network] = []
        """Where no proper broker is."""
        self._settings = Settings(
            self.limits, self._roles() if world.chance(0.5) else {}, [network.name for network in self.networks],
            (TURN_WORK, 3, 1)[seed % 3],
        )  # fmt: skip
        world.user = "callers" if self._settings.roles else ""
        self.brokers: dict[str, LinkedBroker] = {}
        """The brokers that run, by name."""
        self._twin: LinkedBroker | None = None
        """A broker with the name of another one."""
        if world.chance(0.3):
            rng.choice([self._link_to_itself, self._link_in_a_circle, self._link_to_no_broker, self._add_twin])()
        slowness = rng.choice([0.01, 0.1, 1.0])
        for network in [*self.networks, *self._others]:
            network.slowness = slowness

    def _plan(self, topology: str) -> list[str]:
        """Choose which links there are; return the names of the brokers."""
        rng = self.world.rng
        if topology == "tree":
            self.links = [(child, "parent", parent) for child, parent in TREE.items()]
            return ["b0", *TREE]
        names = [f"b{number}" for number in range(int(topology.removeprefix("mesh")))]
        for at, one in enumerate(names):
            for other in names[at + 1 :]:
                both: list[tuple[str, Kind, str]] = [(one, "peer", other), (other, "peer", one)]
                self.links += rng.choice([both, both[:1], both[1:]])
        return names

    @staticmethod
    def _roles() -> dict[str, Permissions]:
        """Who may do what."""
        roles = [
            Permissions("brokers", call=("*",), offer=("*",), link=True),
            Permissions("callers", call=("*",), mmi="all"),
            Permissions("workers", offer=("*",), mmi="none"),
        ]
        return {role.name: role for role in roles}

    # ── mistakes ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _link_to_itself(self) -> None:
        name = self.world.rng.choice(self.networks).name
        self._link_wrongly(name, self.world.rng.choice(["peer", "parent"]), name)

    def _link_in_a_circle(self) -> None:
        """Make a circle of parents: in a tree of the root and a leaf, in a mesh of two brokers."""
        self._circle = True
        names = [network.name for network in self.networks]
        if len(self.links) == len(TREE):
            self._link_wrongly(names[0], "parent", names[-1])
        else:
            self._link_wrongly(names[0], "parent", names[1])
            self._link_wrongly(names[1], "parent", names[0])

    def _link_to_no_broker(self) -> None:
        """Link to a program that answers everything with what it got."""
        network = Network(self.world, "z0")
        network.listener = lambda message: self._echo(network, message)
        self._others.append(network)
        self._link_wrongly(self.world.rng.choice(self.networks).name, "peer", network.name)

    def _echo(self, network: Network, message: Message) -> None:
        if not self.world.calm:
            network.send(message)

    def _add_twin(self) -> None:
        self._others.append(Network(self.world, "y0"))

    def _link_wrongly(self, one: str, kind: Kind, other: str) -> None:
        self.world.events["wrong link"] += 1
        self.links.append((one, kind, other))
        self.wrong.append((one, kind, other))

    def _network(self, name: str) -> Network:
        return next(network for network in [*self.networks, *self._others] if network.name == name)

    # ── participants ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        world, rng = self.world, self.world.rng
        for network in self.networks:
            self._start_broker(network.name)
        for number in range(rng.randint(len(self.services), 7)):
            service = self.services[number] if number < len(self.services) else rng.choice(self.services)
            self._makers[f"w{number}"] = self._worker_maker(f"w{number}", service)
        if world.chance(0.3):
            self._makers["v0"] = partial(
                LooseWorker, world, "v0", rng.choice(self.services), header=b"MDPWX1", credit=2, connect=self._way()
            )
        for number in range(rng.randint(1, 6)):
            self._makers[f"c{number}"] = self._client_maker(f"c{number}")
        if world.chance(0.3):
            self._makers["f0"] = partial(LooseCaller, world, "f0", self._wish, self.pause, connect=self._way())
        for name in self._makers:
            self._supervise(name)
        if any(network.name == "y0" for network in self._others):
            one, other = rng.sample(self.networks, 2)
            link: tuple[Kind, Network] = (rng.choice(["peer", "parent"]), other)
            self._twin = LinkedBroker(world, self._network("y0"), self._settings, [link], one.name)
            world.events["twin"] += 1
        for number in range(rng.choice([0, 0, 0, 1, 2])):
            Liar(world, f"x{number}", self.services, self.networks, self.pause)
        self._next_fault()

    def _start_broker(self, name: str) -> None:
        self.world.note(f"{name} starts")
        links = [(kind, self._network(other)) for one, kind, other in self.links if one == name]
        # In a circle it is open which links are up; otherwise all but those that are a mistake.
        wrong = [self._network(other) for one, _, other in (self.links if self._circle else self.wrong) if one == name]
        self.brokers[name] = LinkedBroker(self.world, self._network(name), self._settings, links, wrong=wrong)

    def _wish(self) -> Wish:
        wish = super()._wish()
        if not self.world.chance(0.1):
            return wish
        name = self.world.rng.choice([*self._settings.brokers, "nobody"])
        return replace(wish, timeout=5.0, options={**wish.options, "broker": name})

    def _some(self) -> list[Network]:
        """Choose the brokers that a peer may connect to, in the order of preference."""
        return self.world.rng.sample(self.networks, self.world.rng.randint(1, min(3, len(self.networks))))

    def _way(self) -> NextBroker:
        """Choose the brokers that a peer connects to, one after the other."""
        return NextBroker(self._some())

    def _worker_maker(self, name: str, service: bytes) -> Callable[[], Process]:
        rng = self.world.rng
        return partial(
            WorkerProcess,
            self.world,
            name,
            service,
            protocol=rng.choice(["0.1", "0.2", "X1", "X1", "X1", "X1"]),
            kind=rng.choice(["threads", "asyncio", "fixed"]),
            concurrency=rng.choice([1, 1, 2, 4, 16]),
            heartbeat=rng.choice([0.4, self.limits.heartbeat, 3.0]),
            liveness=rng.choice([2, 3, 5]),
            habits=self.habits,
            networks=self._some(),
        )

    def _client_maker(self, name: str) -> Callable[[], Process]:
        rng = self.world.rng
        protocol = rng.choice(["0.1", "0.2", "X1", "X1", "X1", "X1", "X1"])
        if protocol != "X1":
            return partial(PirateProcess, self.world, name, protocol, self._choose, self.pause, self._way())
        return partial(
            CallerProcess,
            self.world,
            name,
            self._wish,
            self.pause,
            heartbeat=rng.choice([0.3, 1.0, 3.0]),
            liveness=rng.choice([2, 3, 5]),
            cancels=rng.choice([0, 0.3]),
            networks=self._some(),
        )

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _faults(self) -> dict[Callable[[], None], float]:
        return {
            self._break_link: 2,
            self._break_link_silently: 1,
            self._stall_link: 2,
            self._break_between_brokers: 2,
            self._silence_one_way: 2,
            self._cut: 1,
            self._kill_worker: 1,
            self._hang_worker: 1,
            self._stop_worker: 1,
            self._kill_client: 0.5,
            self._stop_client: 0.5,
            self._hang_client: 0.5,
            self._probe_somebody: 1,
            self._hang_broker: 0.5,
            self._end_broker: 0.5,
        }

    def _between_brokers(self) -> list[NetworkLink]:
        """Return the intact connections between brokers."""
        return [link for link in self._links() if link.owner in {network.name for network in self.networks}]

    def _break_between_brokers(self) -> None:
        links = self._between_brokers()
        if links:
            link, silently = self.world.rng.choice(links), self.world.chance(0.3)
            self.world.note(f"{link.identity.decode()}: the link breaks{' silently' if silently else ''}")
            link.fail(silently=silently)

    def _silence_one_way(self) -> None:
        """Nothing arrives in one direction of a link for a while; then it goes on, or the link breaks."""
        links = self._between_brokers()
        if not links:
            return
        rng = self.world.rng
        link = rng.choice(links)
        pipe = rng.choice([link.to_peer, link.to_broker])
        pipe.stalled_until = self.world.now + rng.uniform(1, 30)
        self.world.note(f"{link.identity.decode()}: one way is silent until {pipe.stalled_until - START:.3f}")
        if self.world.chance(0.5):
            self.world.clock.at(pipe.stalled_until - 0.1, partial(self._fail_if_whole, link))

    @staticmethod
    def _fail_if_whole(link: NetworkLink) -> None:
        if link.whole:
            link.fail()

    def _cut(self) -> None:
        """Cut two brokers off from each other for a while."""
        one, other = self.world.rng.sample(self.networks, 2)
        self.world.note(f"{one.name} and {other.name} are cut off from each other")
        one.cut_off.add(other.name)
        other.cut_off.add(one.name)
        for network, peer in ((one, other), (other, one)):
            for link in list(network.links.values()):
                if link.owner == peer.name:
                    link.fail(silently=self.world.chance(0.5))
        self.world.clock.after(LONGEST_CUT * self.world.rng.random() ** 2, partial(self._heal, one, other))

    def _heal(self, one: Network, other: Network) -> None:
        self.world.note(f"{one.name} and {other.name} can reach each other again")
        one.cut_off.discard(other.name)
        other.cut_off.discard(one.name)

    def _hang_broker(self) -> None:
        if self.brokers:
            self._a_broker().hang(10 * self.world.rng.random() ** 2)

    def _a_broker(self) -> LinkedBroker:
        return self.world.rng.choice(list(self.brokers.values()))

    def _probe_somebody(self) -> None:
        """Have a broker probe a peer that may be alive: a reused descriptor can point to the wrong one."""
        if self.brokers:
            broker = self._a_broker()
            broker.do(partial(broker.probe, self.world.rng.choice([*broker.network.routes, b"nobody"])))

    def _end_broker(self) -> None:
        """Kill or drain a broker; start another one under its name later."""
        if not self.brokers:
            return
        broker = self._a_broker()
        if self.world.chance(0.5) or self.world.now < broker.hangs_until:
            self._replace_broker(broker, broker.die)
        elif not broker.machine.draining:
            self.world.note(f"{broker.name} drains")
            broker.drain()
            self.world.clock.after(self.world.rng.uniform(0, 3), partial(self._replace_broker, broker, broker.stop))

    def _replace_broker(self, broker: BrokerShell, end: Callable[[], None]) -> None:
        if broker.alive:
            end()
            del self.brokers[broker.name]
            self.world.events["broker started again"] += 1
            self.world.clock.after(self.world.rng.uniform(0, 8), partial(self._start_broker, broker.name))

    # ── what must be true at the end ─────────────────────────────────────────────────────────────────────────────────

    def _calm_down(self) -> None:
        super()._calm_down()
        for network in self.networks:
            network.cut_off.clear()
        if self._twin is not None:
            self._twin.die()

    def _broker_of(self, worker: WorkerProcess) -> LinkedBroker | None:
        """Return the broker that a worker is connected to."""
        return self.brokers.get(worker.dealer.network.name) if isinstance(worker.dealer, Dealer) else None

    def _unwell(self) -> list[str]:
        unwell = [network.name for network in self.networks if network.name not in self.brokers]
        offered = {worker.service for worker in self.workers}
        unwell += [broker.name for broker in self.brokers.values() if not (broker.well and broker.reaches(offered))]
        unwell += [client.name for client in self.clients if not client.idle]
        for worker in self.workers:
            broker = self._broker_of(worker)
            known = None if broker is None or not worker.route else broker.worker(worker.route)
            credit = min(worker.session.credit, self.limits.max_credit)
            if not worker.well or known is None or known.held or known.credit != credit:
                unwell.append(worker.name)
        return unwell + [name for name, process in self.processes.items() if not process.alive]

    def _serve_everybody(self) -> None:
        """Check that every service is reachable from every broker, and that each call is executed once."""
        world = self.world
        world.note("all is well")
        given_up = {key for broker in self.brokers.values() for key in broker.given_up}
        for client in self.clients:
            if isinstance(client, CallerProcess):
                client.check_answered(given_up)
        if self._circle:
            return  # the link that closes it comes and goes, and may take a call with it
        connections = [worker.route for worker in self.workers]
        served = sorted({worker.service for worker in self.workers} & set(self.services))
        for client in self.clients:
            self._serve([(client, world.rng.choice(served))])
        callers = {
            name: CallerProcess(world, f"d{name}", self._wish, 1.0, connect=NextBroker([broker.network]))
            for name, broker in self.brokers.items()
        }
        self._serve_once([(caller, service) for caller in callers.values() for service in served])
        for name, caller in callers.items():
            for service in served:
                self._check_place(name, service, self._serve_once([(caller, service)]), self._nearest(name, service))
            self._address(caller, served)
            self._expect(caller, Wish(UNSERVED, wait=False), "ServiceNotFound 404")
            self._expect(caller, Wish(served[0], options={"broker": "nobody"}, timeout=9.0), "WorkerLost 502")
            caller.check_answered(set())
            caller.leave()
        check(connections == [worker.route for worker in self.workers], "C13: a worker reconnected without need")

    def _workers_at(self, name: str, service: bytes) -> set[str]:
        """Return the names of our workers that serve `service` at a broker."""
        broker = self.brokers[name]
        return {each.name for each in self.workers if each.service == service and self._broker_of(each) is broker}

    def _nearest(self, name: str, service: bytes) -> set[str]:
        """Return the names of the workers that are to serve `service`: over the fewest links from a broker."""
        near, beyond, seen = set[str](), {name}, set[str]()
        while beyond and not near and not (seen and self._circle):
            near = {worker for each in beyond for worker in self._workers_at(each, service)}
            seen |= beyond
            ends = [{one, other} for one, _, other in self.links if other in self.brokers]
            beyond = {each for pair in ends if pair & seen for each in pair if each in self.brokers} - seen
        return near

    def _serve_once(self, calls: list[tuple[PirateProcess | CallerProcess, bytes]], broker: str = "") -> list[str]:
        """Check that all calls at once are served and that each is executed once; return by which workers."""
        runs = self.world.runs
        runs.clear()
        self._serve(calls, {"broker": broker} if broker else {})
        check(len(runs) == len(calls), f"{len(calls)} calls, but {runs} were executed")
        check(all(len(names) == 1 for names in runs.values()), f"C44: {runs} were executed more than once")
        return [name for names in runs.values() for name in names]

    def _address(self, caller: CallerProcess, served: list[bytes]) -> None:
        """Check that a call that is addressed to a broker is served by a worker of that broker."""
        for name in self.brokers:
            for service in served:
                there = self._workers_at(name, service)
                if there:
                    self._check_place(name, service, self._serve_once([(caller, service)], name), there)

    def _check_place(self, name: str, service: bytes, workers: list[str], expected: set[str]) -> None:
        """Check which workers have done calls, unless these are strangers, who may be anywhere."""
        strangers = {each.name for each in self.processes.values() if isinstance(each, LooseWorker)}
        wrong = set(workers) - expected - strangers
        check(not expected or not wrong, f"{service!r} at {name} is served by {wrong}, not by {expected}")

    def _expect(self, caller: CallerProcess, wish: Wish, outcome: str) -> None:
        """Check that a call ends with an error soon."""
        events, name = self.world.events, f"X1 client: {outcome}"
        before = events[name]
        caller.do(partial(caller.begin, wish))
        self.world.clock.run(2.0)
        check(caller.idle and events[name] == before + 1, f"{caller.name}: {wish} has not ended with {outcome}")

    def _end(self) -> None:
        """Check that nothing is left once all peers are gone and the last request has expired."""
        self.world.note("all leave")
        for process in list(self.processes.values()):
            if isinstance(process, WorkerProcess) and self.world.chance(0.5):
                process.leave()
            else:
                process.die()
        end = self.world.now + self.limits.expiry + max(self.limits.patience, self.limits.busy_grace) + 90.0
        while self.world.now < end and any(broker.left for broker in self.brokers.values()):
            self.world.clock.run(5.0)
        self.world.clock.run(1.0)  # what was lost in the last moment is still to be withdrawn at the other brokers
        for broker in self.brokers.values():
            broker.check_empty()
            broker.count()
