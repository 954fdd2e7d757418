"""What a broker process takes for clients that do not read, and for replies that it collects (C40)."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from support.peers import Client, OldClient, Worker
from support.processes import broker

LIMIT = 20_000_000
STATUS = "/proc/%d/status"
CLIENTS = 4
BODIES = {
    "large frames": [b"x" * 1_000_000],
    "frames that are copied": [b"x" * 5_000],
    "many small frames": [b"x" * 10] * 500,
}


def memory(pid, kind="VmRSS"):
    """The resident memory of a process in bytes; with `VmHWM` the most that it has ever been."""
    (line,) = (each for each in Path(STATUS % pid).read_text().splitlines() if each.startswith(kind))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path(STATUS % 1).exists(), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize(
    "body",
    [pytest.param(body, id=name, marks=pytest.mark.long if "many" in name else ()) for name, body in BODIES.items()],
)
def test_c40_clients_that_do_not_read_take_what_the_limit_allows(body):
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        process, endpoint = stack.enter_context(broker("--max-outbox-bytes", str(LIMIT), "--heartbeat", "600"))

        def connect(kind, options=None):
            peer = kind(context, endpoint, options=options)
            stack.callback(peer.close)
            return peer

        streams = []
        for number in range(CLIENTS):
            worker = connect(Worker)
            worker.ready(b"stream %d" % number)
            client = connect(Client, {zmq.RCVHWM: 1, zmq.RCVBUF: 65536})
            client.request(b"stream %d" % number, b"")
            streams.append((worker, worker.work(b"")))
        base = memory(process.pid)
        size = sum(len(frame) + 40 for frame in body)
        for number in range(3 * LIMIT // 2 // size):
            for worker, address in streams:
                worker.partial(address, *body)
                if number % max(1, 1_000_000 // size) == 0:
                    worker.sync()  # no faster than the broker takes it, so that nothing piles up in front of it
        for worker, address in streams:
            worker.final(address, b"end")
            worker.sync()
        other = connect(Client)
        other.request(b"mmi.stats", b"")
        stats = json.loads(other.recv()[-1])
        assert stats["dropped"] == {"client-gone": CLIENTS}
        assert memory(process.pid, "VmHWM") < 1.3 * (base + LIMIT)


@pytest.mark.skipif(not Path(STATUS % 1).exists(), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_c40_collected_partials_take_what_requests_may_take(body):
    # C24: a 0.1 client gets all PARTIALs in one reply, so the broker keeps them until the FINAL.
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        limits = "--max-request-bytes", str(LIMIT), "--max-frames", "65535", "--heartbeat", "600"
        process, endpoint = stack.enter_context(broker(*limits))

        def connect(kind):
            peer = kind(context, endpoint)
            stack.callback(peer.close)
            return peer

        streams = []
        for number in range(CLIENTS):
            worker, client = connect(Worker), connect(OldClient)
            worker.ready(b"stream %d" % number)
            client.request(b"stream %d" % number, b"")
            streams.append((client, worker, worker.work(b"")))
        base = memory(process.pid)
        size = sum(len(frame) + 40 for frame in body)
        for number in range(3 * LIMIT // 2 // size):
            for _, worker, address in streams:
                worker.partial(address, *body)
                if number % max(1, 1_000_000 // size) == 0:
                    worker.sync()
        for _, worker, address in streams:
            worker.final(address, b"end")
            worker.sync()
        other = connect(Client)
        other.request(b"mmi.stats", b"")
        stats = json.loads(other.recv()[-1])
        dropped = stats["dropped"]
        assert dropped.keys() <= {"memory-full", "reply-too-large"}
        assert sum(dropped.values()) >= CLIENTS - 1
        assert (stats["request_bytes"], stats["running"], stats["disconnected"]) == (0, 0, {})
        assert memory(process.pid, "VmHWM") < 1.3 * (base + LIMIT)
