"""What all simulations have in common: a course of events, peers that are restarted, and faults that hit them."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from functools import partial

from zmdp.mdp.wire import Route
from zmdp.testing.network import START, Network, NetworkLink

from .actors import Process, Stage, WorkerProcess
from .callers import CallerProcess, Wish
from .pirates import BurstProcess, Call, PirateProcess
from .rules import check

SERVICES = [b"echo", b"resize", b"count"]
UNSERVED = b"nobody-does-this"
RECOVERY = 600.0
"""Seconds within which everything must recover after the last fault."""
STEADY = 30.0
"""Seconds without a new connection after which connections count as stable; no stall lasts longer."""


class Failed(AssertionError):
    """A simulation broke a rule."""


class Scenario:
    """A simulated system, whose every event follows from its seed."""

    arguments = ""
    """Further arguments of the command that reproduces it."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.world = Stage(seed, trace)
        rng = self.world.rng
        self.duration = rng.uniform(10.0, 30.0)
        self.pause = rng.choice([0.1, 0.3, 1.0, 3.0])
        """Average seconds between two faults, and between two calls of a client."""
        self.services = SERVICES[: rng.randint(1, 3)]
        self.networks: list[Network] = []
        self.processes: dict[str, Process] = {}
        """The workers and clients by name; a dead one stays until it is replaced."""
        self._makers: dict[str, Callable[[], Process]] = {}

    @abstractmethod
    def _begin(self) -> None:
        """Start all participants."""

    @abstractmethod
    def _faults(self) -> dict[Callable[[], None], float]:
        """Return the faults that happen, and how often in relation to one another."""

    @abstractmethod
    def _unwell(self) -> list[str]:
        """Return the names of those that have not recovered."""

    @abstractmethod
    def _serve_everybody(self) -> None:
        """Check that connections last and that every call is answered."""

    @abstractmethod
    def _end(self) -> None:
        """Check that nothing is left once all peers are gone and the last request has expired."""

    def run(self) -> Counter[str]:
        try:
            self._begin()
            self.world.clock.run(self.duration)
            self._calm_down()
            self._recover()
            self._serve_everybody()
            self._end()
        except Exception as error:
            raise Failed(
                f"seed {self.seed}, after {self.world.now - START:.3f} s: {error!r}\n"
                f"to reproduce it: python tests/simulate.py {self.arguments}--seed {self.seed} --trace"
            ) from error
        return self.world.events

    # ── participants ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def workers(self) -> list[WorkerProcess]:
        return [process for process in self.processes.values() if isinstance(process, WorkerProcess) and process.alive]

    @property
    def clients(self) -> list[PirateProcess | BurstProcess | CallerProcess]:
        kinds = (PirateProcess, BurstProcess, CallerProcess)
        return [process for process in self.processes.values() if isinstance(process, kinds) and process.alive]

    def _supervise(self, name: str) -> None:
        """Start a process after a delay, and restart it whenever it has died."""

        def look() -> None:
            if self.world.calm:
                return
            self._start_if_dead(name)
            self._supervise(name)

        self.world.clock.after(self.world.rng.uniform(0, 4), look)

    def _start_if_dead(self, name: str) -> None:
        if name not in self.processes or not self.processes[name].alive:
            self.world.note(f"{name} starts")
            self.processes[name] = self._makers[name]()

    def _choose_service(self) -> bytes:
        rng = self.world.rng
        mmi = rng.choice([b"mmi.service", b"mmi.services", b"mmi.workers", b"mmi.stats", b"mmi.broker", b"mmi.what"])
        return rng.choices([rng.choice(self.services), UNSERVED, mmi], [20, 1, 2])[0]

    def _choose(self) -> Call:
        """Choose the next call of a 0.2 or 0.1 client."""
        rng = self.world.rng
        timeout = rng.choice([0.5, 2.0, 10.0])
        about = rng.choice(self.services)
        return Call(self._choose_service(), timeout, rng.randint(0, 3), self.world.chance(0.5), about=about)

    def _wish(self) -> Wish:
        """Choose the next call of an X1 client."""
        rng = self.world.rng
        service = self._choose_service()
        wait = self.world.chance(0.75)
        timeout = rng.choice([0.3, 2.0, 10.0])
        return Wish(
            service,
            timeout=rng.choice([timeout, None]) if service != UNSERVED or not wait else timeout,
            silence=rng.choice([0.5, 5.0, None, None]),
            stream=self.world.chance(0.5),
            wait=wait,
            options=rng.choice([{}, {"priority": 3}, {"user": "both", "admin": True}]),
            about=rng.choice(self.services),
            large=self.world.chance(0.05),
        )

    # ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _next_fault(self) -> None:
        self.world.clock.after(self.world.rng.expovariate(1 / self.pause), self._fault)

    def _fault(self) -> None:
        if self.world.calm:
            return
        faults = self._faults()
        fault = self.world.rng.choices(list(faults), list(faults.values()))[0]
        self.world.events[f"fault:{fault.__name__.replace('_', ' ')}"] += 1
        fault()
        self._next_fault()

    def _links(self) -> list[NetworkLink]:
        """Return all intact connections."""
        return [link for network in self.networks for link in network.links.values()]

    def _break_link(self, *, silently: bool = False) -> None:
        links = self._links()
        if links:
            link = self.world.rng.choice(links)
            self.world.note(f"{link.identity.decode()}: the connection breaks{' silently' if silently else ''}")
            link.fail(silently=silently)

    def _break_link_silently(self) -> None:
        self._break_link(silently=True)

    def _stall_link(self) -> None:
        links = self._links()
        if links:
            rng = self.world.rng
            link = rng.choice(links)
            until = self.world.now + 30 * rng.random() ** 2
            self.world.note(f"{link.identity.decode()}: the connection stalls until {until - START:.3f}")
            for pipe in rng.choice([[link.to_peer], [link.to_broker], [link.to_peer, link.to_broker]]):
                pipe.stalled_until = until

    def _kill_worker(self) -> None:
        if self.workers:
            self.world.rng.choice(self.workers).die()

    def _hang_worker(self) -> None:
        if self.workers:
            self.world.rng.choice(self.workers).hang(20 * self.world.rng.random() ** 2)

    def _stop_worker(self) -> None:
        running = [worker for worker in self.workers if self.world.now >= worker.hangs_until]
        if running:
            self.world.rng.choice(running).leave()

    def _kill_client(self) -> None:
        if self.clients:
            self.world.rng.choice(self.clients).die()

    def _stop_client(self) -> None:
        callers = [client for client in self.clients if isinstance(client, CallerProcess)]
        running = [client for client in callers if self.world.now >= client.hangs_until]
        if running:
            self.world.rng.choice(running).leave()

    def _hang_client(self) -> None:
        if self.clients:
            self.world.rng.choice(self.clients).hang(20 * self.world.rng.random() ** 2)

    # ── what must be true at the end ─────────────────────────────────────────────────────────────────────────────────

    def _calm_down(self) -> None:
        """End the faults and the calls."""
        self.world.note("no more faults")
        self.world.calm = True
        for network in self.networks:
            network.slowness = 0.01

    def _recover(self) -> None:
        """Check that every call ends, and that every worker is registered and idle again and stays so."""
        began = well_since = self.world.now
        connections: list[Route] = []
        while self.world.now < well_since + STEADY:
            for name in self._makers:
                self._start_if_dead(name)
            self.world.clock.run(5.0)
            before, connections = connections, [worker.route for worker in self.workers]
            unwell = self._unwell()
            if unwell or connections != before:
                well_since = self.world.now
            # A worker may have to connect several times until it knows the broker's heartbeat, but not endlessly.
            check(self.world.now < began + RECOVERY, f"not recovered: {unwell or 'workers connect again and again'}")

    def _serve(
        self, calls: list[tuple[PirateProcess | CallerProcess, bytes]], options: dict[str, str] | None = None
    ) -> None:
        """Have all clients call their services at once, and check that each gets its reply."""
        replies = sum(client.replies for client in {client for client, _ in calls})
        for client, service in calls:
            stream = self.world.chance(0.5)
            if isinstance(client, PirateProcess):
                # One whose connection has failed silently, and who does not know it yet, needs to send twice.
                call = Call(service, timeout=90.0, retries=0 if client.connected else 1, stream=stream)
                client.do(partial(client.begin, call))
            else:
                client.do(partial(client.begin, Wish(service, stream=stream, options=options or {})))
        for _ in range(200):
            if not all(client.idle for client, _ in calls):
                self.world.clock.run(1.0)
        got = sum(client.replies for client in {client for client, _ in calls}) - replies
        check(got == len(calls), f"{calls[0][0].name} and others were not served though all is well")
