"""Kill real brokers, Titanics and workers under load, and check that no accepted request is lost.

python tests/crash.py --kills 200 --db sqlite --titanics 1 --seed 1
python tests/crash.py --kills 200 --db postgres --titanics 2

The seed decides what happens to which program, and the pauses in between; what the program is doing at that moment
depends on the machine.  Exit code 1 means that something is wrong; the folder with database, logs and report is kept.
"""

import itertools
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import click
import sqlalchemy as sa
from support.databases import wrong_counts
from support.processes import BIN, TIMEOUT_SECONDS, eventually, free_endpoint

from zmdp.clients import Client, Reply, RequestError, RequestTimeout, ServiceError
from zmdp.titanic import Ticket, Titanic, UnknownTicket, schema
from zmdp.titanic.frames import unpack
from zmdp.titanic.store.models import StoredPartial, StoredRequest

SERVICES: Final = Path(__file__).parent / "titanic"
WORKERS: Final = ("echo", "echo", "parts", "parts", "quick", "quick")
HEARTBEAT: Final = 0.2
LIVENESS: Final = 40
LEASE: Final = 2.0
CALL_TIMEOUT_SECONDS: Final = 3.0
"""How long callers wait for a reply."""
AT_WORK: Final = {"broker": "ready on", "titanic": "serving titanic.", "worker": ": serving at "}
"""What programs log once they have started."""
GRACEFUL_END: Final = TIMEOUT_SECONDS
"""Maximum seconds from SIGTERM until a program has ended."""
TICK: Final = 0.02
SHOWN: Final = 20
"""Maximum number of troubles that are printed one by one."""


# ── requests: everything about one is derived from its number ────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Task:
    """The request with this number: what is sent, which reply is right, and what its caller does with it."""

    seed: int
    number: int

    def _random(self, purpose: str) -> random.Random:
        return random.Random(f"{self.seed} {self.number} {purpose}")

    @property
    def streams(self) -> bool:
        return self.number % 4 == 0

    @property
    def fails(self) -> bool:
        return self.number % 10 == 7

    @property
    def count(self) -> int:
        """How many PARTIALs it has: occasionally more than Titanic buffers."""
        return 150 if self.number % 60 == 0 else 1 + self.number % 17

    @property
    def payload(self) -> bytes:
        rng = self._random("payload")
        return rng.randbytes(rng.choice((0, 20, 500, 2000)) if rng.random() < 0.97 else 300_000)

    @property
    def request(self) -> tuple[str, bytes, bytes, bytes]:
        how = b"%d" % self.count if self.streams else b"fail" if self.fails else b"echo"
        return f"crash.{'parts' if self.streams else 'echo'}", b"%d" % self.number, how, self.payload

    @property
    def options(self) -> dict[str, Any]:
        rng = self._random("options")
        delay = {"delay": rng.uniform(0, 1.5)} if rng.random() < 0.1 else {}
        return {"priority": rng.choice((0, 0, 0, 3, 9)), **delay}

    @property
    def closed_unread(self) -> bool:
        return self._random("close").random() < 0.03

    @property
    def closed_when_read(self) -> bool:
        return self._random("close").random() < 0.3

    def mark_of(self, outcome: Reply | ServiceError) -> str:
        """Return the mark of the execution that produced `outcome`.  Raises `Wrong` if it is wrong for this task."""
        if isinstance(outcome, ServiceError):
            mark, _, payload = (outcome.detail or b"").partition(b" ")
            right = self.fails and not self.streams and outcome.code == 422 and payload == self.payload
            right = right and outcome.text == f"{self.number} fails, as it should"
        else:
            number, mark, rest = (*outcome, b"", b"", b"")[:3]
            right = len(outcome) == 3 and number == b"%d" % self.number
            right = right and rest == (b"%d" % self.count if self.streams else self.payload)
            right = right and (self.streams or not self.fails)
        if not right:
            raise Wrong(f"wrong reply: {outcome!r:.200}")
        return mark.decode()

    def mark_of_part(self, at: int, part: Reply) -> str:
        """Do the same for the PARTIAL with this number."""
        if not self.streams or at >= self.count:
            raise Wrong(f"PARTIAL {at} is one too many: {part!r:.200}")
        number, mark, told, slice_ = (*part, b"", b"", b"", b"")[:4]
        if (number, told, slice_) != (b"%d" % self.number, b"%d" % at, self.payload[at :: self.count]):
            raise Wrong(f"wrong PARTIAL {at}: {part!r:.200}")
        return mark.decode()


