"""Run the tests in stages, and say what each stage shows: the program behind `make test` and its relatives.

Stages run one after another, the jobs of a stage at the same time, up to `AT_ONCE`: those that mostly compute beside
those that mostly wait.  What the tests print goes to files in `build/tests`; a failure is shown with the command that
repeats it.
"""

import argparse
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build" / "tests"
PYTHON = sys.executable
PROGRESS_SECONDS = 30.0
"""How often a line shows the progress when the output is not a terminal."""
POLL_SECONDS = 0.2
AT_ONCE = 6
"""Jobs that run at the same time: most of them wait, for processes and for time to pass."""
END_SECONDS = 10.0
"""How long jobs may take to end after Ctrl-C."""
MAX_SHOWN_LINES = 80
"""Lines of a failed test's report that are shown; its log has all."""
QUIET = ("-q", "--no-header", "--color=no")
"""What each run of pytest is told, because its output goes to a file."""
NO_TESTS = 5
"""pytest's exit code when it has selected no test."""


@dataclass(frozen=True)
class Job:
    """A command, or with `pure` or not a run of pytest on one of the two builds."""

    name: str
    command: Sequence[str]
    pure: bool = False
    is_pytest: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """What is added to the environment."""
        return {"ZMDP_PURE": "1"} if self.pure else {}


@dataclass(frozen=True)
class Stage:
    """Jobs that run at the same time, those that take longest first, and commands that follow when all succeeded."""

    name: str
    shows: str
    jobs: Sequence[Job]
    then: Sequence[Job] = ()


@dataclass
class Results:
    """What became of all tests."""

    passed: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    """What failed, and the command that repeats it."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Skipped tests by reason."""
    expected: int = 0
    """Tests that failed as expected."""


# ── the stages ───────────────────────────────────────────────────────────────────────────────────────────────────────


def pytest(name: str, *arguments: str, pure: bool = False) -> Job:
    """A run of pytest."""
    return Job(name, (PYTHON, "-m", "pytest", *QUIET, *arguments), pure, is_pytest=True)


def covered(name: str, *arguments: str) -> Job:
    """A run of pytest on Python alone that records which branches are taken."""
    coverage = (PYTHON, "-m", "coverage", "run", "-p", "--source=zmdp", "-m")
    run = ("pytest", *QUIET, "--hypothesis-profile=covered", *arguments)
    return Job(name, (*coverage, *run), pure=True, is_pytest=True)


def command(name: str, *arguments: str) -> Job:
    """A command of a tool that is installed as a Python module."""
    return Job(name, (PYTHON, *arguments))


def found(*patterns: str, but: Sequence[str] = ()) -> list[str]:
    """Return the paths that match the patterns, relative to the checkout."""
    paths = {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)}
    return sorted(paths - set(but))


SOCKETS = re.compile(r"^(import|from) (zmq|socket|select|ctypes|\.\.transport)", re.MULTILINE)
"""What modules import that cannot be tested without sockets."""
COVERED = (
    "*/mdp/wire/*.py", "*/mdp/linked_lists.py", "*/mdp/timers.py",
    *(f"*/{path}" for path in found("mdp/broker/*.py") if not SOCKETS.search((ROOT / path).read_text())),
    *(f"*/clients/{name}.py" for name in ("broker_connection", "call", "failover", "legacy_session", "session")),
    *(f"*/workers/{name}.py" for name in ("events", "failover", "held", "outgoing", "session", "states")),
)  # fmt: skip
"""The protocol's core: every branch is tested without sockets."""
COST, WORK = "tests/mdp/broker/test_cost.py", "tests/mdp/broker/test_work.py"
COUNTED = [COST, WORK]
"""Tests that count instructions and memory, which coverage would add to."""
UNITS = found(
    *(f"tests/{room}/test_*.py" for room in ("mdp", "mdp/broker", "mdp/transport", "mdp/wire", "mmi")),
    *(f"tests/clients/test_{name}.py" for name in ("failover", "legacy_session", "session")),
    *(f"tests/workers/test_{name}.py" for name in ("session", "states")),
    but=COUNTED,
)
UNIT_PARTS = 3
"""How many processes share them."""
PROTOCOL = ["tests/conformance", "tests/simulation"]
PATCHED = ["tests/workers/test_crashes.py"]
"""Programs whose machines are patched, which cannot be done with compiled ones."""
PROPERTIES = [path for path in found("tests/**/test_*.py") if "from hypothesis" in (ROOT / path).read_text()]
"""Files with properties, of which `make test` tries a quarter as many examples as `make test-long`."""
COMPILED_UNITS = found("tests/mdp/wire/test_*.py", "tests/mdp/transport/test_*.py")
"""Units whose code exists twice, or whose compiled form does more than mypyc's translation."""
SPARK = [
    path
    for path in found("tests/spark/test_*.py", "tests/spark/*/test_*.py")
    if not path.endswith(("_process.py", "_processes.py", "/test_fleet_keys.py"))
]
"""Tests that share the Spark session of their process; the others start Java processes of their own."""
END_TO_END = "tests/spark/test_end_to_end.py"
"""All of them that `make test` runs."""
ELSEWHERE = [*UNITS, *COUNTED, *PROTOCOL]
ROOMS = {"titanic": 4, "processes": 2, "clients": 3, "docs": 1, "workers": 1, "spark": 1, "mdp": 1}
"""Rooms of the stage `programs`, those that take longest first, and how many processes share the files of each."""

