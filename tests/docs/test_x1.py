"""Checks docs/x1.md: the broker sends what the examples show, the programs run, and the tables are complete.

An example shows who sends what to whom.  The test feeds the peers' messages to a broker, on a clock that moves only
where the example says how much time passes, and compares what the broker sends with what the example shows.
"""

import random
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq
from support.processes import TIMEOUT_SECONDS, broker
from support.router import Router

from zmdp.clients.session import ClientSession
from zmdp.mdp import wire
from zmdp.mdp.broker import given_up, registry
from zmdp.mdp.broker import machine as broker_machine
from zmdp.mdp.broker.journal import Refusal
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.codes import Code
from zmdp.mdp.limits import Limits
from zmdp.mdp.wire import batch, batch_python
from zmdp.workers.credit import CreditController
from zmdp.workers.session import WorkerSession

PAGE = (Path(__file__).parents[2] / "docs" / "x1.md").read_text()
EXAMPLES = re.findall(r"^```x1 (\S+)(?: (\S+))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
HEADERS = {wire.CX1, wire.WX1, wire.C02, wire.W02, wire.CL1, wire.WL1}
FIRST_ADDRESS, NEXT_FIRST_ADDRESS = 417, 5301
"""The first addresses of the broker and of the restarted broker."""


# ── examples ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Entry:
    """A message, or an event if it has no frames."""

    heading: str
    frames: list[bytes] = field(default_factory=list)


class World:
    """A broker and its peers, whose messages come from an example."""

    def __init__(self, service):
        self.said = []
        self._now = 1000.0
        self._broker = Broker(now=self._now, name="east", first_address=FIRST_ADDRESS)
        self._brokers = [self._broker]
        if service:
            self._hear("worker", [b"", wire.WX1, b"\1", service.encode()])

    def take(self, entry):
        """Perform `entry`, unless it is a message of the broker, and record what is sent."""
        sender, _, _ = entry.heading.partition(" → broker")
        if sender != entry.heading:
            self.said.append(Entry(f"{sender} → broker: {command(entry.frames)}", entry.frames))
            self._say(self._hear(sender, entry.frames))
        elif not entry.heading.startswith("broker → "):
            self.said.append(entry)
            self._happen(entry.heading)

    def _hear(self, sender, frames):
        return self._broker.receive([sender.encode(), *frames], self._now)

    def _happen(self, event):
        if match := re.fullmatch(r"(\d+) ms later", event):
            self._now += int(match[1]) / 1000
            self._say(self._broker.tick(self._now))
        elif match := re.fullmatch("the connection of (.*) ends", event):
            self._say(self._broker.unreachable(match[1].encode(), self._broker.turn, self._now))
        elif event == "the broker is restarted":
            self._broker = Broker(now=self._now, first_address=NEXT_FIRST_ADDRESS)
            self._brokers.append(self._broker)
        elif event == "the broker drains":
            self._say(self._broker.drain(self._now))
        else:
            assert event == "the broker shuts down"
            self._say(self._broker.close(self._now))

    def _say(self, messages):
        for identity, *frames in messages:
            self.said.append(Entry(f"broker → {identity.decode()}: {command(frames)}", frames))

    @property
    def failures(self):
        return sum(each.stats.internal_errors for each in self._brokers)


def command(frames):
    at = next(at for at, frame in enumerate(frames) if frame in HEADERS)
    if len(frames) == at + 1:
        return "HEARTBEAT"
    if frames[at + 1] == wire.BATCH:
        return "batch"
    return next(kind.name for kind, code in wire.CODES[frames[at]].items() if code == frames[at + 1])


TOKEN = re.compile(r"""([0-9]+) × "(.)"|"(.*?)"(?= |$)|([0-9a-f]{2})(?= |$)|(records)""")


def parsed(block):
    """Return the entries of an example: messages, and events in parentheses; indented lines continue a message."""
    entries = []
    for line in block.splitlines():
        if line.startswith("("):
            entries.append(Entry(line.strip("()")))
        elif " ; " in line or re.match(" +[0-9a-f]{2} [0-9a-f]{2} ", line):
            entries[-1].frames[-1] += record_bytes(line.partition(" ; ")[0].strip())
        else:
            heading, _, rest = line.partition("  ")
            if heading:
                entries.append(Entry(heading))
            assert not TOKEN.sub("", rest).strip(), line
            entries[-1].frames += map(frame_of, TOKEN.finditer(rest))
    return entries


def frame_of(token):
    count, repeated, text, code, _ = token.groups()
    if count:
        return int(count) * repeated.encode()
    return bytes.fromhex(code) if code else (text or "").encode()


def record_bytes(text):
    before, _, rest = text.partition('"')
    quoted, _, after = rest.rpartition('"')
    return bytes.fromhex(before) + quoted.encode() + bytes.fromhex(after)


def written(said):
    """A conversation in the notation of the page."""
    width = max(len(each.heading) for each in said if each.frames)
    lines = []
    for each in said:
        line = f"{each.heading:{width}} " if each.frames else f"({each.heading})"
        for token in map(show, each.frames):
            if len(line) + len(token) >= 100:
                lines.append(line)
                line = "   "
            line += f" {token}"
        lines.append(line)
    return "\n".join([*lines, ""])


def show(frame):
    if len(frame) > 100 and len(set(frame)) == 1:
        return f'{len(frame)} × "{frame[:1].decode()}"'
    text = frame.decode(errors="replace")
    return f'"{text}"' if text.isprintable() and text.encode() == frame else frame.hex(" ")


def test_every_block_is_an_example_or_a_program():
    names = [name for name, _, _ in EXAMPLES]
    assert len(set(names)) == len(names) > 20
    blocks = re.findall(r"^```(\w*)", PAGE, re.MULTILINE)
    assert sorted(filter(None, blocks)) == ["console", "python", "python", *["x1"] * len(names)]


@pytest.mark.parametrize(("service", "block"), [each[1:] for each in EXAMPLES], ids=[name for name, *_ in EXAMPLES])
def test_examples_are_what_the_broker_sends(service, block):
    world, entries = World(service), parsed(block)
    for entry in entries:
        world.take(entry)
    assert entries == world.said, "this is what was sent:\n" + written(world.said)
    assert any(entry.heading.startswith("broker → ") for entry in entries)
    assert world.failures == 0


def test_zmdps_client_and_worker_send_the_batched_example():
    """They get the messages that the example's broker sends, and must send the others."""
    (entries,) = [parsed(block) for name, _, block in EXAMPLES if name == "batched"]
    expected = {way: [each.frames for each in entries if each.heading.startswith(way)] for way in ("client", "worker")}
    told = [each.frames for each in entries if each.heading.startswith("broker → ")]
    client, worker = ClientSession(rng=random.Random(1)), WorkerSession(
        "shout", controller=CreditController(4), options=b'{"name":"shout.py"}', rng=random.Random(1)
    )  # fmt: skip
    worker.connected(1000.0)
    assert worker.take_messages() == [expected["worker"].pop(0)]
    client.connected("tcp://127.0.0.1:5555", 1000.0)
    calls = [
        client.request(b"shout", [b"hello"], 1000.0, timeout=30),
        client.request(b"shout", [b"not this", b"x" * 8192], 1000.0),
    ]
    assert client.take_messages() == expected["client"]
    work, answer, heartbeat, disconnect = told
    worker.receive(work, 1000.0)
    hello, large = worker.begin(1000.0), worker.begin(1000.0)
    assert [hello, large] == [[b"hello"], [b"not this", b"x" * 8192]]
    assert hello.deadline == 1030.0
    worker.final(hello, [b"HELLO"], 1000.0)
    worker.error(large, 422, "too long to shout", 1000.0, [b""])
    assert worker.take_messages() == [expected["worker"].pop(0)]
    client.receive(answer, 1000.0)
    (first, reply), (second, error) = client.events
    assert [first, second] == calls
    assert reply == [b"HELLO"]
    assert (error.code, error.text) == (422, "too long to shout")
    worker.receive(heartbeat, 1001.1)
    worker.tick(1001.1)
    assert worker.take_messages() == [expected["worker"].pop(0)]
    worker.leave(1001.1)
    assert worker.take_messages() == [expected["worker"].pop(0)]
    worker.receive(disconnect, 1001.1)
    assert worker.ended
    assert expected["worker"] == []


# ── programs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def running(number, endpoint, interval="1.0"):
    """Run one of the page's two programs with the broker at `endpoint`."""
    program = PROGRAMS[number].replace("tcp://127.0.0.1:5555", endpoint)
    assert endpoint in program
    assert ", 1.0, 5 " in program or "= 1.0, 5 " in program
    program = program.replace("1.0, 5 ", f"{interval}, 5 ")
    running_program = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        yield running_program
    finally:
        running_program.kill()
        running_program.communicate()


def test_the_programs_are_as_short_as_the_page_says():
    assert len(PROGRAMS) == 2
    for program in PROGRAMS:
        assert len([line for line in program.splitlines() if line.strip()]) <= 60


def test_the_programs_print_what_the_page_says():
    (printed,) = re.findall(r"^```console\n\$ python client.py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    with broker() as (_, at), running(0, at) as worker:
        wait_for_worker(at)
        with running(1, at) as client:
            out, _ = client.communicate(timeout=TIMEOUT_SECONDS)
        assert client.returncode == 0
        assert sorted(out.splitlines()) == sorted(printed.splitlines())
        worker.terminate()
        assert worker.wait(TIMEOUT_SECONDS) == 0


def wait_for_worker(endpoint):
    with zmq.Context() as context, context.socket(zmq.REQ) as asking:
        asking.linger, asking.rcvtimeo = 0, int(TIMEOUT_SECONDS * 1000)
        asking.connect(endpoint)
        until = time.monotonic() + TIMEOUT_SECONDS
        while True:
            asking.send_multipart([b"MDPC02", b"\1", b"mmi.service", b"shout"])
            if asking.recv_multipart()[-1] == b"200":
                return
            assert time.monotonic() < until


def test_the_client_leaves_a_broker_that_is_silent_and_asks_again():
    with Router() as mute, running(1, mute.endpoint, "0.05"):
        first = [mute.recv() for _ in range(3)]
        assert [frames[1] for frames in first] == [b"1", b"2", b"3"]
        message = mute.recv()
        while message[0] == first[0][0]:
            assert message[1:] == [b"", b"MDPCX1", b"\6"]
            message = mute.recv()
        again = [message, mute.recv(), mute.recv()]
        assert [frames[1:] for frames in again] == [frames[1:] for frames in first]


def test_the_worker_leaves_a_broker_that_is_silent_and_registers_again():
    with Router() as mute, running(0, mute.endpoint, "0.05"):
        identity, *ready = mute.recv()
        message = mute.recv()
        while message[0] == identity:
            assert message[1:] == [b"", b"MDPWX1", b"\5"]
            message = mute.recv()
        assert message[1:] == ready


# ── tables and numbers ───────────────────────────────────────────────────────────────────────────────────────────────


def rows(heading):
    """Return the cells of the tables under a heading, without their header lines."""
    section = re.search(rf"^#+ {heading}\n(.*?)(?=^#+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    header = [at for at, cells in enumerate(lines) if set("".join(cells)) == {"-", "|"}]
    return [
        [cell.strip() for cell in cells]
        for at, cells in enumerate(lines)
        if not any(at in {each - 1, each} for each in header)
    ]


SIDES = {"Client and broker": wire.CX1, "Worker and broker": wire.WX1}


@pytest.mark.parametrize(("heading", "header"), SIDES.items(), ids=["client", "worker"])
def test_every_command_has_its_row_and_an_example_for_each_direction(heading, header):
    table = rows(heading)
    assert {name: code for name, _, code, _ in table} == {
        kind.name: code.hex() for kind, code in wire.CODES[header].items()
    }
    said = [entry for _, _, block in EXAMPLES for entry in parsed(block) if header in entry.frames]
    for name, ways, code, layout in table:
        assert f'"{header.decode()}" {code}' in layout
        for way in ways.split(", "):
            assert [each for each in said if each.heading == f"{way}: {name}"], f"no example of {name}, {way}"


def test_every_record_has_its_row():
    table = {(name, way) for name, way, _ in rows("The batched form")}
    framed = {(name, way) for heading in SIDES for name, ways, *_ in rows(heading) for way in ways.split(", ")}
    assert table == {(name, way) for name, way in framed if name not in {"HEARTBEAT", "DISCONNECT"}}


VALUES = {
    "ttl": 30000, "service": b"echo", "options": b'{"a":1}', "attempt": 3, "code": 422, "text": b"why", "credit": 64,
    "body": [b"one", b"", b"x" * 8192],
}  # fmt: skip
SIZES = {"u8": 1, "u16": 2, "u32": 4}


def packed_as_described(code, number, fields):
    """Return a record packed as its row describes, and its attachments."""
    data, attachments = b"", []
    for told in [] if fields == "none" else fields.strip("`").split(", "):
        if told == "body":
            data += len(VALUES["body"]).to_bytes(2)
            for frame in VALUES["body"]:
                attached = len(frame) >= 8192
                data += b"\xff\xff\xff\xff" if attached else len(frame).to_bytes(4) + frame
                attachments += [frame] * attached
        elif "+" in told:
            size, name = told.split("+")
            data += len(VALUES[name]).to_bytes(SIZES[size]) + VALUES[name]
        else:
            size, name = told.split(" ")
            data += VALUES[name].to_bytes(SIZES[size])
    data = code + number.to_bytes(8) + data
    return [len(data).to_bytes(4) + data, *attachments]


@pytest.mark.parametrize(("name", "way", "fields"), rows("The batched form"))
def test_a_record_is_packed_as_its_row_says(name, way, fields):
    header = wire.CX1 if "client" in way else wire.WX1
    code, kind = wire.CODES[header][wire.Kind[name]], name
    number = 0 if name in {"READY", "CREDIT"} else 1 << 40
    packed = batch.Batch((b"",), header)
    v = VALUES
    {
        ("REQUEST", wire.CX1): lambda: packed.request_to_broker(
            number, v["ttl"], v["service"], v["options"], v["body"]
        ),
        ("REQUEST", wire.WX1): lambda: packed.request_to_worker(
            number, v["ttl"], v["attempt"], v["options"], v["body"]
        ),
        ("PARTIAL", header): lambda: packed.reply(code[0], number, v["body"]),
        ("FINAL", header): lambda: packed.reply(code[0], number, v["body"]),
        ("ERROR", header): lambda: packed.error(code[0], number, v["code"], v["text"], v["body"]),
        ("CANCEL", header): lambda: packed.signal(code[0], number),
        ("RELEASE", header): lambda: packed.signal(code[0], number),
        ("READY", header): lambda: packed.ready(v["credit"], v["service"], v["options"]),
        ("CREDIT", header): lambda: packed.credit(v["credit"]),
    }[kind, header]()
    assert packed.messages() == [[b"", header, wire.BATCH, *packed_as_described(code, number, fields)]]


def test_every_code_has_its_row_and_its_origin():
    table = {int(code): (name, sender) for code, name, sender, *_ in rows("Errors")}
    assert {code: name for code, (name, _) in table.items()} == {code.value: code.name for code in Code}
    assert {code for code, (_, sender) in table.items() if sender == "broker"} == broker_machine.BROKER_CODES


@pytest.mark.parametrize(("code", "sender"), [(cells[0], cells[2]) for cells in rows("Errors")])
@pytest.mark.parametrize("detail", [[], [b""], [b"why"]], ids=["none", "empty", "detail"])
def test_a_workers_error_is_not_taken_for_the_brokers(code, sender, detail):
    world = World("divide")
    for block in (
        'client → broker: REQUEST  "1" "" "MDPCX1" 01 "divide" "" "1" "0"',
        f'worker → broker: ERROR  "" "MDPWX1" 07 "417" "" "{code}" "no"',
    ):
        (entry,) = parsed(block)
        world.take(Entry(entry.heading, entry.frames + detail * ("ERROR" in entry.heading)))
    added = [b""] * (sender == "broker" and not detail)
    assert world.said[-1].frames[-2 - len(detail + added) :] == [code.encode(), b"no", *detail, *added]


def test_the_options_of_ready_are_those_that_the_broker_reads():
    options = [key.strip("`") for key, *_ in rows("Credit")]
    ready = wire.ready_with((), b"echo", b"{%s}" % b",".join(b'"%s":7' % key.encode() for key in options[:1]))
    assert ready.credit == 7
    of_links = {"hops", "free"}
    assert set(options) == set(wire.Ready._fields) - {"route", "header", "service"} - of_links


def test_every_reason_for_which_a_message_is_invalid_is_named():
    section = PAGE.partition("\n## Invalid and unexpected messages\n")[2].partition("\n## ")[0]
    assert [reason for reason in wire.Reason if f"`{reason}`" not in section] == []


INVALID = {
    "too-few-frames": [b"1", b"", b"MDPCX1", b"\x01"],
    "unknown-command": [b"1", b"", b"MDPCX1", b"\x04", b"sum"],
    "bad-service-name": [b"1", b"", b"MDPCX1", b"\x01", b"\n", b"", b"x"],
    "no-number": [b"", b"MDPCX1", b"\x05", b"sum"],
    "no-body": [b"1", b"", b"MDPCX1", b"\x01", b"sum", b""],
    "bad-options": [b"1", b"", b"MDPCX1", b"\x01", b"sum", b"{", b"x"],
    "too-many-frames": [b"1", b"", b"MDPCX1", b"\x06", b"x"],
    "number-in-use": [b"0", b"", b"MDPCX1", b"\x01", b"sum", b"", b"x"],
    "unknown-number": [b"1", b"", b"MDPCX1", b"\x05", b"sum"],
    "bad-record": [b"", b"MDPCX1", b"\x09", (10).to_bytes(4) + b"\x05" + (1).to_bytes(8) + b"x"],
    "too-large": [b"1", b"", b"MDPCX1", b"\x01", b"sum", b"", b"x" * 1001],
    "no-header": [b"x" * 256, b"", b"MDPCX1", b"\x06"],
    "envelope-too-deep": [*[b"1"] * 16, b"", b"MDPCX1", b"\x06"],
}


@pytest.mark.parametrize(
    ("keys", "answer"), [(cells[0], cells[2]) for cells in rows("Invalid and unexpected messages") if len(cells) == 3]
)
def test_invalid_messages_are_answered_as_the_table_says(keys, answer):
    key = re.findall(r"`([a-z-]+)`", keys)[0]
    message = INVALID[key]
    machine = Broker(Limits(max_message=1000), now=0.0)
    machine.receive([b"amy", b"0", b"", b"MDPCX1", b"\x01", b"sum", b"", b"x"], 0.0)
    told = machine.receive([b"amy", *message], 0.0)
    assert machine.stats.invalid == {key: 1}
    if answer == "none":
        assert told == []
        return
    ((_, *frames),) = told
    envelope = message[: message.index(b"MDPCX1")]
    if key == "bad-record":
        (error,) = batch.to_client(frames, 1)
        assert (error.id, error.code) == (1, int(answer.removeprefix("ERROR ")))
    else:
        assert frames[: len(envelope) + 2] == [*envelope, b"MDPCX1", b"\x04"]
        assert frames[-2] == answer.removeprefix("ERROR ").encode()


READY = [b"", b"MDPWX1", b"\1", b"sum"]
UNEXPECTED = {
    "second-ready": [READY, READY],
    "not-registered": [[b"", b"MDPWX1", b"\x0a", b"3"]],
    "wrong-dialect": [READY, [b"MDPW02", b"\5"]],
    "reply-without-request": [READY, [b"", b"MDPWX1", b"\4", b"400", b"", b"x"]],
    "reply-to-wrong-client": [
        READY, [b"1", b"", b"MDPCX1", b"\1", b"sum", b"", b"x"], [b"", b"MDPWX1", b"\x0b", b"400", b""],
    ],
    "reserved-name": [[b"", b"MDPWX1", b"\1", b"mmi.sum"]],
    "too-many-workers": [[b"1", *READY], [b"2", *READY], [b"3", *READY]],
    "too-many-services": [READY, [b"3", *READY[:-1], b"other"]],
    "not-allowed": [READY],
    "draining": [READY],
}  # fmt: skip


def test_every_reason_for_a_disconnect_has_its_row():
    table = [cells[0].strip("`") for cells in rows("Invalid and unexpected messages") if len(cells) == 2]
    of_other_dialects = {Refusal.OVERSIZED_REPLY}
    assert set(table) == set(UNEXPECTED) == set(Refusal) - of_other_dialects


@pytest.mark.parametrize("reason", UNEXPECTED)
def test_unexpected_commands_are_answered_with_disconnect(reason):
    machine = Broker(Limits(max_workers=2, max_services=1), now=0.0, first_address=FIRST_ADDRESS)
    role = machine.roles.nobody if reason == Refusal.NOT_ALLOWED else None
    if reason == Refusal.DRAINING:
        machine.drain(0.0)
    *before, told = [machine.receive([b"amy", *message], 0.0, role) for message in UNEXPECTED[reason]]
    assert [command(frames[1:]) for frames in told] == ["DISCONNECT"]
    has_text = told[0][-1] != wire.CODES[wire.WX1][wire.DISCONNECT]
    assert has_text is (reason == Refusal.NOT_ALLOWED)
    assert not [frames for messages in before for frames in messages if command(frames[1:]) == "DISCONNECT"]
    assert machine.stats.disconnected == {reason: 1}


BAD_RECORDS = {
    "fewer than 13 bytes": b"\0" * 12,
    "`size` is below 9": (8).to_bytes(4) + b"\5" + (7).to_bytes(8),
    "the fields do not fit": (10).to_bytes(4) + b"\5" + (7).to_bytes(8) + b"x",
    "the code is not": (9).to_bytes(4) + b"\6" + (7).to_bytes(8),
    "the fields are readable": (19).to_bytes(4) + b"\1" + (7).to_bytes(8) + b"\0\0\0\0" + b"\1e" + b"\0\0" + b"\0\0",
    "attachments are left over": b"",
}
CANCEL = (9).to_bytes(4) + b"\5" + (8).to_bytes(8)
LARGE = (23).to_bytes(4) + b"\1" + (9).to_bytes(8) + b"\0\0\0\0" + b"\1e" + b"\0\0" + b"\0\1\xff\xff\xff\xff"
"""A request whose body is an attachment."""


@pytest.mark.parametrize(("beginning", "record"), BAD_RECORDS.items(), ids=BAD_RECORDS)
def test_the_page_says_what_a_receiver_does(beginning, record):
    """Behind the record are a valid one, one with an attachment, and an unused attachment."""
    ((_, reason, consequence),) = [cells for cells in rows("What receivers do") if cells[0].startswith(beginning)]
    message = [b"", wire.CX1, b"\x09", record + CANCEL + LARGE, b"attached"]
    if not record:
        message.append(b"left over")
    commands = batch.from_client(message, 1, (b"",), 1000, 1000)
    wrong = [each for each in commands if isinstance(each, wire.Invalid)]
    assert str(wrong[0].reason) in (re.findall(r"`([a-z-]+)`", reason) or {"no-body"})
    read = [each.id for each in commands if isinstance(each, wire.Cancel | wire.Request)]
    assert (read, len(wrong)) == {
        "the rest of the message is ignored": ([], 1),
        "later records with attachments are `bad-record` too": ([8], 2),
        "none": ([8, 9], 1),
        "none for the others": ([8, 9], 1),
    }[consequence]


def test_numbers_in_the_text_match_the_code():
    text = " ".join(PAGE.split())
    for number, said in (
        (wire.MAX_OPTIONS, "have at most {} bytes"),
        (wire.MAX_NESTING, "at most {} objects and arrays deep"),
        (wire.MAX_ENVELOPE, "It MUST have 1 to {} frames"),
        (wire.MAX_NAME, "Every frame except the empty one MUST have 1 to {} bytes"),
        (wire.SHARED, "A frame of {} bytes or more SHOULD be an attachment"),
        (registry.REMEMBERED, "at least {} of all clients"),
        (Limits().max_credit, "{} requests at most"),
        (int(Limits().expiry), "{} seconds); this also ends with ERROR 408"),
        (Limits().max_attempts, "while holding the same request (zmdp: {})"),
        (int(given_up.GIVEN_UP), "for {} seconds)"),
        (batch.MAX_RECORDS, "at most {} records"),
        (batch.MAX_RECORDS_BYTES, "SHOULD have at most {} bytes together"),
        (batch_python.MAX_ATTACHMENTS, "at most {} frames and"),
        (batch_python.MAX_ATTACHED_BYTES, "frames and {} bytes"),
        (batch.MAX_BODY_FRAMES, "a body of more than {} frames"),
        (batch.MAX_TTL_MS, "A ttl above {} is"),
    ):
        assert said.format(number) in text, said
    assert wire.MAX_TTL == 10**15
    assert "10¹⁵" in text