class Wrong(Exception):
    """An observation that must not occur."""


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Program:
    """A command that is restarted whenever it has ended."""

    def __init__(self, role: str, name: str, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self.role = role
        self.name = name
        self._command = [str(BIN / command[0]), *command[1:]]
        self._log = (folder / f"{name}.log").open("a+b")
        self._env = {**os.environ, **env}
        self.thaw_at: float | None = None
        """When it continues, if it is frozen."""
        self.must_end_by: float | None = None
        """When it must have ended, if it was sent SIGTERM."""
        self.start()

    def start(self) -> None:
        self.thaw_at = self.must_end_by = None
        self.note("started")
        self._started_at = self._log.seek(0, os.SEEK_END)
        self._popen = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, cwd=SERVICES, env=self._env
        )

    def note(self, what: str) -> None:
        """Write a line of the harness to its log."""
        self._log.write(f"───── {datetime.now():%H:%M:%S.%f} {what}\n".encode())
        self._log.flush()

    def has_said(self, text: str) -> bool:
        """Return whether its log since the last start contains the text."""
        self._log.seek(self._started_at)
        return text.encode() in self._log.read()

    def signal(self, number: signal.Signals) -> None:
        self.note(number.name)
        self._popen.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._popen.wait()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def ended(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return self._popen.poll()

    def is_undisturbed(self) -> bool:
        return self.thaw_at is None and self.must_end_by is None and self.ended() is None

    def close(self) -> int:
        """End it for good; return the exit code."""
        if self.ended() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        try:
            return self._popen.wait(GRACEFUL_END)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL
        finally:
            self._log.close()


class Database:
    """A SQLite file, or a PostgreSQL cluster from tests/support/postgres.py."""

    def __init__(self, url: str, cluster: Any = None) -> None:
        self.url = url
        self.cluster = cluster
        self.disturbed_at = float("-inf")
        parsed = schema.database_url(url)
        self.engine = sa.create_engine(parsed, poolclass=sa.NullPool)

    def cut(self) -> None:
        """Terminate all connections except the harness's own."""
        self.disturbed_at = time.monotonic()
        ours = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND "
        with self.engine.connect() as connection:
            connection.exec_driver_sql(ours + "backend_type = 'client backend'")

    def restart(self) -> None:
        """Restart the server like after a crash: `immediate` waits for no connection."""
        self.disturbed_at = time.monotonic()
        self.cluster.restart("immediate")
        self.disturbed_at = time.monotonic()

    def rows(self, *columns: Any) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(sa.select(*columns)).all())

    def all_ended(self) -> bool:
        """Return whether no request waits or runs; False if the database does not answer."""
        waiting = sa.exists().where(StoredRequest.state.in_(("pending", "delayed", "running")))
        try:
            with self.engine.connect() as connection:
                return not connection.scalar(sa.select(waiting))
        except sa.exc.DBAPIError:
            return False


@contextmanager
def database(kind: str, folder: Path) -> Iterator[Database]:
    """Yield the database for one run; on PostgreSQL with its tables."""
    if kind == "sqlite":
        yield Database(f"sqlite:///{folder / 'titanic.db'}")
        return
    from support.postgres import cluster

    with cluster(fsync=True) as postgres:
        found = Database(postgres.url(), postgres)
        subprocess.run([BIN / "titanic", "db", "upgrade", "--db", found.url], check=True, stdout=sys.stderr)
        yield found


