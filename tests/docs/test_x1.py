"""docs/x1.md is true: its examples are what the real machines say to each other, its tables name all there is.

Each example is a block that names a conversation of `CONVERSATIONS`.  There the client's, the broker's and the worker's
machines are fed with each other's messages on a clock that stands still unless it is told to go on; all that is sent
is written down and must be what the document shows.
"""

import random
import re
from collections import deque
from pathlib import Path

import pytest

from zmdp.clients.session import ClientSession
from zmdp.mdp import registry, wire
from zmdp.mdp.broker import Broker
from zmdp.mdp.codes import Code
from zmdp.mdp.journal import Refusal
from zmdp.mdp.limits import Limits
from zmdp.workers.session import WorkerSession

PAGE = (Path(__file__).parents[2] / "docs" / "x1.md").read_text()
BLOCKS = dict(re.findall(r"^```x1 (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
HEADERS = {wire.CX1, wire.WX1, wire.C02, wire.W02}


class World:
    """A broker and its peers.  `said` is all that was sent, in order, as (who to whom: command, frames)."""

    def __init__(self):
        self.now = 1000.0
        self.limits = Limits()
        self.broker = Broker(self.limits, now=self.now)
        self.said = []
        self._peers = {}
        self._slots = {}
        self._to_deliver = deque()

    # ── peers ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def client(self, name="client"):
        session = ClientSession(rng=random.Random(1))
        self.connect(session, name)
        return session

    def worker(self, service, name="worker", **settings):
        session = WorkerSession(service, rng=random.Random(1), **settings)
        self.connect(session, name)
        return session

    def slot(self, worker, number):
        """Another worker on the connection of `worker`."""
        session = worker.sibling()
        self._slots[self._identity(worker), (number, b"")] = session
        self.send(session, session.connected(self.now, number))
        return session

    def _identity(self, session):
        slots = [identity for (identity, _), each in self._slots.items() if each is session]
        return (slots + [identity for identity, (_, each) in self._peers.items() if each is session])[-1]

    def connect(self, session, name):
        """There is a new socket.  The ROUTER gives it an identity that it has not given before."""
        first = 0x006B8B4567 if isinstance(session, ClientSession) else 0x00327B23C6
        identity = (first + sum(type(each) is type(session) for _, each in self._peers.values())).to_bytes(5)
        self._peers[identity] = (name, session)
        self.reconnect(session)

    def reconnect(self, session):
        """As if the socket were a new one to `session`, but under the identity of the old one."""
        if isinstance(session, ClientSession):
            session.connected("tcp://127.0.0.1:5555", self.now)
            self.run()
        else:
            self.send(session, session.connected(self.now))

    # ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, session, messages):
        """`session`'s machine says to send `messages`."""
        identity = self._identity(session)
        for message in messages:
            self._write_down(f"{self._peers[identity][0]} → broker", message)
            self._from_broker(self.broker.receive([identity, *message], self.now))
        self.run()

    def run(self):
        """Deliver what is under way, and what follows from that."""
        while True:
            for session in {id(session): session for _, session in self._peers.values()}.values():
                if isinstance(session, ClientSession) and session.messages:
                    messages, session.messages = session.messages, []
                    self.send(session, messages)
            if not self._to_deliver:
                return
            identity, message = self._to_deliver.popleft()
            slot = identity, wire.decode_broker(message).route
            self._slots.get(slot, self._peers[identity][1]).receive(message, self.now)

    def hold(self, session, messages):
        """`session` sends `messages`, and what the broker says to that stays on the way for now."""
        identity = next(identity for identity, (_, each) in self._peers.items() if each is session)
        for message in messages:
            self._write_down(f"{self._peers[identity][0]} → broker", message)
            self._from_broker(self.broker.receive([identity, *message], self.now))

    def tick(self, seconds, session=None):
        """Time goes on; then the broker, or the peer of `session`, does what is due."""
        self.now += seconds
        if session is None:
            self._from_broker(self.broker.tick(self.now))
        elif isinstance(session, ClientSession):
            session.tick(self.now)
        else:
            self.send(session, session.tick(self.now))
        self.run()

    def close(self):
        self._from_broker(self.broker.close(self.now))
        self.run()

    def restart(self):
        """Another broker takes the place of this one."""
        self.broker = Broker(self.limits, now=self.now)

    def forget(self):
        """What was said so far is not part of the example."""
        self.said.clear()

    def _from_broker(self, messages):
        for identity, *message in messages:
            self._write_down(f"broker → {self._peers[identity][0]}", message)
            self._to_deliver.append((identity, message))

    def _write_down(self, way, message):
        header = next(frame for frame in message if frame in HEADERS)
        code = message[message.index(header) + 1]
        kinds = [kind.name for kind, each in wire.CODES[header].items() if each == code]
        self.said.append((f"{way}: {kinds[0] if kinds else '?'}", message))


def stream(world):
    worker = world.worker("count")
    client = world.client()
    client.request(b"count", [b"to two"], world.now, stream=True)
    world.run()
    world.send(worker, worker.partial(worker.request, [b"1"], world.now))
    world.send(worker, worker.final(worker.request, [b"2", b"that is all"], world.now))


def options(world):
    worker, client, other = world.worker("sum"), world.client(), world.client("another client")
    other.request(b"sum", [b"x"], world.now)
    world.run()
    world.forget()
    client.request(
        b"sum", [b"1 2 3"], world.now, timeout=30, headers={"tenant": "größer"}, options={"precision": 2}, wait=False
    )
    world.run()
    world.now += 0.25
    world.send(worker, worker.final(worker.request, [b"x"], world.now))
    world.send(worker, worker.final(worker.request, [b"6"], world.now))
    world.said[:] = [(who, message) for who, message in world.said if message[-1] != b"x"]


def failure(world):
    worker, client = world.worker("divide"), world.client()
    world.forget()
    client.request(b"divide", [b"1", b"0"], world.now)
    world.run()
    world.send(worker, worker.error(worker.request, 500, "ZeroDivisionError: division by zero", world.now))
    client.request(b"divide", [b"1"], world.now)
    world.run()
    world.send(worker, worker.error(worker.request, 422, "two numbers, please", world.now, [b'{"given":1}']))


def no_worker(world):
    client = world.client()
    client.request(b"nobody", [b""], world.now, wait=False)
    world.run()


def cancel(world):
    worker, client = world.worker("slow"), world.client()
    world.forget()
    call = client.request(b"slow", [b"x"], world.now)
    world.run()
    request = worker.request
    client.cancel(call)
    world.run()
    assert request.cancelled
    world.send(worker, worker.error(request, 499, "stopped", world.now))
    assert not client.events


def late_cancel(world):
    worker, client = world.worker("slow"), world.client()
    world.forget()
    call = client.request(b"slow", [b"x"], world.now)
    world.run()
    world.hold(worker, worker.final(worker.request, [b"done"], world.now))
    client.cancel(call)
    world.run()
    assert not client.events


def unknown_number(world):
    client = world.client()
    call = client.request(b"slow", [b"x"], world.now)
    world.run()
    world.restart()
    client.cancel(call)
    world.run()


def ttl(world):
    worker, client = world.worker("slow"), world.client()
    world.forget()
    client.request(b"slow", [b"x"], world.now, timeout=0.5)
    world.run()
    world.tick(0.51)
    world.send(worker, worker.final(worker.request, [b"too late"], world.now))


def attempt(world):
    worker, client = world.worker("slow"), world.client()
    world.forget()
    client.request(b"slow", [b"x"], world.now)
    world.run()
    world.send(worker, worker.disconnect("closed", world.now))
    other = world.worker("slow", "second worker")
    assert other.request.attempt == 2
    world.send(other, other.final(other.request, [b"done"], world.now))


def worker_lost(world):
    worker, client = world.worker("count"), world.client()
    world.forget()
    client.request(b"count", [b"to two"], world.now, stream=True)
    world.run()
    world.send(worker, worker.partial(worker.request, [b"1"], world.now))
    world.send(worker, worker.disconnect("closed", world.now))


def client_heartbeat(world):
    client = world.client()
    client.request(b"slow", [b"x"], world.now)
    world.run()
    world.tick(1.0, client)


def reconnect(world):
    worker, client = world.worker("slow"), world.client()
    world.forget()
    client.request(b"slow", [b"x"], world.now, timeout=30)
    world.run()
    world.now += 6.0
    world.restart()
    client.lose("the broker has been silent for 5 s", world.now)
    worker.lose("the broker has been silent for 5 s", world.now)
    world.connect(worker, "worker, new connection")
    world.connect(client, "client, new connection")
    world.send(worker, worker.final(worker.request, [b"done"], world.now))


def worker_heartbeat(world):
    worker = world.worker("slow")
    world.forget()
    world.tick(1.0, worker)
    world.tick(0.1)


def slots(world):
    worker = world.worker("slow")
    second = world.slot(worker, b"1")
    client = world.client()
    client.request(b"slow", [b"x"], world.now)
    world.run()
    client.request(b"slow", [b"y"], world.now)
    world.run()
    world.tick(1.0, worker)
    world.send(second, second.tick(world.now))
    world.tick(0.1)
    world.send(worker, worker.final(worker.request, [b"done"], world.now))
    world.send(second, second.disconnect("closed", world.now))
    world.send(worker, worker.final(worker.request, [b"done as well"], world.now))


def disconnect(world):
    worker, other = world.worker("slow"), world.worker("slow", "another worker")
    world.forget()
    world.send(worker, worker.disconnect("closed", world.now))
    world.restart()
    world.tick(1.0, other)
    assert world.broker.stats.disconnected == {Refusal.NOT_REGISTERED: 1}
    world.connect(other, "another worker, new connection")


def closing(world):
    world.worker("slow")
    client = world.client()
    world.forget()
    client.request(b"slow", [b"x"], world.now)
    world.run()
    world.close()


def number_in_use(world):
    worker, client = world.worker("slow"), world.client()
    world.forget()
    client.request(b"slow", [b"x"], world.now)
    world.run()
    world.reconnect(client)  # it sends all again; only, it is not another connection
    world.send(worker, worker.final(worker.request, [b"done"], world.now))


def malformed(world):
    client = world.client()
    world.send(client, [[b"7", b"", b"MDPCX1", b"\x01", b"sum", b"[1,2]", b"1 2 3"]])
    world.send(client, [[b"", b"MDPCX1", b"\x01", b"sum", b"", b"1 2 3"]])


def mmi(world):
    world.worker("sum")
    client = world.client()
    world.forget()
    client.request(b"mmi.service", [b"sum"], world.now)
    world.run()


def mixed(world):
    worker = world.worker("divide", protocol="0.2")
    client = world.client()
    client.request(b"divide", [b"1", b"0"], world.now, timeout=30)
    world.run()
    world.send(worker, worker.error(worker.request, 500, "ZeroDivisionError: division by zero", world.now))


CONVERSATIONS = {
    each.__name__.replace("_", "-"): each
    for each in (
        stream, options, failure, no_worker, cancel, late_cancel, unknown_number, ttl, attempt, worker_lost,
        client_heartbeat, reconnect, worker_heartbeat, slots, disconnect, closing, number_in_use, malformed, mmi, mixed,
    )
}  # fmt: skip


def written(said):
    """A conversation as the document writes it."""
    return "\n".join("\n".join([f"# {heading}", *map(show, message), ""]) for heading, message in said)


def show(frame):
    text = frame.decode(errors="replace")
    return f'"{text}"' if text.isprintable() and text.encode() == frame else frame.hex(" ")


def parsed(block):
    """What a block of the document says was sent."""
    said = []
    for line in block.splitlines():
        if line.startswith("# "):
            said.append((line[2:], []))
        elif line.startswith('"'):
            assert line.endswith('"')
            said[-1][1].append(line[1:-1].encode())
        elif line:
            said[-1][1].append(bytes.fromhex(line))
    return said


def rows(heading):
    """The cells of the tables under a heading, without their first two lines."""
    section = re.search(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in lines[2:]]


def test_every_example_is_a_conversation_and_every_conversation_an_example():
    assert list(BLOCKS) == list(CONVERSATIONS)
    assert len(re.findall(r"^```", PAGE, re.MULTILINE)) == 2 * len(CONVERSATIONS)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_an_example_is_what_is_really_sent(name):
    world = World()
    CONVERSATIONS[name](world)
    assert parsed(BLOCKS[name]) == world.said, "this is what was sent:\n" + written(world.said)
    assert world.broker.stats.failures == 0


WAYS = {"client → broker", "broker → client", "worker → broker", "broker → worker"}


@pytest.mark.parametrize(
    ("heading", "header"), [("Client and broker", wire.CX1), ("Worker and broker", wire.WX1)], ids=["client", "worker"]
)
def test_every_command_has_its_row_and_an_example_for_each_direction(heading, header):
    table = rows(heading)
    assert {name: code for name, _, code, _ in table} == {
        kind.name: code.hex() for kind, code in wire.CODES[header].items()
    }
    for name, ways, code, layout in table:
        assert f'"{header.decode()}" {code}' in layout
        for way in ways.split(", "):
            assert way in WAYS
            shown = [
                message for block in BLOCKS.values() for said, message in parsed(block) if said == f"{way}: {name}"
            ]
            assert any(header in message for message in shown), f"no example of {name}, {way}"


def test_every_code_has_its_row():
    assert {int(code): name for code, name, *_ in rows("Codes")} == {code.value: code.name for code in Code}


def test_every_reason_for_which_a_message_is_invalid_is_named():
    section = PAGE.partition("## Invalid messages")[2].partition("\n## ")[0]
    assert [reason for reason in wire.Reason if f"`{reason}`" not in section] == []


@pytest.mark.parametrize("reason", [cells for cells in rows("Invalid messages") if cells[2] != "none"], ids=str)
def test_what_is_answered_is_answered_as_the_table_says(reason):
    keys, _, answer = reason
    messages = {
        "too-few-frames": [b"1", b"", b"MDPCX1", b"\x01"],
        "unknown-command": [b"1", b"", b"MDPCX1", b"\x04", b"sum"],
        "bad-service-name": [b"1", b"", b"MDPCX1", b"\x01", b"\n", b"", b"x"],
        "no-number": [b"", b"MDPCX1", b"\x05", b"sum"],
        "no-body": [b"1", b"", b"MDPCX1", b"\x01", b"sum", b""],
        "bad-options": [b"1", b"", b"MDPCX1", b"\x01", b"sum", b"{", b"x"],
        "too-many-frames": [b"1", b"", b"MDPCX1", b"\x06", b"x"],
        "number-in-use": [b"0", b"", b"MDPCX1", b"\x01", b"sum", b"", b"x"],
        "unknown-number": [b"1", b"", b"MDPCX1", b"\x05", b"sum"],
        "too-large": [b"1", b"", b"MDPCX1", b"\x01", b"sum", b"", b"x" * 1001],
    }
    key = re.findall(r"`([a-z-]+)`", keys)[0]
    message = messages[key]
    broker = Broker(Limits(max_message=1000), now=0.0)
    broker.receive([b"amy", b"0", b"", b"MDPCX1", b"\x01", b"sum", b"", b"x"], 0.0)
    (told,) = broker.receive([b"amy", *message], 0.0)
    envelope = message[: message.index(b"MDPCX1")]
    assert told[: len(envelope) + 3] == [b"amy", *envelope, b"MDPCX1", b"\x04"]
    assert told[-2] == answer.removeprefix("ERROR ").encode()
    assert broker.stats.invalid == {key: 1}


def test_the_numbers_in_the_text_are_those_of_the_code():
    for number, text in (
        (wire.MAX_OPTIONS, "of at most {} bytes"),
        (wire.MAX_NESTING, "at most {} objects and arrays deep"),
        (wire.MAX_ENVELOPE, "It MUST have 2 to {} frames"),
        (wire.MAX_NAME, "Each of the others MUST have 1 to {} bytes"),
        (registry.REMEMBERED, "at least {} of"),
    ):
        assert text.format(number) in " ".join(PAGE.split())
    assert wire.MAX_TTL == 10**15
    assert "10¹⁵" in PAGE
