"""Compile the C programs that the benchmarks use, and run them.

    with native.built() as tools, native.forwarding(tools) as server:
        with native.Loading(tools, server, "0.2", outstanding=64) as loading:
            print(loading.turn(1.0))

They open the libzmq that pyzmq has loaded, by its path.  Raises `processes.FailedError` if they cannot be compiled.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import processes
import zmq.backend  # noqa: F401 - it loads libzmq

HERE = Path(__file__).parent
DIALECTS = {"0.2": "0.2", "X1": "x1"}
"""The name of each dialect in native/load.c."""
SETTLE = 0.15
"""Seconds until the workers' READY have arrived."""
WARM_UP = 0.05
"""Seconds of a first turn, which is not counted."""


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
        raise processes.FailedError("CPU time is taken from /proc, which only Linux has") from None
    found = {line.split(maxsplit=5)[5] for line in maps.splitlines() if re.search(r"/libzmq[^/]*\.so", line)}
    if not found:
        raise processes.FailedError("pyzmq has libzmq inside itself, where programs in C cannot open it")
    return Path(found.pop())


@contextmanager
def built() -> Iterator[Tools]:
    """Compile the load generator and the forwarding loop."""
    library = libzmq()
    with tempfile.TemporaryDirectory(prefix="zmdp-bench-") as folder:
        tools = Tools(Path(folder), library)
        for name in ("load", "forward"):
            _compile(HERE / "native" / f"{name}.c", tools.folder / name)
        yield tools


def _compile(source: Path, target: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise processes.FailedError("there is no C compiler (Debian: apt-get install gcc libc6-dev)")
    command = [*compiler.split(), "-O2", "-o", str(target), str(source), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise processes.FailedError(f"{source.name} does not compile: {lines[0]}")


@contextmanager
def forwarding(tools: Tools) -> Iterator[processes.Server]:
    """Run the forwarding loop, for MDP/0.2: see native/forward.c."""
    with processes.running(*tools.command("forward")) as process:
        yield processes.Server(process.read_line(), [process.pid])


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Loading:
    """Clients and workers, with `outstanding` requests of `body` bytes per client: see native/load.c."""

    def __init__(
        self, tools: Tools, server: processes.Server, dialect: str, *, clients: int = 4, workers: int = 4,
        outstanding: int = 64, body: int = 32, cores: AbstractSet[int] | None = None,
    ) -> None:  # fmt: skip
        self._cores = cores
        counts = (clients, workers, outstanding, body, server.pids[0])
        self._command = tools.command("load", server.address, DIALECTS[dialect], *counts)

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