class Site:
    """All programs, and the faults that are injected into them."""

    def __init__(self, db: Database, titanics: int, folder: Path, troubles: "Troubles") -> None:
        self.db = db
        self.folder = folder
        self.executions = folder / "executions"
        self.executions.touch()
        self.done = Counter[str]()
        """Counts of the injected faults."""
        self._troubles = troubles
        self.endpoint = free_endpoint()
        beats = ("--heartbeat", str(HEARTBEAT), "--liveness", str(LIVENESS))
        commands: list[tuple[str, str, tuple[str, ...]]] = [
            ("broker", "broker", ("mdp-broker", "--bind", self.endpoint, "--drain-timeout", "2", *beats))
        ]
        serve = ("titanic", "serve", "--db", db.url, "--lease", str(LEASE), "--broker", self.endpoint, *beats)
        commands += [("titanic", f"titanic-{at}", serve) for at in range(titanics)]
        for at, each in enumerate(WORKERS):
            command = ("mdworker", f"crash_services:{each}", "--broker", self.endpoint, *beats)
            commands.append(("worker", f"worker-{each}-{at}", command))
        self.programs = [Program(*each, folder, {"CRASH_LOG": str(self.executions)}) for each in commands]

    def wait_until_ready(self) -> None:
        with Client(self.endpoint, timeout=TIMEOUT_SECONDS) as client:
            for each in (
                "titanic.request",
                "titanic.reply",
                "titanic.close",
                "crash.echo",
                "crash.parts",
                "crash.quick",
            ):
                eventually(lambda each=each: client.available(each))

    def look(self) -> None:
        """Restart programs that have ended, and continue those that were frozen long enough."""
        now = time.monotonic()
        for each in self.programs:
            code = each.ended()
            if code is not None:
                self._judge(each, code)
                each.start()
            elif each.thaw_at is not None and now >= each.thaw_at:
                each.thaw_at = None
                each.signal(signal.SIGCONT)
            elif each.must_end_by is not None and now >= each.must_end_by:
                self._troubles.add(f"{each.name} has not ended {GRACEFUL_END:g} s after SIGTERM")
                each.kill()

    def _judge(self, program: Program, code: int) -> None:
        if program.must_end_by is not None:
            if code not in {0, -signal.SIGTERM}:  # the latter: it had not come so far as to handle it
                self._troubles.add(f"{program.name} ended with {code} after SIGTERM")
        elif time.monotonic() < self.db.disturbed_at + TIMEOUT_SECONDS and not program.has_said(AT_WORK["titanic"]):
            self.done["Titanic found no database to start with"] += 1
        else:
            self._troubles.add(f"{program.name} ended by itself, with {code}: see its log")
        program.note(f"ended with {code}")

    def kill(self, role: str, rng: random.Random) -> None:
        for program in self._one_of(role, rng):
            self._kill(program)

    def kill_all(self, rng: random.Random) -> None:
        """Kill all programs at once, except the database."""
        for each in rng.sample(self.programs, len(self.programs)):
            self._kill(each)

    def _kill(self, program: Program) -> None:
        self.done[f"kill -9 {program.role}"] += 1
        program.kill()
        program.start()

    @property
    def kills(self) -> int:
        return sum(number for what, number in self.done.items() if what.startswith("kill"))

    def end(self, role: str, rng: random.Random) -> None:
        """Send SIGTERM to a program; `look` will restart it."""
        for program in filter(Program.is_undisturbed, self._one_of(role, rng)):
            self.done[f"SIGTERM {role}"] += 1
            program.must_end_by = time.monotonic() + GRACEFUL_END
            program.signal(signal.SIGTERM)

    def freeze(self, role: str, rng: random.Random) -> None:
        """Freeze a program for so long that its lease or liveness expires; `look` will continue it."""
        for program in filter(Program.is_undisturbed, self._one_of(role, rng)):
            self.done[f"SIGSTOP {role}"] += 1
            taken_for_dead = LEASE if role == "titanic" else HEARTBEAT * LIVENESS
            # Now and then longer than the other Titanic waits for a lock that this one may have.
            more = rng.uniform(4, 7) if role == "titanic" and rng.random() < 0.15 else rng.uniform(0.3, 2)
            program.thaw_at = time.monotonic() + taken_for_dead + more
            program.signal(signal.SIGSTOP)

    def _one_of(self, role: str, rng: random.Random) -> list[Program]:
        """Choose a program to disturb, usually one that has started: on a slow machine, none ever would otherwise."""
        found = [each for each in self.programs if each.role == role]
        if rng.random() < 0.75:
            found = [each for each in found if each.is_undisturbed() and each.has_said(AT_WORK[role])]
        return [rng.choice(found)] if found else []

    def cut(self, rng: random.Random) -> None:
        del rng
        with suppress(sa.exc.DBAPIError):
            self.db.cut()
            self.done["all database connections cut"] += 1

    def restart_database(self, rng: random.Random) -> None:
        del rng
        self.done["database restarted"] += 1
        self.db.restart()

    def faults(self) -> list[tuple[float, Callable[[random.Random], None]]]:
        """Return the possible faults and their weights."""
        found: list[tuple[float, Callable[[random.Random], None]]] = [(0.15, self.kill_all)]
        for role, kills, ends, freezes in (
            ("broker", 2.0, 0.3, 0.3), ("titanic", 4.0, 0.7, 1.2), ("worker", 4.0, 0.5, 0.5),
        ):  # fmt: skip
            for weight, fault in ((kills, self.kill), (ends, self.end), (freezes, self.freeze)):
                found.append((weight, lambda rng, fault=fault, role=role: fault(role, rng)))
        if self.db.cluster is not None:
            found += [(1.0, self.cut), (1.0, self.restart_database)]
        return found

    def disturb(self, kills: int, pause: float, rng: random.Random, tell: Callable[[], None]) -> None:
        """Inject faults until `kills` programs have been killed, on average every `pause` seconds."""
        weights, faults = zip(*self.faults(), strict=True)
        while self.kills < kills:
            until = time.monotonic() + max(0.02, rng.expovariate(1 / pause))
            while time.monotonic() < until:
                self.look()
                tell()
                time.sleep(TICK)
            rng.choices(faults, weights)[0](rng)

    def settle(self, done: Callable[[], bool], deadline: float, tell: Callable[[], None]) -> bool:
        """Inject no more faults, and wait until `done` returns true; return False if it does not in time."""
        for each in self.programs:
            if each.thaw_at is not None:
                each.thaw_at = 0.0
        while not done():
            if time.monotonic() > deadline:
                return False
            self.look()
            tell()
            time.sleep(TICK)
        return True

    def close(self) -> None:
        """End the programs, those that depend on others first."""
        for each in sorted(self.programs, key=lambda each: each.role, reverse=True):
            code = each.close()
            if code not in {0, -signal.SIGTERM}:
                self._troubles.add(f"{each.name} ended with {code} at the end of the run")