STEALING = ("--dist", "worksteal")

TYPES = command("types", "-m", "mypy", "-p", "zmdp")
LINT = [
    command("ruff", "-m", "ruff", "check", "-q"),
    command("format", "-m", "ruff", "format", "--check", "-q"),
    TYPES,
    command("width", "docs/check_width.py"),
]


def units() -> tuple[list[Job], list[Job]]:
    """Return the unit tests, with coverage, and the commands that judge the coverage."""
    jobs = [covered(f"units {part + 1}", *UNITS[part::UNIT_PARTS]) for part in range(UNIT_PARTS)]
    report = ("-m", "coverage", "report", "--fail-under=100", f"--include={','.join(COVERED)}")
    then = [
        command("coverage", "-m", "coverage", "combine", "-q"),
        command("coverage of the core", *report),
    ]
    return jobs, then


def programs(but: Sequence[str]) -> list[Job]:
    """Return the tests of all rooms, except the given paths.

    Each process collects the files of its job only: with pytest-xdist, each would collect all of them.
    """
    chosen = ("-m", "not long")
    jobs = []
    for room, parts in ROOMS.items():
        files = [path for path in found(f"tests/{room}/**/test_*.py", but=but) if f"tests/{room}" not in but]
        for part in range(min(parts, len(files))):
            name = room if parts == 1 else f"{room} {part + 1}"
            jobs.append(pytest(name, *chosen, *files[part::parts]))
    ignored = [f"--ignore={path}" for path in [*but, *(f"tests/{room}" for room in ROOMS)]]
    return [*jobs, pytest("others", *chosen, "tests", *ignored)]


def quick_stages() -> list[Stage]:
    """What every Python runs: all that could depend on it, except Spark, and nothing twice."""
    same = [f"tests/{room}" for room in ("simulation", "spark", "docs", "bench", "attacks", "deploy", "soak")]
    others = [*UNITS, *COUNTED, *same]
    chosen = ("-m", "not long")
    return [
        Stage(
            "units", "the protocol's core, without sockets",
            [
                pytest(f"units {part + 1}", *chosen, *UNITS[part::UNIT_PARTS], pure=True) for part in range(UNIT_PARTS)
            ],
        ),
        Stage(
            "programs", "clients, workers, broker, Titanic, gateways: real sockets, real processes that are killed",
            programs(but=others),
        ),
    ]  # fmt: skip


def test_stages() -> list[Stage]:
    """What `make test` runs."""
    jobs, then = units()
    chosen = ("-m", "not long")
    return [
        Stage(
            "units", "style, types; every branch of the protocol's core, in pure Python",
            [*LINT, *jobs], then,
        ),
        Stage(
            "protocol", "each rule over real sockets, and whole systems in the simulator while everything fails",
            [
                pytest("pure", "-n", "2", *STEALING, *chosen, WORK, *PATCHED, "tests/simulation", pure=True),
                pytest("compiled", "-n", "2", *STEALING, *chosen, *COUNTED, *COMPILED_UNITS, *PROTOCOL),
            ],
        ),
        Stage(
            "programs", "clients, workers, Titanic, gateways, Spark: real processes that are killed; documentation",
            [pytest("end to end", *chosen, END_TO_END), *programs(but=[*ELSEWHERE, END_TO_END])],
        ),
    ]  # fmt: skip


