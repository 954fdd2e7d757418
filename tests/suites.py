"""Run the tests, or a part of them: the program behind `make test` and its relatives.

A suite is a few runs of pytest, one after another.  Markers choose what runs in which (tests/conftest.py), pytest-xdist
distributes it.  What the tests print goes to files in `build/tests`; a failure is shown with the command that repeats
it.
"""

import argparse
import json
import os
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
END_SECONDS = 10.0
"""How long jobs may take to end after Ctrl-C."""
MAX_SHOWN_LINES = 80
"""Lines of a failed test's report that are shown; its log has all."""
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


# ── the suites ───────────────────────────────────────────────────────────────────────────────────────────────────────

Step = Sequence[Job]
"""Jobs that run at the same time."""


def pytest(name: str, chosen: str, *arguments: str, processes: int = 0, pure: bool = False) -> Job:
    """A run of pytest with the tests that the markers choose; with `processes`, pytest-xdist distributes them."""
    command = [PYTHON, "-m", "pytest", "-q", "--no-header", "--color=no"]
    dist = ("worksteal",) if pure else ("loadfile", "--no-loadscope-reorder")
    spread = ["-n", str(processes), "--dist", *dist] if processes else []
    return Job(name, (*command, *spread, "-m", chosen, *arguments), pure, is_pytest=True)


def command(name: str, *arguments: str) -> Job:
    """A command of a tool that is installed as a Python module."""
    return Job(name, (PYTHON, *arguments))


COVERED = (
    "*/mdp/wire/*.py", "*/mdp/timers.py", "*/mdp/transport/failover.py",
    *(f"*/{path.relative_to(ROOT)}" for path in ROOT.glob("mdp/broker/**/*.py") if path.parent.name != "io"),
    "*/clients/legacy/session.py",
    *(f"*/clients/x1/{name}.py" for name in ("broker_connection", "errors", "session")),
    *(f"*/workers/session/{name}.py" for name in ("held", "outgoing", "session", "states")),
)  # fmt: skip
"""The protocol's core: every branch is tested without sockets."""
UNITS = ("tests/mdp", "tests/mmi", "tests/clients", "tests/workers")
"""The folders that have units."""
ONLY_PURE = ("tests/mdp/broker/test_work.py", "tests/workers/test_crashes.py", "tests/simulation")
"""What counts the instructions of pure Python, what patches machines, and what runs on both builds."""
PYTHONS_SHARE = (
    "mdp/broker/test_cost.py", "mdp/broker/test_work.py",
    "simulation", "spark", "docs", "bench", "attacks", "deploy", "faults",
)  # fmt: skip
"""Paths of what does not depend on the version of Python, or is too long for each."""
LINT = (
    command("ruff", "-m", "ruff", "check", "-q"),
    command("format", "-m", "ruff", "format", "--check", "-q"),
    command("types", "-m", "mypy", "-p", "zmdp"),
    command("width", "docs/check_width.py"),
)
COVERAGE = ("-m", "coverage", "run", "-p", "--source=zmdp", "-m", "pytest", "--hypothesis-profile=covered")


def covered_units() -> Job:
    """The units in pure Python, with the branches that they take."""
    job = pytest("units", "unit", *UNITS, pure=True)
    return Job(job.name, (PYTHON, *COVERAGE, *job.command[3:]), pure=True, is_pytest=True)


UNIT: list[Step] = [
    [covered_units()],
    [command("coverage", "-m", "coverage", "combine", "-q")],
    [command("coverage of the core", "-m", "coverage", "report", "--fail-under=100", f"--include={','.join(COVERED)}")],
]
TEST: list[Step] = [
    [*UNIT[0], *LINT],
    *UNIT[1:],
    [pytest("pure", "not long", *ONLY_PURE, processes=2, pure=True)],
    [pytest("compiled", "not long and (not unit or built_twice)", "tests", processes=6)],
]
LONG: list[Step] = [
    [pytest("compiled at length", "long or unit", "tests", processes=6)],
    [pytest("properties", "hypothesis", "--hypothesis-profile=long", "tests", processes=2)],
    [
        pytest(
            "pure at length", "long or not built_twice",
            "tests/conformance", "tests/mdp/broker/test_cost.py", "tests/simulation", processes=2, pure=True,
        )
    ],
]  # fmt: skip
QUICK: list[Step] = [
    [pytest("units", "unit and not long", *UNITS, processes=2, pure=True)],
    [
        pytest(
            "compiled", "not long and not unit", "tests", *(f"--ignore=tests/{path}" for path in PYTHONS_SHARE),
            processes=4,
        )
    ],
]  # fmt: skip
SUITES = {"test": TEST, "all": [*TEST, *LONG], "long": LONG, "quick": QUICK, "unit": UNIT, "lint": [LINT]}


# ── running them ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Running:
    """A job that has been started, its log, and the results of its tests so far."""

    def __init__(self, job: Job) -> None:
        name = job.name.replace(" ", "-")
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


def run_step(step: Step, results: Results) -> bool:
    """Run the jobs of a step.  Return whether all have succeeded."""
    running = [Running(job) for job in step]
    progress = Progress(running)
    try:
        while any(each.process.poll() is None for each in running):
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
    script = "from zmdp import version; print(version.build())"
    told = subprocess.run((PYTHON, "-c", script), check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    if told == "compiled":
        return "zmdp is compiled"
    return (
        f"zmdp is NOT compiled: it runs in {told}, also where a line says compiled\n"
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
    steps = SUITES[given.suite]
    results, began = Results(), time.monotonic()
    if given.load:
        os.nice(19)
    if any(job.is_pytest and not job.pure for step in steps for job in step):
        say(build())
    with load(given.load):
        for step in steps:
            say(f"── {', '.join(job.name for job in step)}")
            started, used = time.monotonic(), processor_seconds()
            good = run_step(step, results)
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