# ── callers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Troubles:
    """Collects observations that must not occur."""

    def __init__(self) -> None:
        self.all: list[str] = []

    def add(self, text: str) -> None:
        self.all.append(text)
        click.echo(f"\nWRONG: {text}", err=True)


class Book:
    """What callers know: which requests were accepted, and their outcomes."""

    def __init__(self, troubles: Troubles) -> None:
        self._troubles = troubles
        self._lock = threading.Lock()
        self.uuids: dict[int, str] = {}
        """UUIDs of the accepted requests, by number."""
        self.keys: dict[int, str] = {}
        self.marks: dict[int, str] = {}
        """The execution whose reply was fetched, by number."""
        self.closed: set[int] = set()
        self.finished = 0
        """Number of accepted requests whose reply was read, or that were closed."""
        self.errors: dict[str, Counter[str]] = defaultdict(Counter)
        """Counts of errors by attempted step."""

        self.waited = 0
        """Number of replies that came as the answers to submissions."""
        self.submitting: list[float] = []
        """Durations, in seconds, of the submissions that returned a UUID."""

    def error(self, what: str, error: Exception) -> None:
        text = "" if isinstance(error, RequestTimeout) else f": {error}"
        with self._lock:
            self.errors[what][f"{type(error).__name__}{text:.90}"] += 1

    def accepted(self, task: Task, uuid: str) -> None:
        with self._lock:
            before = self.uuids.setdefault(task.number, uuid)
        if before != uuid:
            self.wrong(task, f"its key stands for {before} and for {uuid}")

    def saw(self, task: Task, mark: str) -> None:
        """Record a fetched reply: a request must never have two different ones."""
        with self._lock:
            before = self.marks.setdefault(task.number, mark)
        if before != mark:
            self.wrong(task, f"its reply changed: it was of execution {before}, then of {mark}")

    def finish(self) -> None:
        with self._lock:
            self.finished += 1

    def wrong(self, task: Task, text: str) -> None:
        self._troubles.add(f"request {task.number} ({self.uuids.get(task.number)}): {text}")


class Caller:
    """Submits requests at a steady rate, and fetches their replies concurrently."""

    FETCHERS: Final = 4

    def __init__(self, site: Site, book: Book, numbers: Iterator[int], *, rate: float, keyed: bool, seed: int) -> None:
        self._book = book
        self._numbers = numbers
        self._pause = 1 / rate
        self._keyed = keyed
        self._seed = seed
        self._client = Client(
            site.endpoint, timeout=CALL_TIMEOUT_SECONDS, retries=0, heartbeat=HEARTBEAT, liveness=LIVENESS
        )
        self._titanic = Titanic(self._client)
        self._no_more = threading.Event()
        self._given_up = threading.Event()
        self._open: queue.Queue[Errand | None] = queue.Queue()
        self._pool = ThreadPoolExecutor(2)
        self._submitter = threading.Thread(target=self._submit_steadily)
        self._fetchers = [threading.Thread(target=self._fetch_all) for _ in range(self.FETCHERS)]
        for each in (self._submitter, *self._fetchers):
            each.start()

    def stop(self) -> None:
        """Submit no more requests, but go on fetching."""
        self._no_more.set()
        self._submitter.join()

    def close(self) -> None:
        """Stop, even if replies have not been fetched."""
        self._given_up.set()
        self.stop()
        for _ in self._fetchers:
            self._open.put(None)
        for each in self._fetchers:
            each.join()
        self._pool.shutdown()
        self._client.close()

    def _submit_steadily(self) -> None:
        due = time.monotonic()
        while not self._no_more.wait(max(0.0, due - time.monotonic())):
            due += self._pause
            task = Task(self._seed, next(self._numbers))
            at_once = 2 if self._keyed and task.number % 5 == 0 else 1
            for ticket in [*self._pool.map(self._submit, [task] * at_once)][:1]:
                if ticket is not None:
                    self._open.put(Errand(task, ticket))

    def _submit(self, task: Task) -> Ticket | None:
        """Submit the task, again and again until it is accepted."""
        key = {"key": f"{self._seed}-{task.number}"} if self._keyed else {}
        if key:
            self._book.keys[task.number] = key["key"]
        while not self._given_up.is_set():
            began = time.monotonic()
            try:
                ticket = self._titanic.submit(*task.request, **key, **task.options)
            except RequestError as error:
                self._book.error("submit", error)
                self._no_more.wait(self._pause)
            else:
                self._book.submitting.append(time.monotonic() - began)
                self._book.accepted(task, ticket.uuid)
                return ticket
        return None

    def _fetch_all(self) -> None:
        rng = random.Random()
        while (errand := self._open.get()) is not None and not self._given_up.is_set():
            try:
                done = self._pursue(errand, rng)
            except RequestError as error:
                done = False
                self._book.error(errand.stage, error)
                self._given_up.wait(0.1)
            except Wrong as error:
                done = True
                self._book.wrong(errand.task, str(error))
            except Exception as error:  # noqa: BLE001 - whatever it is, a caller must not see it
                done = True
                self._book.wrong(errand.task, f"{errand.stage} raised {error!r}")
            if done:
                self._book.finish()
            else:
                self._open.put(errand)

    def _pursue(self, errand: "Errand", rng: random.Random) -> bool:
        """Perform the next steps; return whether the errand is done.  Raises `RequestError`, `Wrong`."""
        task = errand.task
        if errand.stage == "fetch":
            if self._keyed and rng.random() < 0.1:
                self._submit(task)  # with its key, submitting it again changes nothing
            if not task.closed_unread and not self._fetch(errand, rng):
                return False
            if not task.closed_unread and not task.closed_when_read:
                return True
            errand.stage = "close"
        if errand.stage == "close":
            errand.ticket.close()
            self._book.closed.add(task.number)
            errand.stage = "look after closing"
        if self._keyed and rng.random() < 0.2:
            self._submit(task)
        check_gone(errand.ticket)
        return True

    def _fetch(self, errand: "Errand", rng: random.Random) -> bool:
        way = rng.choice(("look", "wait", "follow"))
        if way == "look" and not look_whether_ready(errand):
            self._given_up.wait(0.02)
            return False
        if way == "follow":
            errand.follow(CALL_TIMEOUT_SECONDS)
        for _ in range(rng.choice((1, 1, 2))):
            self._book.saw(errand.task, errand.result(CALL_TIMEOUT_SECONDS if way != "look" else 0))
        return True


