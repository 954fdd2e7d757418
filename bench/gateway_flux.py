"""The Flux gateway's rate, with a raw client in this process: `python bench/gateway_flux.py`.

Broker, echo worker and gateway are processes of their own.  The client keeps requests outstanding over one connection,
and does as little as possible itself: it counts responses and checks their errno.
"""

import argparse
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from socket import AF_UNIX, SOCK_STREAM, socket

from native import cpu_seconds
from turns import BIN, WORKER, running, start_broker

TARGET = 5000
"""Requests per second."""
HEADER = struct.Struct(">BBBBIIII")
PREFIX = struct.Struct("<I"), struct.Struct(">I")


def request(topic: bytes, payload: bytes) -> bytes:
    """Return a framed request, in the byte order of genuine clients on x86."""
    header = HEADER.pack(0x8E, 1, 1, 0x0B, 0xFFFFFFFF, 0, 0xFFFFFFFF, 1)
    parts = b"".join(bytes([len(part)]) + part for part in (b"", topic, payload, header))
    return PREFIX[0].pack(0xFFEE0012) + PREFIX[1].pack(len(parts)) + parts


def responses(connection: socket) -> Iterator[int]:
    """Yield the number of responses that each read completes."""
    buffer = b""
    while True:
        arrived = connection.recv(1 << 18)
        if not arrived:
            raise SystemExit("the gateway closed the connection")
        buffer += arrived
        at = count = 0
        while len(buffer) >= at + 8:
            end = at + 8 + PREFIX[1].unpack_from(buffer, at + 4)[0]
            if len(buffer) < end:
                break
            if HEADER.unpack_from(buffer, end - HEADER.size)[6]:
                raise SystemExit("a request failed")
            at, count = end, count + 1
        buffer = buffer[at:]
        if count:
            yield count


def turn(path: str, seconds: float, outstanding: int, message: bytes) -> float:
    """Return the rate over so many seconds."""
    with socket(AF_UNIX, SOCK_STREAM) as connection:
        connection.connect(path)
        if connection.recv(1) != b"\0":
            raise SystemExit("the gateway did not admit this user")
        connection.sendall(message * outstanding)
        arriving = responses(connection)
        began = time.monotonic()
        answered = 0
        while time.monotonic() < began + seconds:
            count = next(arriving)
            answered += count
            connection.sendall(message * count)
        rate = answered / (time.monotonic() - began)
        left = outstanding
        while left > 0:
            left -= next(arriving)
        return rate


def main() -> None:
    """Measure, and print the rate and the CPU time of each process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of a round")
    parser.add_argument("--outstanding", type=int, default=64)
    options = parser.parse_args()
    with ExitStack() as stack:
        path = f"{stack.enter_context(tempfile.TemporaryDirectory())}/flux"
        endpoint, broker = start_broker(stack)
        worker = stack.enter_context(running(sys.executable, "-c", WORKER, endpoint))
        gateway = stack.enter_context(
            running(str(BIN / "mdp-gateway"), "flux", "--socket", path, "--broker", endpoint, "--log-level", "error")
        )  # fmt: skip
        assert gateway.stdout is not None
        gateway.stdout.readline()
        pids = {"broker": broker, "worker": worker.pid, "gateway": gateway.pid}
        subprocess.run(
            [str(BIN / "mdclient"), "call", "--wait", "--broker", endpoint, "echo", "x"],
            check=True,
            capture_output=True,
        )
        message = request(b"echo.say", b'{"x":1}\0')
        turn(path, 1.0, options.outstanding, message)
        rates, cpu = [], dict.fromkeys(pids, 0.0)
        for _ in range(options.rounds):
            before = {name: cpu_seconds(pid) for name, pid in pids.items()}
            rates.append(turn(path, options.seconds, options.outstanding, message))
            answered = rates[-1] * options.seconds
            for name, pid in pids.items():
                cpu[name] += 1e6 * (cpu_seconds(pid) - before[name]) / answered / options.rounds
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        print(f"{statistics.median(rates):,.0f} requests/s ({spread}), target {TARGET:,}")
        print(", ".join(f"{name} {value:.0f} µs" for name, value in cpu.items()), "of CPU time per request")


if __name__ == "__main__":
    main()
