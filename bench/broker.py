"""What the broker costs: CPU and throughput beside a loop that only forwards the same frames, and its memory.

    python bench/broker.py [--seconds 3] [--rounds 3] [--requests 100000] [--workers 10000]

Every figure comes from a real `mdp-broker` process under a load of raw sockets in another.  The forwarding loop is
the floor for a broker in Python: a ROUTER that receives and sends the very same frames with the same two functions, and
knows nothing of services, queues, heartbeats or death.  Both run in turn, in the same run; on a shared machine only the
ratios mean something.  The table goes to stdout, progress to stderr.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from zmdp.mdp.multipart import receive, send

BIN = Path(sys.executable).parent
BODY = b"x" * 32
SERVICE = b"bench"
CLIENTS = 4
WORKERS = 4
HOLDERS = 4
Socket = zmq.Socket[bytes]


# ── the two that are measured ────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def broker(*options: str) -> Iterator[tuple[int, str]]:
    """A real broker process: its pid and endpoint."""
    command = [str(BIN / "mdp-broker"), "--bind", "tcp://127.0.0.1:*", "--log-level", "error", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process.pid, process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


@contextmanager
def forwarder() -> Iterator[tuple[int, str]]:
    """A process that only forwards: its pid and endpoint."""
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=forward, args=(theirs,), daemon=True)
    process.start()
    try:
        yield process.pid, mine.recv()
    finally:
        process.terminate()
        process.join()


def forward(pipe) -> None:
    """Forward requests to the workers in turn, and their replies to the clients."""
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:*")
    pipe.send(router.get(zmq.LAST_ENDPOINT).decode().rstrip("\0"))
    workers: list[bytes] = []
    turn = 0
    while True:
        frames = receive(router)
        if frames is None:
            router.poll()
        elif frames[1] == b"MDPC02":
            turn += 1
            send(router, [workers[turn % len(workers)], b"MDPW02", b"\x02", frames[0], b"", *frames[4:]])
        elif frames[2] == b"\x04":
            send(router, [frames[3], b"MDPC02", b"\x03", SERVICE, *frames[5:]])
        elif frames[2] == b"\x01":
            workers.append(frames[0])


# ── the load ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def load(endpoint: str, outstanding: int, seconds: float, pid: int) -> tuple[float, float]:
    """Requests a second, and CPU microseconds of process `pid` a request, with so many outstanding a client."""
    context = zmq.Context()
    poller = zmq.Poller()
    workers, clients = [], []
    for group, count in ((workers, WORKERS), (clients, CLIENTS)):
        for _ in range(count):
            socket = context.socket(zmq.DEALER)
            socket.set(zmq.LINGER, 0)
            socket.connect(endpoint)
            poller.register(socket, zmq.POLLIN)
            group.append(socket)
    for socket in workers:
        send(socket, [b"MDPW02", b"\x01", SERVICE])
    time.sleep(0.3)  # until all have arrived; nothing is measured yet
    request = [b"MDPC02", b"\x01", SERVICE, BODY]
    for socket in clients:
        for _ in range(outstanding):
            send(socket, request)
    done = 0
    started = warm = time.perf_counter()
    cpu = 0.0
    while True:
        for socket, _ in poller.poll():
            while (frames := receive(socket)) is not None:
                if frames[0] == b"MDPC02":
                    done += 1
                    send(socket, request)
                elif frames[1] == b"\x02":
                    send(socket, [b"MDPW02", b"\x04", *frames[2:]])
        now = time.perf_counter()
        if not cpu and now - started > 0.5:
            done, warm, cpu = 0, now, cpu_seconds(pid)
        elif cpu and now - warm > seconds:
            used = cpu_seconds(pid) - cpu
            context.destroy(linger=0)
            return done / (now - warm), used / done * 1e6


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def memory(pid: int) -> int:
    """Resident bytes of a process."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def ask(socket: Socket, question: bytes) -> dict:
    """The broker's answer to an `mmi.*` question."""
    send(socket, [b"MDPC02", b"\x01", question, b""])
    return json.loads(socket.recv_multipart()[-1])


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until the broker has taken everything in."""
    while not condition():
        time.sleep(0.05)


# ── what is measured ─────────────────────────────────────────────────────────────────────────────────────────────────


def cost(seconds: float, rounds: int) -> None:
    """Throughput and CPU a request, in turn with the forwarding loop."""
    print(f"{CLIENTS} clients, {WORKERS} workers, {len(BODY)}-byte bodies; median of {rounds} rounds of {seconds:g} s")
    print(f"{'':54}{'broker':>10}{'forwarding':>12}   ratio (spread)")
    for outstanding, name in ((1, "synchronous (1 outstanding)"), (64, "pipelined (64 outstanding)")):
        figures = []
        for number in range(rounds):
            print(f"  {name}, round {number + 1} of {rounds}", file=sys.stderr)
            with broker() as (pid, endpoint):
                ours = load(endpoint, outstanding, seconds, pid)
            with forwarder() as (pid, endpoint):
                floor = load(endpoint, outstanding, seconds, pid)
            figures.append((ours, floor))
        for at, unit in ((0, "requests a second"), (1, "CPU µs a request")):
            mine = statistics.median(each[0][at] for each in figures)
            base = statistics.median(each[1][at] for each in figures)
            ratios = sorted(each[0][at] / each[1][at] for each in figures)
            shown = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})"
            print(f"{name:32}{unit:22}{mine:10.1f}{base:12.1f}   {shown}")


def queued(count: int) -> None:
    """Memory of waiting requests."""
    with broker() as (pid, endpoint):
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(endpoint)
        ask(socket, b"mmi.stats")
        before = memory(pid)
        for _ in range(count):
            socket.send_multipart([b"MDPC02", b"\x01", SERVICE, b"x" * 100])
        wait_for(lambda: ask(socket, b"mmi.stats")["queued"] == count)
        grown = memory(pid) - before
        socket.close(0)
    print(f"{count} waiting 100-byte requests: {grown / 1e6:.1f} MB, {grown / count:.0f} bytes a request")


def hold(endpoint: str, count: int, pipe) -> None:
    """A process with `count` idle workers, each of which heartbeats every second, until the pipe says to end."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, count + 10)
    sockets = []
    for _ in range(count):
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.connect(endpoint)
        send(socket, [b"MDPW02", b"\x01", SERVICE])
        sockets.append(socket)
    turn = 0
    due = time.perf_counter()
    while not pipe.poll(max(0.0, due - time.perf_counter())):
        # A tenth of them at a time, so that the load is even.
        for socket in sockets[turn % 10 :: 10]:
            while receive(socket) is not None:
                pass
            send(socket, [b"MDPW02", b"\x05"])
        turn += 1
        due += 0.1
    context.destroy(linger=0)