class WaitingCaller:
    """Submits many requests with keys at once, waits for the replies, and repeats those that have none."""

    FIRST: Final = 1_000_000_000
    """Above the numbers of all tasks."""
    MAX_REQUESTS: Final = 100

    def __init__(self, site: Site, book: Book, at: int, seed: int) -> None:
        self._book = book
        self._seed = seed
        self._rng = random.Random(f"{seed} {at} waiting")
        self._numbers = itertools.count(self.FIRST * (at + 1))
        self._client = Client(
            site.endpoint, timeout=CALL_TIMEOUT_SECONDS, retries=0, heartbeat=HEARTBEAT, liveness=LIVENESS
        )
        self._no_more = threading.Event()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """Submit no more requests once those submitted have their replies."""
        self._no_more.set()
        self._thread.join()

    def close(self) -> None:
        """Stop, even if replies are missing."""
        self._given_up.set()
        self.stop()
        self._client.close()

    def _run(self) -> None:
        while not self._no_more.is_set():
            tasks = [Task(self._seed, next(self._numbers)) for _ in range(self._rng.randint(1, self.MAX_REQUESTS))]
            for task in tasks:
                self._book.keys[task.number] = f"{self._seed}-{task.number}"
            missing = tasks
            while missing and not self._given_up.is_set():
                missing = self._ask(missing)
            self._book.waited += len(tasks) - len(missing)
            if self._rng.random() < 0.1:
                self._ask(tasks)  # whatever has its reply gets the same again

    def _ask(self, tasks: Sequence[Task]) -> list[Task]:
        """Submit requests, and return those that have no reply yet."""
        asked = [
            self._client.submit(
                "titanic.request", b"crash.quick", b"%d" % task.number,
                options={"key": self._book.keys[task.number], "reply": True},
            )
            for task in tasks
        ]  # fmt: skip
        missing = [task for task, future in zip(tasks, asked, strict=True) if not self._saw(task, future)]
        if missing:
            self._given_up.wait(0.05)
        return missing

    def _saw(self, task: Task, future: "Future[Reply]") -> bool:
        """Record the reply to a task; return whether there is one."""
        try:
            status, *frames = future.result()
        except RequestError as error:
            self._book.error("wait", error)
            return False
        if status == b"200" and frames[0].split()[0] == b"%d" % task.number:
            self._book.saw(task, frames[0].split()[1].decode())
        elif status == b"300" or frames == [b"database"]:  # not yet; or Titanic has failed
            self._book.error("wait", ServiceError(int(status[:3]), status.decode()))
            return False
        else:
            self._book.wrong(task, f"wrong reply: {[status, *frames]!r:.200}")
        return True