def long_stages() -> list[Stage]:
    """What `make test-all` runs after that."""
    ignored = [f"--ignore={path}" for path in [*PROTOCOL, *SPARK]]
    return [
        Stage(
            "units compiled", "every unit of the protocol's core, compiled; more examples of each property",
            [
                pytest("units", "-n", "2", *UNITS),
                pytest("properties", "-n", "2", "-m", "hypothesis", "--hypothesis-profile=long", *PROPERTIES),
            ],
        ),
        Stage(
            "protocol at length", "hundreds of seeds, pure and compiled; each rule in pure Python too",
            [
                pytest("pure", "-n", "1", "-m", "long", *PROTOCOL, pure=True),
                pytest("costs, conformance", "-m", "not long", COST, "tests/conformance", pure=True),
                pytest("compiled", "-n", "1", "-m", "long", *PROTOCOL),
            ],
        ),
        Stage(
            "programs at length", "Spark at length; attacks; crashes on both databases; a pair of brokers under load",
            [
                pytest("spark", "-n", "2", "-m", "long", "--dist", "loadfile", *SPARK),
                pytest("programs", "-n", "2", "-m", "long", "--dist", "loadfile", "tests", *ignored),
            ],
        ),
    ]  # fmt: skip


SUITES = {
    "test": test_stages,
    "all": lambda: [*test_stages(), *long_stages()],
    "long": long_stages,
    "quick": quick_stages,
    "unit": lambda: [Stage("units", "every branch of the protocol's core, in pure Python", *units())],
    "lint": lambda: [Stage("lint", "style, types, width of the documentation", LINT)],
}