def idle(count: int, seconds: float) -> None:
    """Memory of idle workers, and what their heartbeats cost, both ways, every second."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with broker("--liveness", "60") as (pid, endpoint):
        asker = zmq.Context.instance().socket(zmq.DEALER)
        asker.connect(endpoint)
        ask(asker, b"mmi.stats")
        before = memory(pid)
        holders = []
        here = 0
        for _ in range(HOLDERS):
            mine, theirs = multiprocessing.Pipe()
            holder = multiprocessing.Process(target=hold, args=(endpoint, count // HOLDERS, theirs), daemon=True)
            holder.start()
            holders.append((holder, mine))
            here += count // HOLDERS
            while ask(asker, b"mmi.stats")["workers"] < here:
                time.sleep(0.1)
            print(f"  {here} workers are there", file=sys.stderr)
        grown = memory(pid) - before
        started, cpu, beats = time.perf_counter(), cpu_seconds(pid), ask(asker, b"mmi.stats")["heartbeats"]
        time.sleep(seconds)
        took = time.perf_counter() - started
        used, taken = cpu_seconds(pid) - cpu, ask(asker, b"mmi.stats")["heartbeats"] - beats
        for holder, pipe in holders:
            pipe.send("end")
            holder.join()
        asker.close(0)
    print(f"{here} idle workers: {grown / 1e6:.1f} MB, {grown / here / 1000:.1f} kB a worker with its connection")
    each = used / max(taken, 1) * 1e6
    print(f"their heartbeats, every second both ways: {used / took * 100:.0f}% of a core, {each:.1f} µs each")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100_000, help="waiting requests")
    parser.add_argument("--workers", type=int, default=10_000, help="idle workers")
    options = parser.parse_args()
    cost(options.seconds, options.rounds)
    queued(options.requests)
    idle(options.workers, 10.0)


if __name__ == "__main__":
    main()