class Errand:
    """An accepted request whose outcome its caller awaits."""

    def __init__(self, task: Task, ticket: Ticket) -> None:
        self.task = task
        self.ticket = ticket
        self.stage = "fetch"
        self._parts = 0
        """Number of PARTIALs read so far."""

    def result(self, timeout: float) -> str:
        """Return the mark of the execution that produced the reply.  Raises `RequestError`, `Wrong`."""
        try:
            outcome: Reply | ServiceError = self.ticket.result(timeout)
        except ServiceError as error:
            outcome = error
        except UnknownTicket:
            raise Wrong("lost: it was accepted, and Titanic says that it knows no such request") from None
        return self.task.mark_of(outcome)

    def follow(self, timeout: float) -> None:
        """Read the next PARTIALs, which may come from several executions."""
        try:
            with closing(self.ticket.partials(self._parts, timeout=timeout)) as parts:
                for part in parts:
                    self.task.mark_of_part(self._parts, part)
                    self._parts += 1
        except ServiceError:
            return  # it failed, which `result` looks into
        except UnknownTicket:
            raise Wrong("lost: it was accepted, and Titanic knows no PARTIALs of it") from None
        if self.task.streams and self._parts != self.task.count:
            raise Wrong(f"{self._parts} PARTIALs, and then the end: it has {self.task.count}")

    def check_parts(self, mark: str, timeout: float) -> None:
        """Check that all stored PARTIALs come from the execution of the FINAL."""
        if not self.task.streams:
            return
        parts = list(self.ticket.partials(timeout=timeout))
        marks = {self.task.mark_of_part(at, part) for at, part in enumerate(parts)}
        if len(parts) != self.task.count:
            raise Wrong(f"{len(parts)} PARTIALs are kept: it has {self.task.count}")
        if marks != {mark}:
            raise Wrong(f"PARTIALs of executions {sorted(marks)} are kept, and a FINAL of {mark}")


def look_whether_ready(errand: Errand) -> bool:
    try:
        return errand.ticket.ready()
    except UnknownTicket:
        raise Wrong("lost: it was accepted, and Titanic does not know whether it is ready") from None


def check_gone(ticket: Ticket) -> None:
    try:
        found: object = ticket.result(0)
    except UnknownTicket:
        return
    except ServiceError as error:
        found = error
    raise Wrong(f"closed, but still there: {found!r:.200}")