# ── running them ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Running:
    """A job that has been started, its log, and the results of its tests so far."""

    def __init__(self, stage: Stage, job: Job) -> None:
        name = f"{stage.name}-{job.name}".replace(" ", "-")
        self.job = job
        self.log = LOGS / f"{name}.log"
        self.results = LOGS / f"{name}.jsonl"
        self.results.write_text("")
        environment = {**os.environ, **job.environment, "ZMDP_TEST_RESULTS": str(self.results), "FORCE_COLOR": "0"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                job.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    @property
    def failed(self) -> bool:
        """Whether it has ended without success."""
        return self.process.poll() not in {None, 0, NO_TESTS if self.job.is_pytest else 0}

    def tests(self) -> list[dict[str, str]]:
        """Return the results of the tests that have ended."""
        return [json.loads(line) for line in self.results.read_text().splitlines() if line.endswith("}")]

    def repeat(self, test: str = "") -> str:
        """Return the command that repeats it, or one of its tests."""
        shown = os.path.relpath(PYTHON, ROOT) if PYTHON.startswith(f"{ROOT}{os.sep}") else PYTHON
        words = ("-m", "pytest", test) if test else self.job.command[1:]
        return " ".join(
            [*(f"{name}={value}" for name, value in self.job.environment.items()), shlex.join([shown, *words])]
        )

    def stop(self) -> None:
        """End it and its processes."""
        for number in (signal.SIGINT, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(END_SECONDS)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def run_stage(stage: Stage, results: Results) -> bool:
    """Run a stage.  Return whether all of it has succeeded."""
    good = _run_jobs(stage, stage.jobs, results)
    for job in stage.then if good else ():
        good = _run_jobs(stage, [job], results) and good
    return good


def _run_jobs(stage: Stage, jobs: Sequence[Job], results: Results) -> bool:
    waiting, running = list(jobs), list[Running]()
    progress = Progress(running)
    try:
        while waiting or any(each.process.poll() is None for each in running):
            while waiting and sum(each.process.poll() is None for each in running) < AT_ONCE:
                running.append(Running(stage, waiting.pop(0)))
            time.sleep(POLL_SECONDS)
            progress.show()
    except KeyboardInterrupt:
        for each in running:
            each.stop()
        raise
    finally:
        progress.end()
    for each in running:
        _collect(each, results)
    return not any(each.failed for each in running)


def _collect(running: Running, results: Results) -> None:
    """Add the results of a job, and show what failed."""
    failed = False
    for test in running.tests():
        outcome = test["outcome"]
        if outcome == "passed":
            results.passed += 1
        elif outcome == "skipped":
            results.skipped[test["reason"]] += 1
        elif outcome == "xfailed":
            results.expected += 1
        else:
            failed = True
            say(f"\n✗ {test['id']}")
            say(_shortened(test["text"]))
            results.failed.append((test["id"], running.repeat(test["id"])))
    if running.failed and not failed:
        say(f"\n✗ {running.job.name}")
        say(_shortened(running.log.read_text(errors="replace")))
        results.failed.append((running.job.name, running.repeat()))


def _shortened(text: str) -> str:
    lines = text.strip().splitlines()
    left_out = len(lines) - MAX_SHOWN_LINES
    shown = lines[-MAX_SHOWN_LINES:] if left_out <= 0 else [f"… {left_out} lines before", *lines[-MAX_SHOWN_LINES:]]
    return "\n".join(f"    {line}" for line in shown)


class Progress:
    """Shows how many tests have ended: in one line of a terminal, or else now and then in a new one."""

    def __init__(self, running: Sequence[Running]) -> None:
        self._running = running
        self._began = self._shown = time.monotonic()
        self._terminal = sys.stdout.isatty()

    def show(self) -> None:
        """Show the progress if it is time."""
        now = time.monotonic()
        if now - self._shown < (1.0 if self._terminal else PROGRESS_SECONDS):
            return
        self._shown = now
        tests = [test for each in self._running for test in each.tests()]
        bad = sum(test["outcome"] == "failed" for test in tests)
        busy = ", ".join(each.job.name for each in self._running if each.process.poll() is None)
        line = f"    {now - self._began:4.0f} s  {len(tests)} tests, {bad} failed; running: {busy}"
        print(f"\r{line:<110.110}" if self._terminal else line, end="" if self._terminal else "\n", flush=True)

    def end(self) -> None:
        """Remove the line of a terminal."""
        if self._terminal:
            print(f"\r{'':<110}\r", end="", flush=True)


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────────


def say(text: str) -> None:
    """Print at once, also to a pipe."""
    print(text, flush=True)


def duration(seconds: float) -> str:
    """Return seconds as people read them."""
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"


def processor_seconds() -> float:
    """Return the time on a processor of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def load(loops: int) -> Iterator[None]:
    """Keep the processors busy with so many endless loops, in a session of their own."""
    busy = [subprocess.Popen((PYTHON, "-c", "while True: pass"), start_new_session=True) for _ in range(loops)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def summary(results: Results, seconds: float, used: float) -> str:
    """Return the last line."""
    counts = [f"{results.passed} passed", f"{len(results.failed)} failed"]
    if results.expected:
        counts.append(f"{results.expected} failed as expected")
    counts.append(f"{results.skipped.total()} skipped")
    return f"{', '.join(counts)}; {duration(seconds)}, {duration(used)} of processor time"


def build() -> str:
    """Return how far zmdp is compiled here, and what to do if it is not."""
    script = "from zmdp.mdp import compiled; print(compiled.summary())"
    told = subprocess.run((PYTHON, "-c", script), check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    if told == "compiled":
        return "zmdp is compiled"
    return (
        f"zmdp is NOT compiled: it runs in {told}, also where a stage says compiled\n"
        "    to compile it: apt-get install gcc libc6-dev python3-dev (on Debian), make clean, and again"
    )


def main() -> int:
    """Run a suite.  Return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--load", type=int, default=0, metavar="N", help="beside N endless loops")
    given = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    for old in ROOT.glob(".coverage*"):
        old.unlink()
    stages = SUITES[given.suite]()
    results, began = Results(), time.monotonic()
    if given.load:
        os.nice(19)
    if any(job.is_pytest and not job.pure for stage in stages for job in stage.jobs):
        say(build())
    with load(given.load):
        for number, stage in enumerate(stages, 1):
            say(f"── {number}/{len(stages)} {stage.name}: {stage.shows}")
            started, used = time.monotonic(), processor_seconds()
            good = run_stage(stage, results)
            took, used = duration(time.monotonic() - started), processor_seconds() - used
            say(f"   {'passed' if good else 'FAILED'} in {took}, {duration(used)} of processor time")
    if results.failed:
        say("\nTo repeat what failed:")
        for name, again in results.failed:
            say(f"  {name}\n      {again}")
    if results.skipped:
        say("\nSkipped:")
        for reason, count in sorted(results.skipped.items()):
            say(f"  {count} × {reason}")
    say(f"\n{summary(results, time.monotonic() - began, processor_seconds())}")
    return 1 if results.failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # jobs run in sessions of their own
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
