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


pytestmark = pytest.mark.skipif(not Path(STATUS % 1).exists(), reason="memory is read from Linux's /proc")


def stream_to(clients, body, *options):
    """Have workers stream half as much again as the limit to each of these clients of a broker with these options.

    Return the broker's counts afterwards.  Its memory must have stayed within the limit.
    """
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        process, endpoint = stack.enter_context(broker(*options, "--heartbeat", "600"))

        def connect(kind, options=None):
            peer = kind(context, endpoint, options=options)
            stack.callback(peer.close)
            return peer

        streams = []
        for number, (kind, settings) in enumerate(clients):
            worker, client = connect(Worker), connect(kind, settings)
            worker.ready(b"stream %d" % number)
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
        assert memory(process.pid, "VmHWM") < 1.3 * (base + LIMIT)
        return stats


@pytest.mark.parametrize(
    "body",
    [pytest.param(body, id=name, marks=pytest.mark.long if "many" in name else ()) for name, body in BODIES.items()],
)
def test_c40_clients_that_do_not_read_take_what_the_limit_allows(body):
    silent = (Client, {zmq.RCVHWM: 1, zmq.RCVBUF: 65536})
    stats = stream_to([silent] * CLIENTS, body, "--max-outbox-bytes", str(LIMIT))
    assert stats["dropped"] == {"client-gone": CLIENTS}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_c40_collected_partials_take_what_requests_may_take(body):
    # C24: a 0.1 client gets all PARTIALs in one reply, so the broker keeps them until the FINAL.
    limits = "--max-request-bytes", str(LIMIT), "--max-frames", "65535"
    stats = stream_to([(OldClient, None)] * CLIENTS, body, *limits)
    dropped = stats["dropped"]
    assert dropped.keys() <= {"memory-full", "reply-too-large"}
    assert sum(dropped.values()) >= CLIENTS - 1
    assert (stats["request_bytes"], stats["running"], stats["disconnected"]) == (0, 0, {})