# ── afterwards ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Audit:
    """Compares the tables, once nothing runs any more, with what callers know."""

    def __init__(self, site: Site, book: Book, seed: int) -> None:
        self._site = site
        self._book = book
        self._seed = seed
        self._rows = site.db.rows(
            StoredRequest.id,
            StoredRequest.uuid,
            StoredRequest.state,
            StoredRequest.key,
            StoredRequest.attempts,
            StoredRequest.holder,
            StoredRequest.body,
        )
        self._states = {row.uuid.hex: row.state for row in self._rows}
        self._executed = Counter(int(line.split()[0]) for line in site.executions.read_bytes().splitlines())
        self.stored = Counter(int(unpack(row.body)[0]) for row in self._rows)
        """Number of stored requests, by task number."""
        for number in book.closed:
            self.stored[number] += 1

    @property
    def lost(self) -> list[int]:
        kept = self._book.uuids.keys() - self._book.closed
        return sorted(number for number in kept if self._book.uuids[number] not in self._states)

    @property
    def missing(self) -> list[int]:
        kept = self._book.uuids.keys() - self._book.closed - set(self.lost)
        return sorted(n for n in kept if self._states[self._book.uuids[n]] not in {"done", "failed"})

    @property
    def stored_twice(self) -> int:
        return sum(number - 1 for number in self.stored.values())

    @property
    def executions(self) -> int:
        return sum(self._executed.values())

    @property
    def executed_again(self) -> int:
        return sum(max(0, executed - self.stored[number]) for number, executed in self._executed.items())

    @property
    def attempts(self) -> dict[str, int]:
        """Number of requests by number of attempts."""
        return {str(n): count for n, count in sorted(Counter(row.attempts for row in self._rows).items())}

    def states(self) -> Counter[str]:
        return Counter(row.state for row in self._rows)

    def troubles(self) -> Iterator[str]:
        """Yield what is wrong with the tables."""
        for number in self.lost:
            yield f"request {number} ({self._book.uuids[number]}) was accepted and is not there"
        for number in sorted(self._book.closed):
            if self._is_there(number) and not self.may_come_back(number):
                yield f"request {number} ({self._book.uuids[number]}) was closed and is there"
        for row in self._rows:
            if row.state not in {"done", "failed"}:
                yield f"request {row.uuid.hex} is {row.state}, after {row.attempts} attempts, held by {row.holder}"
        if any(wrong := wrong_counts(self._site.db.engine)):
            yield f"counts of rows, and what is kept instead: {wrong}"
        for key, count in Counter(row.key for row in self._rows if row.key is not None).items():
            if count > 1:
                yield f"{count} requests were stored for the key {key}"
        for number, stored in self.stored.items():
            if number in self._book.keys and stored > 1:
                yield f"{stored} requests were stored for request {number}, which has a key"
        ended = Counter(int(unpack(row.body)[0]) for row in self._rows if row.state in {"done", "failed"})
        for number, count in ended.items():
            if self._executed[number] < count:
                yield f"{count} requests {number} have ended, of which {self._executed[number]} were executed"

    def _is_there(self, number: int) -> bool:
        return self._book.uuids[number] in self._states

    def may_come_back(self, number: int) -> bool:
        """Return whether a request may be stored again once it is closed.

        Without a key, it is forgotten then; and a Titanic that was frozen when the broker gave the submission to
        another one has it still.
        """
        return number not in self._book.keys

    def stale_parts(self) -> int:
        """Return the number of stored PARTIALs that belong to interrupted attempts."""
        latest = {row.id: row.attempts for row in self._rows}
        return sum(
            latest[each.request] != each.attempt
            for each in self._site.db.rows(StoredPartial.request, StoredPartial.attempt)
        )

    def fetch_all_again(self, deadline: float) -> None:
        """Check that each reply is right and the one that was seen before, and that closed requests are gone."""
        with Client(self._site.endpoint, timeout=CALL_TIMEOUT_SECONDS) as client, ThreadPoolExecutor(8) as pool:
            titanic = Titanic(client)
            for _ in pool.map(lambda pair: self._fetch_again(titanic, *pair, deadline), self._book.uuids.items()):
                pass

    def _fetch_again(self, titanic: Titanic, number: int, uuid: str, deadline: float) -> None:
        task = Task(self._seed, number)
        errand = Errand(task, titanic.ticket(uuid))
        try:
            if number in self._book.closed:
                if not (self._is_there(number) and self.may_come_back(number)):
                    check_gone(errand.ticket)
                return
            left = max(0.0, min(CALL_TIMEOUT_SECONDS, deadline - time.monotonic()))
            mark = errand.result(left)
            self._book.saw(task, mark)
            errand.check_parts(mark, left)
        except (RequestError, Wrong) as error:
            self._book.wrong(task, f"in the end: {error}")

    def show(self, number: int) -> str:
        """Return what `titanic show` prints about a request."""
        command = [BIN / "titanic", "show", self._book.uuids[number], "--db", self._site.db.url]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        return "\n".join(line[:200] for line in (shown.stdout + shown.stderr).splitlines())


@dataclass(frozen=True)
class Plan:
    """The settings of a run."""

    db: str = "sqlite"
    titanics: int = 1
    kills: int = 200
    seed: int = 1
    rate: float = 40.0
    """Requests submitted per second."""
    callers: int = 4
    pause: float = 0.6
    """Average seconds between two faults."""
    least: int = 100
    """Minimum number of accepted requests; on a slow machine the run continues after the last kill to reach it."""
    settle: float = 120.0
    """Maximum seconds from the last fault until all requests have ended."""


