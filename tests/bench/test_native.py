"""The load generator in C, in X1, against a broker of a few lines that uses `mdp/wire/batch.py`."""

import itertools
import math
import os
import sys
import threading
from collections import deque
from pathlib import Path

import pytest
import zmq
from support.processes import TIMEOUT_SECONDS

from zmdp.mdp import wire
from zmdp.mdp.wire import batch

BENCH = Path(__file__).parents[2] / "bench"
SERVICE = b"bench"
FINAL_TO_CLIENT = 3


@pytest.fixture
def native():
    import native

    return native


class Broker(threading.Thread):
    """Gives workers as many requests as they have credit for; answers requests that arrived together in one message."""

    def __init__(self):
        super().__init__()
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.free = {}  # credit by worker
        self.waiting = deque()
        self.addresses = itertools.count(1)
        self.held = {}  # client and number by address
        self.sizes = []  # requests of each message
        self.attachments = 0
        self.credits = []
        self.heartbeats = 0
        self.all_gone = threading.Event()
        self.invalid = []
        self.workers = 0
        self.ended = threading.Event()

    def run(self):
        try:
            while not self.ended.is_set():
                if self.router.poll(20):
                    self.handle(self.router.recv_multipart())
        finally:
            self.context.destroy(linger=0)

    def handle(self, message):
        peer, header = message[0], message[2]
        assert message[1] == b""
        if len(message) == 3:
            self.heartbeats += 1
            return
        assert message[3] == b"\x09"
        self.attachments += len(message) - 5
        read = batch.from_client if header == wire.CX1 else batch.from_worker
        commands = read(message, 2, (peer, b""), 1 << 30, 100)
        self.sizes += [len(commands)] * (header == wire.CX1)
        answers = {}
        for command in commands:
            if isinstance(command, wire.Request):
                assert command.service == SERVICE
                self.waiting.append((peer, command.id, command.body))
            elif isinstance(command, wire.Ready):
                assert command.service == SERVICE
                self.free[peer] = command.credit
                self.credits.append(command.credit)
                self.router.send_multipart([peer, b"", wire.WX1])
                self.workers += 1
            elif isinstance(command, wire.Reply) and command.final:
                client, number, body = self.held.pop(command.id)
                assert list(map(bytes, command.body)) == list(map(bytes, body))
                self.free[peer] += 1
                answer = answers.setdefault(client, batch.Batch((client, b""), wire.CX1))
                answer.reply(FINAL_TO_CLIENT, number, command.body)
            elif isinstance(command, wire.Disconnect):
                self.workers -= 1
                if not self.workers:
                    self.all_gone.set()
            else:
                self.invalid.append(command)
        for answer in answers.values():
            self.send(answer)
        self.dispatch()

    def dispatch(self):
        for worker in self.free:
            work = batch.Batch((worker, b""), wire.WX1)
            while self.waiting and self.free[worker]:
                self.free[worker] -= 1
                request = self.waiting.popleft()
                address = next(self.addresses)
                self.held[address] = request
                work.request_to_worker(address, 0, 1, b'{"headers": {"a": "b"}}', request[2])
            self.send(work)

    def send(self, packed):
        for message in packed.messages():
            self.router.send_multipart(message)


@pytest.fixture
def broker():
    broker = Broker()
    broker.start()
    yield broker
    broker.ended.set()
    broker.join()


@pytest.fixture(scope="module")
def tools():
    sys.path.insert(0, str(BENCH))
    try:
        import native
        import processes

        with native.built() as tools:
            yield tools
    except processes.FailedError as missing:
        pytest.skip(str(missing))
    finally:
        sys.path.remove(str(BENCH))
        del sys.modules["native"], sys.modules["processes"]


@pytest.mark.parametrize("body", [0, 32, 9000, 70_000])
def test_the_load_speaks_x1(native, tools, broker, body):
    import processes

    server = processes.Server(broker.endpoint, [os.getpid()])
    with native.Loading(tools, server, "X1", clients=2, workers=2, outstanding=100, body=body) as loading:
        found = loading.turn(0.5)
    assert found.requests >= 200
    assert broker.credits == [64, 64]
    assert broker.heartbeats == 2
    assert broker.invalid == []
    assert (broker.attachments > 0) == (body >= wire.SHARED)
    # The first requests of a client go together, as far as one message holds them.
    most = {0: 100, 32: 100, 9000: 64, 70_000: 14}[body]
    assert broker.sizes[0] == most
    # So do the requests that follow replies in one message: a worker's credit is 64, and it answers in one message.
    assert max(broker.sizes[2 * math.ceil(100 / most) :]) > 1
    assert broker.all_gone.wait(TIMEOUT_SECONDS)


def test_the_loop_forwards_the_load_of_mdp_02(native, tools):
    with native.forwarding(tools) as server, native.Loading(tools, server, "0.2", outstanding=9) as loading:
        assert loading.turn(0.1).requests >= 36
