"""Compile the C programs that the benchmarks use, and run the brokers that they measure.

    with native.built() as tools, native.forwarding(tools) as (pid, endpoint):
        with native.Loading(tools, pid, endpoint, "0.2", outstanding=64) as loading:
            print(loading.turn(1.0))

All of them use the libzmq that pyzmq has loaded: the programs here open it by its path, and the Guide's C broker gets
it through LD_PRELOAD.  If something is not available, `Missing` is raised and says why.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import zmq.backend  # noqa: F401 - it loads libzmq

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
DIALECTS = {"0.1": "0.1", "0.2": "0.2", "X1": "x1"}
"""The name of each dialect in native/load.c."""
PURE = {"ZMDP_PURE": "1"}
"""The environment in which zmdp uses no compiled modules."""
SETTLE = 0.15
"""Seconds until the workers' READY have arrived."""
WARM_UP = 0.05
"""Seconds of a first turn, which is not counted."""
SETTLED = 0.02
"""Fraction of a core below which a process is considered idle."""


class Missing(Exception):
    """Something that a benchmark needs is not available."""


@dataclass(frozen=True)
class Tools:
    """Compiled programs, and the libzmq that they open."""

    folder: Path
    libzmq: Path

    def command(self, name: str, *arguments: object) -> list[str]:
        return [str(self.folder / name), str(self.libzmq), *map(str, arguments)]


@dataclass(frozen=True)
class Load:
    """The results of a load, in one turn or in several."""

    requests: int
    cpu: float
    rate: float
    """Requests per second."""

    @property
    def cost(self) -> float:
        """Microseconds of CPU per request."""
        return 1e6 * self.cpu / self.requests

    @classmethod
    def together(cls, turns: Sequence["Load"]) -> "Load":
        return cls(
            sum(each.requests for each in turns),
            sum(each.cpu for each in turns),
            statistics.mean(e.rate for e in turns),
        )


# ── compiling ────────────────────────────────────────────────────────────────────────────────────────────────────────


def libzmq() -> Path:
    """Return the path of the libzmq in this process."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        raise Missing("CPU time is taken from /proc, which is not there: the load in C takes Linux") from None
    found = {line.split(maxsplit=5)[5] for line in maps.splitlines() if re.search(r"/libzmq[^/]*\.so", line)}
    if not found:
        raise Missing("pyzmq has libzmq inside itself, where programs in C cannot open it")
    return Path(found.pop())


@contextmanager
def built() -> Iterator[Tools]:
    """Compile the load generator and the forwarding loop."""
    library = libzmq()
    with tempfile.TemporaryDirectory(prefix="zmdp-bench-") as folder:
        tools = Tools(Path(folder), library)
        for name in ("load", "forward"):
            _compile(HERE / "native" / f"{name}.c", tools.folder / name, "-ldl")
        yield tools


def guide_directory(given: str | None) -> Path:
    """Return the folder of the Guide's C examples: the given one, or that in ZMDP_BENCH_GUIDE."""
    name = given or os.environ.get("ZMDP_BENCH_GUIDE")
    if not name:
        raise Missing("its source is not here: --guide or ZMDP_BENCH_GUIDE can name the ZeroMQ Guide's examples/C")
    if not (Path(name) / "mdbroker.c").is_file():
        raise Missing(f"there is no mdbroker.c in {name}")
    return Path(name)


def build_guide(tools: Tools, directory: Path, heartbeat: float = 2.5) -> str:
    """Compile the Guide's C broker, changing only its heartbeat interval; return the name of the program."""
    name = f"guide-{heartbeat:g}"
    source = (directory / "mdbroker.c").read_text()
    source = re.sub(r"(#define HEARTBEAT_INTERVAL\s+)\d+", rf"\g<1>{heartbeat * 1000:.0f}", source)
    copy = tools.folder / f"{name}.c"
    copy.write_text(source)
    options = ("-w", "-include", str(HERE / "native" / "czmq4.h"), "-I", str(directory), "-lczmq", "-lzmq")
    try:
        _compile(copy, tools.folder / name, *options)
    except Missing as error:
        raise Missing(f"it takes CZMQ 4 (Debian: apt-get install libczmq-dev): {error}") from None
    return name