def crash(plan: Plan, folder: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Run the plan and return the report, whose `troubles` are empty if all is well."""
    started = time.monotonic()
    troubles = Troubles()
    book = Book(troubles)
    with ExitStack() as stack:
        db = stack.enter_context(database(plan.db, folder))
        site = Site(db, plan.titanics, folder, troubles)
        stack.callback(site.close)
        site.wait_until_ready()
        numbers = itertools.count(1)
        callers = [
            *(WaitingCaller(site, book, at, plan.seed) for at in range(2)),
            *(
                Caller(site, book, numbers, rate=plan.rate / plan.callers, keyed=at % 2 == 0, seed=plan.seed)
                for at in range(plan.callers)
            ),
        ]
        for each in callers:
            stack.callback(each.close)
        tell = progress(site, book, quiet=quiet)
        site.disturb(plan.kills, plan.pause, random.Random(plan.seed), tell)
        stopped = time.monotonic()
        deadline = stopped + plan.settle
        site.settle(lambda: len(book.uuids) >= plan.least, deadline, tell)
        stopping = [threading.Thread(target=each.stop) for each in callers]
        for each in stopping:
            each.start()
        all_done = site.settle(lambda: settled(site, book, stopping), deadline, tell)
        settling = time.monotonic() - stopped
        for each in callers:
            each.close()
        audit = Audit(site, book, plan.seed)
        if not all_done:
            troubles.add(f"not all was done {plan.settle:g} s after the last kill")
        for text in audit.troubles():
            troubles.add(text)
        audit.fetch_all_again(time.monotonic() + TIMEOUT_SECONDS)
        site.close()
        report = {
            "plan": vars(plan),
            "done": dict(sorted(site.done.items())),
            "kills": site.kills,
            "accepted": len(book.uuids),
            "waited for": book.waited,
            "with a key": len(book.keys.keys() & book.uuids.keys()),
            "fetched": len(book.marks),
            "closed": len(book.closed),
            "lost": len(audit.lost),
            "missing": len(audit.missing),
            "wrong": len(troubles.all),
            "states": dict(audit.states()),
            "stored twice, without a key": audit.stored_twice,
            "executions": audit.executions,
            "executed again": audit.executed_again,
            "executed again, ratio": round(audit.executed_again / max(1, sum(audit.stored.values())), 4),
            "attempts": audit.attempts,
            "stale PARTIALs": audit.stale_parts(),
            "errors": {what: dict(errors.most_common()) for what, errors in sorted(book.errors.items())},
            "seconds of a submit": {f"p{at}": percentile(book.submitting, at) for at in (50, 90, 99)},
            "submits that got an error": sum(book.errors["submit"].values()),
            "settling seconds": round(settling, 1),
            "seconds": round(time.monotonic() - started, 1),
            "troubles": troubles.all,
            "shown": {number: audit.show(number) for number in (*audit.missing, *audit.lost)[:SHOWN]},
        }
    (folder / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False))
    return report


def percentile(values: list[float], at: int) -> float:
    ordered = sorted(values) or [0.0]
    return round(ordered[len(ordered) * at // 100], 3)


def settled(site: Site, book: Book, stopping: list[threading.Thread]) -> bool:
    """Return whether submissions have ended, the outcome of each accepted request was seen, and no request waits."""
    if any(each.is_alive() for each in stopping) or book.finished < len(book.uuids):
        return False
    return site.db.all_ended()


def progress(site: Site, book: Book, *, quiet: bool) -> Callable[[], None]:
    """Return a function that prints the progress to stderr every few seconds."""
    started = told_at = time.monotonic()

    def tell() -> None:
        nonlocal told_at
        now = time.monotonic()
        if quiet or now < told_at + 5:
            return
        told_at = now
        errors = sum(sum(each.values()) for each in book.errors.values())
        click.echo(
            f"{now - started:5.0f} s: {site.kills} kills, {sum(site.done.values()) - site.kills} other faults; "
            f"{len(book.uuids)} accepted, {book.finished} completed, {errors} errors",
            err=True,
        )

    return tell


def told(report: dict[str, Any]) -> str:
    """Return the report as a short text."""
    plan = report["plan"]
    lines = [
        f"{plan['db']}, {plan['titanics']} Titanics, seed {plan['seed']}, {report['seconds']} s",
        ", ".join(f"{number} {what}" for what, number in report["done"].items()),
        f"{report['accepted']} accepted, and {report['waited for']} waited for: {report['lost']} lost, "
        f"{report['missing']} without a reply, {report['wrong']} troubles; {report['closed']} closed",
        f"{report['executed again']} executed again ({report['executed again, ratio']:.2%}); "
        f"{report['stored twice, without a key']} stored twice, because they have no key",
        f"{report['submits that got an error']} submits got an error and were repeated; "
        f"all requests had ended {report['settling seconds']} s after the last kill",
        *(f"WRONG: {each}" for each in report["troubles"][:SHOWN]),
        *(f"\n{each}" for each in report["shown"].values()),
    ]
    return "\n".join(lines)


@click.command()
@click.option("--kills", default=200, show_default=True, help="Number of processes to kill.")
@click.option("--db", type=click.Choice(["sqlite", "postgres"]), default="sqlite", show_default=True)
@click.option("--titanics", default=1, show_default=True, help="Number of Titanics that share the database.")
@click.option("--seed", default=1, show_default=True, help="Decides the faults and the requests.")
@click.option("--rate", default=Plan.rate, show_default=True, help="Requests per second.")
@click.option("--pause", default=Plan.pause, show_default=True, help="Average seconds between two faults.")
@click.option("--settle", default=Plan.settle, show_default=True, help="Maximum seconds until all requests have ended.")
@click.option("--keep", is_flag=True, help="Keep the folder even if nothing is wrong.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, not as text.")
def main(*, keep: bool, as_json: bool, **settings: Any) -> None:
    """Kill brokers, Titanics and workers under load, and check whether a request is lost."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing is left running
    folder = Path(tempfile.mkdtemp(prefix="crash-"))
    click.echo(f"in {folder}", err=True)
    report = crash(Plan(**settings), folder)
    click.echo(json.dumps(report, indent=1, ensure_ascii=False) if as_json else told(report))
    if report["troubles"] or keep:
        click.echo(f"kept: {folder}", err=True)
    else:
        shutil.rmtree(folder)
    sys.exit(bool(report["troubles"]))


if __name__ == "__main__":
    main()