def _compile(source: Path, target: Path, *options: str) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Missing("there is no C compiler (Debian: apt-get install gcc libc6-dev)")
    flags = [each for each in options if not each.startswith("-l")]
    libraries = [each for each in options if each.startswith("-l")]
    done = subprocess.run(
        [*compiler.split(), "-O2", *flags, "-o", str(target), str(source), *libraries],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise Missing(f"{source.name} does not compile: {lines[0]}")


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment, with additions."""
    return {**os.environ, **(extra or {})}


@contextmanager
def process(command: Sequence[str], extra: Mapping[str, str] | None = None) -> Iterator[tuple[int, str]]:
    """Run a process that first prints its endpoint; yields its pid and endpoint.  Not in our group, so that only we get
    Ctrl-C."""
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=environment(extra), process_group=0,
    )  # fmt: skip
    try:
        assert started.stdout is not None
        endpoint = started.stdout.readline().strip()
        if not endpoint:
            raise Missing(f"{Path(command[0]).name} ended with {started.wait()}")
        yield started.pid, endpoint
    finally:
        started.terminate()
        try:
            started.wait(3)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def forwarding(tools: Tools, *, in_turn: bool = False):
    """Run the forwarding loop in C, for MDP/0.1 and 0.2: see native/forward.c."""
    return process(tools.command("forward", *["in-turn"] * in_turn))


def forwarding_python():
    """The same in Python."""
    return process([sys.executable, str(HERE / "forward.py")])


def guide(tools: Tools, name: str):
    """Run the Guide's C broker, a program from `build_guide`; it speaks MDP/0.1."""
    return process([str(tools.folder / name)], {"LD_PRELOAD": str(tools.libzmq)})


def guide_method(heartbeat: float = 2.5):
    """Run a broker in Python by the Guide's method; it speaks MDP/0.1."""
    return process([sys.executable, str(HERE / "guide_method.py"), "--heartbeat", str(heartbeat)])


def broker(*options: str, pure: bool = False):
    """Run a real `mdp-broker`; `pure`: without its compiled modules."""
    command = [str(BIN / "mdp-broker"), "--bind", "tcp://127.0.0.1:*", "--log-level", "error", "--drain-timeout", "0"]
    return process([*command, *options], PURE if pure else None)


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Loading:
    """Clients and workers, with `outstanding` requests of `body` bytes per client: see native/load.c.

    `credit` is that of an X1 worker.
    """

    def __init__(
        self, tools: Tools, pid: int, endpoint: str, dialect: str, *, clients: int = 4, workers: int = 4,
        outstanding: int = 64, body: int = 32, credit: int | None = None, cores: AbstractSet[int] | None = None,
    ) -> None:  # fmt: skip
        self._cores = cores
        self._command = tools.command(
            "load", endpoint, DIALECTS[dialect], clients, workers, outstanding, body, pid,
            *([] if credit is None else [credit])
        )  # fmt: skip

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, process_group=0,
            preexec_fn=(lambda: os.sched_setaffinity(0, self._cores)) if self._cores else None,  # noqa: PLW1509
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def turn(self, seconds: float) -> Load:
        """Send for this many seconds, and wait for the last replies.

        Raises `RuntimeError` if requests were lost or failed: then the figures would mean nothing.
        """
        with suppress(OSError):  # it has ended: there will be no answer
            self._process.stdin.write(f"{seconds}\n")
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the load ended with {self._process.wait()}")
        found = json.loads(answer)
        if not found["requests"] or found["lost"] or found["failed"]:
            raise RuntimeError(f"of {found['requests']} requests {found['lost']} were lost, {found['failed']} failed")
        return Load(found["requests"], found["cpu"], found["rate"])


def in_turn(loads: Mapping[str, Loading], seconds: float, turns: int, tell: Callable[[str], None]) -> dict[str, Load]:
    """Return the results of each load for the given seconds, split into turns; loads that fail are reported and left
    out."""
    time.sleep(SETTLE)
    found: dict[str, list[Load]] = {name: [] for name in loads}
    for turn in range(turns + 1):
        for name in list(found):
            try:
                one = loads[name].turn(seconds / turns if turn else WARM_UP)
            except RuntimeError as error:
                tell(f"  {name}: {error}")
                del found[name]
            else:
                found[name] += [one] * (turn > 0)
    return {name: Load.together(each) for name, each in found.items()}


def cores() -> tuple[set[int], set[int]]:
    """Return a core for a broker and the others for its load; if there is only one, both share it."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) == 1:
        return allowed, allowed
    return {max(allowed)}, allowed - {max(allowed)}


def pin(pid: int, to: AbstractSet[int]) -> None:
    """Let all threads of a process run on these cores only."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), to)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def memory(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def settle(pid: int, timeout: float = 60.0) -> None:
    """Wait until a process has processed everything that it was sent, and is idle."""
    until = time.monotonic() + timeout
    used = cpu_seconds(pid)
    while time.monotonic() < until:
        time.sleep(0.15)
        before, used = used, cpu_seconds(pid)
        if used - before < SETTLED * 0.15:
            return
    raise RuntimeError(f"process {pid} was still busy after {timeout:g} s")
