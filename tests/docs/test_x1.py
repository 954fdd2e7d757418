"""Checks docs/reference/x1.md and the pages that build on it: the broker sends what the examples show, the programs
run, and the tables are complete.

An example shows who sends what to whom.  The test feeds the peers' messages to a broker, on a clock that moves only
where the example says how much time passes, and compares what the broker sends with what the example shows.
"""

import random
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import pytest
import zmq
from support import turns
from support.peers import body_of, record, request_of
from support.processes import TIMEOUT_SECONDS, broker
from support.router import Router

from zmdp.clients.x1.session import ClientSession
from zmdp.mdp import wire
from zmdp.mdp.broker.core import clients, registry, workers
from zmdp.mdp.broker.core.journal import Refusal
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.codes import Code
from zmdp.mdp.limits import Limits
from zmdp.mdp.wire import batch, x1
from zmdp.workers.session.held import CreditController
from zmdp.workers.session.session import WorkerSession

DOCS = Path(__file__).parents[2] / "docs" / "reference"
PROGRAMS = Path(__file__).parents[2] / "examples" / "x1"
PAGE = (DOCS / "x1.md").read_text()
PAGES = PAGE + (DOCS / "links.md").read_text()
EXAMPLES = re.findall(r"^```x1 (\S+)(?: (\S+))?\n(.*?)^```$", PAGES, re.MULTILINE | re.DOTALL)
FIRST_ADDRESS, NEXT_FIRST_ADDRESS = 417, 5301
"""The first addresses of the broker and of the restarted broker."""


# ── examples ─────────────────────────────────────────────────────────────────────────────────────────────────────────

NAMES = ("REQUEST", "PARTIAL", "FINAL", "ERROR", "CANCEL", "LIMITS", "DISCONNECT", "READY", "CREDIT", "RELEASE")
COMMANDS = {name: tuple(getattr(x1, f"{side}_{name}", None) for side in ("CLIENT", "WORKER")) for name in NAMES}
"""The codes between client and broker, and between worker and broker."""
TOKEN = re.compile(r"""([0-9]+) × "(.)"|"(.*?)"(?= |$)|(\S+)""")


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
            self._hear("worker", message_of("worker", [["READY", "credit=1", service]]))
            self._now += 0.1
            turns.tick(self._broker, self._now)  # the worker is told that it is registered

    def take(self, entry):
        """Perform `entry`, unless it is a message of the broker, and record what is sent."""
        sender, _, _ = entry.heading.partition(" → broker")
        if sender != entry.heading:
            self.said.append(entry)
            self._say(self._hear(sender, entry.frames))
        elif not entry.heading.startswith("broker → "):
            self.said.append(entry)
            self._happen(entry.heading)

    def _hear(self, sender, frames):
        return turns.receive(self._broker, [sender.encode(), *frames], self._now)

    def _happen(self, event):
        if match := re.fullmatch(r"(\d+) ms later", event):
            self._now += int(match[1]) / 1000
            self._say(turns.tick(self._broker, self._now))
        elif match := re.fullmatch("the connection of (.*) ends", event):
            self._say(turns.disconnected(self._broker, match[1].encode(), self._broker.turn, self._now))
        elif event == "the broker is restarted":
            self._broker = Broker(now=self._now, first_address=NEXT_FIRST_ADDRESS)
            self._brokers.append(self._broker)
        else:
            assert event == "the broker drains"
            self._say(turns.drain(self._broker, self._now))

    def _say(self, messages):
        for identity, *frames in messages:
            self.said.append(Entry(f"broker → {identity.decode()}", frames))

    @property
    def failures(self):
        return sum(each.stats.internal_errors for each in self._brokers)


def parsed(block):
    """Return the entries of an example: messages, and events in parentheses."""
    entries = []
    for first, *others in map(str.splitlines, re.split(r"\n(?=\S)", block)):
        if first.startswith("("):
            entries.append(Entry(first.strip("()")))
            continue
        heading, _, rest = first.partition(": ")
        if rest.endswith(" records"):
            entries.append(Entry(heading, frames_of(rest.removesuffix(" records"))))
            entries[-1].frames += frames_of_records(others)
        elif tokens(rest)[0].startswith('"MDP'):
            entries.append(Entry(heading, frames_of(rest)))
        else:
            commands = re.split(r"\n    \+ ", "\n".join([rest, *others]))
            entries.append(Entry(heading, message_of(heading, list(map(tokens, commands)))))
    return entries


def frames_of_records(lines):
    """Return the frame of records that is written in hex, and the attachments."""
    frames = [b""]
    for line in lines:
        if "×" in line:
            frames += frames_of(line)
        else:
            frames[0] += record_bytes(line.partition(" ; ")[0].strip())
    return frames


def tokens(line):
    return [token[0] for token in TOKEN.finditer(line)]


def frames_of(line):
    return list(map(frame_of, TOKEN.finditer(line)))


def frame_of(token):
    count, repeated, text, code = token.groups()
    if count:
        return int(count) * repeated.encode()
    return bytes.fromhex(code) if code else text.encode()


def record_bytes(text):
    before, _, rest = text.partition('"')
    quoted, _, after = rest.rpartition('"')
    return bytes.fromhex(before) + quoted.encode() + bytes.fromhex(after)


def message_of(heading, commands):
    """Return a message with these commands, each a list of the words of its line."""
    first = commands[0]
    at = next(at for at, word in enumerate(first) if word in {*COMMANDS, "HEARTBEAT"})
    head = [word.strip('"').encode() for word in first[:at]] or [b"", wire.WX1 if "worker" in heading else wire.CX1]
    del first[:at]
    if first[0] == "HEARTBEAT":
        return head
    if first[0] == "DISCONNECT":
        return wire.disconnect(tuple(head[:-1]), head[-1], first[1].strip('"').encode() if len(first) > 1 else b"")
    if first[0] == "LIMITS" and len(first) > 1:
        return wire.limits(tuple(head[:-1]), int(first[1]), int(first[2]))
    packed = batch.Batch(tuple(head[:-1]), head[-1])
    for name, *words in commands:
        add(packed, name, head[-1] in {wire.WX1, wire.WL1}, words)
    (message,) = packed.messages()
    return list(message)


def add(packed, name, of_worker, words):
    quoted = [word[1:-1].encode() for word in words if word.startswith('"')]
    plain = [word for word in words if not word.startswith('"')]
    given = dict(word.split("=") for word in plain if re.match("(ttl|attempt|credit|reason|lost)=", word))
    options = "".join(word for word in plain if word[0] in "{[").encode()
    rest = [word for word in plain if word[0] not in "{[" and "=" not in word]
    command = COMMANDS[name][of_worker]
    if name == "READY":
        packed.ready(int(given["credit"]), rest[0].encode(), options)
    elif name == "CREDIT":
        packed.credit(int(rest[0]))
    elif name == "REQUEST" and of_worker:
        packed.request_to_worker(int(rest[0]), int(given.get("ttl", 0)), int(given.get("attempt", 1)), options, quoted)
    elif name == "REQUEST":
        packed.request_to_broker(int(rest[0]), int(given.get("ttl", 0)), rest[1].encode(), options, quoted)
    elif name == "ERROR":
        reason, lost = given.get("reason", "").encode(), int(given.get("lost", 0))
        packed.error(command, int(rest[0]), int(rest[1]), quoted[0], quoted[1:], reason, lost)
    elif name in {"CANCEL", "RELEASE"}:
        packed.signal(command, int(rest[0]))
    elif name == "LIMITS":
        packed.signal(command, 0)
    else:
        packed.reply(command, int(rest[0]), quoted)


def test_every_block_is_an_example_or_a_program():
    names = [name for name, _, _ in EXAMPLES]
    assert len(set(names)) == len(names) >= 14
    blocks = re.findall(r"^```(\w*)", PAGES, re.MULTILINE)
    assert sorted(filter(None, blocks)) == ["console", *["x1"] * len(names)]


@pytest.mark.parametrize(("service", "block"), [each[1:] for each in EXAMPLES], ids=[name for name, *_ in EXAMPLES])
def test_examples_are_what_the_broker_sends(service, block):
    world, entries = World(service), parsed(block)
    for entry in entries:
        world.take(entry)
    assert entries == world.said
    assert any(entry.heading.startswith("broker → ") for entry in entries)
    assert world.failures == 0


def test_zmdps_client_and_worker_send_the_bytes_of_the_example():
    """They get the messages that the example's broker sends, and must send the others."""
    (entries,) = [parsed(block) for name, _, block in EXAMPLES if name == "bytes"]
    expected = {way: [each.frames for each in entries if each.heading.startswith(way)] for way in ("client", "worker")}
    work, answer = [each.frames for each in entries if each.heading.startswith("broker → ")]
    client = ClientSession(rng=random.Random(1))
    options = b'{"name":"shout.py"}'
    worker = WorkerSession("shout", options=options, controller=CreditController(4), rng=random.Random(1))
    worker.connected(1000.0)
    assert worker.take_messages() == [expected["worker"].pop(0)]
    client.connected("tcp://127.0.0.1:5555", 1000.0)
    calls = [
        client.request(b"shout", [b"hello"], 1000.0, timeout=30),
        client.request(b"shout", [b"not this", b"x" * 8192], 1000.0),
    ]
    assert client.take_messages() == expected["client"]
    worker.receive(work, 1000.0)
    hello, large = worker.begin(1000.0), worker.begin(1000.0)
    assert [hello, large] == [[b"hello"], [b"not this", b"x" * 8192]]
    assert hello.deadline == 1030.0
    worker.final(hello, [b"HELLO"], 1000.0)
    worker.error(large, 422, "too long to shout", 1000.0, [b""])
    assert worker.take_messages() == [expected["worker"].pop(0)]
    client.receive(answer, 1000.0)
    (first, reply), (second, error) = client.take_events()
    assert [first, second] == calls
    assert reply == [b"HELLO"]
    assert (error.code, error.text) == (422, "too long to shout")


# ── programs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

NODE = shutil.which("node")
NODE_MODULES = Path(sys.prefix) / "node" / "node_modules"
with_node = pytest.mark.skipif(
    not (NODE and NODE_MODULES.exists()), reason="zeromq for Node is not installed (make node)"
)
LANGUAGES = ["py", pytest.param("mjs", marks=[pytest.mark.long, with_node])]


@contextmanager
def running(program, endpoint, tmp_path, interval="1.0"):
    """Run one of the programs with the broker at `endpoint`."""
    source = (PROGRAMS / program).read_text()
    python = program.endswith(".py")
    old, new = ("= 1.0, 5 ", f"= {interval}, 5 ") if python else ("= 1000, ", f"= {float(interval) * 1000:g}, ")
    assert old in source
    changed = tmp_path / program
    changed.write_text(source.replace(old, new))
    if not python and not (tmp_path / "node_modules").exists():
        (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    command = [sys.executable if python else NODE, str(changed), endpoint]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_page_stays_one_document_that_can_be_read_in_an_hour():
    assert len(PAGE.splitlines()) <= 900


@pytest.mark.parametrize("program", sorted(each.name for each in PROGRAMS.iterdir() if each.suffix in {".py", ".mjs"}))
def test_the_programs_are_as_short_as_the_page_says(program):
    assert len((PROGRAMS / program).read_text().splitlines()) < 100


@pytest.mark.parametrize("of_worker", LANGUAGES)
@pytest.mark.parametrize("of_client", LANGUAGES)
def test_the_programs_print_what_the_page_says(of_client, of_worker, tmp_path):
    (printed,) = re.findall(r"^\$ python examples/x1/client.py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    if of_worker == "mjs":
        printed = printed.replace("ValueError", "Error")
    if of_client == "mjs":
        printed = re.sub("b'(.*?)'", r"\1", printed)
    with broker() as (_, at), running(f"worker.{of_worker}", at, tmp_path) as worker:
        wait_for_worker(at)
        with running(f"client.{of_client}", at, tmp_path) as client:
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


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_client_leaves_a_broker_that_is_silent_and_asks_again(language, tmp_path):
    with Router() as mute, running(f"client.{language}", mute.endpoint, tmp_path, "0.05"):
        first = [mute.recv() for _ in range(3)]
        message = mute.recv()
        while message[0] == first[0][0]:
            assert message[1:] == [b"", b"MDPCX1"]
            message = mute.recv()
        assert message[1:] == [b"", b"MDPCX1", b"\x09", b"".join(frames[4] for frames in first)]


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_worker_leaves_a_broker_that_is_silent_and_registers_again(language, tmp_path):
    with Router() as mute, running(f"worker.{language}", mute.endpoint, tmp_path, "0.05"):
        identity, *ready = mute.recv()
        message = mute.recv()
        while message[0] == identity:
            assert message[1:] == [b"", b"MDPWX1"]
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
RECORDS = [(heading, name, ways, code, fields) for heading in SIDES for name, ways, code, fields in rows(heading)]


@pytest.mark.parametrize(("heading", "header"), SIDES.items(), ids=["client", "worker"])
def test_every_command_has_its_row_and_an_example_for_each_direction(heading, header):
    table = rows(heading)
    of_worker = header == wire.WX1
    codes = {name: codes[of_worker] for name, codes in COMMANDS.items() if codes[of_worker] is not None}
    assert {name: int(code, 16) for name, _, code, _ in table} == codes
    lines = [line for _, _, block in EXAMPLES for line in block.splitlines()]
    for name, ways, _, _ in table:
        for way in ways.split(", "):
            heading = way.replace("worker", ".*worker.*")
            assert [line for line in lines if re.match(f"{heading}: {name}", line)] or name == "RELEASE", (name, way)


VALUES = {
    "ttl": 30000, "service": b"echo", "options": b'{"a":1}', "attempt": 3, "code": 422, "lost": 2, "reason": b"full",
    "text": b"why", "credit": 64, "body": [b"one", b"", b"x" * 8192], "max_bytes": 1 << 26, "max_frames": 1024,
}  # fmt: skip
SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8}


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
        elif told == "text":
            data += VALUES["text"]
        elif "+" in told:
            size, name = told.split("+")
            data += len(VALUES[name]).to_bytes(SIZES[size]) + VALUES[name]
        else:
            size, name = told.split(" ")
            data += VALUES[name].to_bytes(SIZES[size])
    data = code + number.to_bytes(8) + data
    return [len(data).to_bytes(4) + data, *attachments]


@pytest.mark.parametrize(("heading", "name", "ways", "code", "fields"), RECORDS)
def test_a_record_is_packed_as_its_row_says(heading, name, ways, code, fields):
    header, command = SIDES[heading], bytes.fromhex(code)
    number = 0 if name in {"READY", "CREDIT", "LIMITS", "DISCONNECT"} else 1 << 40
    packed = batch.Batch((b"",), header)
    v = VALUES
    if name == "DISCONNECT":
        messages = [wire.disconnect((b"",), header, v["text"])]
    elif (name, ways) == ("LIMITS", "broker → client"):
        messages = [wire.limits((b"",), v["max_bytes"], v["max_frames"])]
    else:
        {
            ("REQUEST", wire.CX1): lambda: packed.request_to_broker(
                number, v["ttl"], v["service"], v["options"], v["body"]
            ),
            ("REQUEST", wire.WX1): lambda: packed.request_to_worker(
                number, v["ttl"], v["attempt"], v["options"], v["body"]
            ),
            ("PARTIAL", header): lambda: packed.reply(command[0], number, v["body"]),
            ("FINAL", header): lambda: packed.reply(command[0], number, v["body"]),
            ("ERROR", header): lambda: packed.error(
                command[0], number, v["code"], v["text"], v["body"], v["reason"], v["lost"]
            ),
            ("CANCEL", header): lambda: packed.signal(command[0], number),
            ("LIMITS", header): lambda: packed.signal(command[0], number),
            ("RELEASE", header): lambda: packed.signal(command[0], number),
            ("READY", header): lambda: packed.ready(v["credit"], v["service"], v["options"]),
            ("CREDIT", header): lambda: packed.credit(v["credit"]),
        }[name, header]()
        messages = packed.messages()
    assert messages == [[b"", header, wire.BATCH, *packed_as_described(command, number, fields)]]


def test_every_code_has_its_row_and_its_origin():
    table = {int(code): (name, sender) for code, name, sender, *_ in rows("Errors")}
    assert {code: name for code, (name, _) in table.items()} == {code.value: code.name for code in Code}
    assert {code for code, (_, sender) in table.items() if sender == "broker"} == workers.BROKER_CODES


@pytest.mark.parametrize(("code", "sender"), [(cells[0], cells[2]) for cells in rows("Errors")])
@pytest.mark.parametrize("detail", [[], [b""], [b"why"]], ids=["none", "empty", "detail"])
def test_a_workers_error_is_not_taken_for_the_brokers(code, sender, detail):
    world = World("divide")
    told = "".join(f' "{each.decode()}"' for each in [b"no", *detail])
    for entry in parsed(f'client → broker: REQUEST 1 divide "1"\nworker → broker: ERROR 417 {code}{told}\n'):
        world.take(entry)
    (error,) = batch.to_client(world.said[-1].frames, 1)
    added = [b""] * (sender == "broker" and not detail)
    assert (error.code, error.text, error.detail) == (int(code), b"no", [*detail, *added])


def test_the_options_of_ready_are_those_that_the_broker_reads():
    options = [key.strip("`") for key, *_ in rows("Credit")]
    not_options, of_links = {"route", "header", "service", "credit"}, {"hops", "free"}
    assert set(options) == set(wire.Ready._fields) - not_options - of_links


def test_every_reason_for_which_a_message_is_invalid_is_named():
    section = PAGE.partition("\n## Invalid and unexpected messages\n")[2].partition("\n## ")[0]
    assert [reason for reason in wire.Reason if f"`{reason}`" not in section] == []


def message(line):
    """Return the message in a line of an example, without its heading."""
    (entry,) = parsed(f"client → broker: {line}" if "READY" not in line else f"worker → broker: {line}")
    return entry.frames


INVALID = {
    "no-header": [b"x" * 256, b"", b"MDPCX1"],
    "envelope-too-deep": [*[b"1"] * 16, b"", b"MDPCX1"],
    "too-few-frames": [b"1", b""],
    "unknown-command": [[b"", b"MDPCX1", b"\x01", b"sum"], [b"", b"MDPCX1", b"\x09", record(7, 1)]],
    "bad-record": [b"", b"MDPCX1", b"\x09", record(5, 1, b"x")],
    "bad-service-name": [b"", b"MDPCX1", b"\x09", request_of(1, b"\n", b"x")],
    "bad-options": message('REQUEST 1 sum {"wait":7} "x"'),
    "no-body": message("REQUEST 1 sum"),
    "number-in-use": message('REQUEST 0 sum "x"'),
    "unknown-number": message("CANCEL 1"),
    "too-large": message(f'REQUEST 1 sum "{1001 * "x"}"'),
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "answer"), [(cells[0], cells[2]) for cells in rows("Invalid and unexpected messages") if len(cells) == 3]
)
def test_invalid_messages_are_answered_as_the_table_says(keys, answer):
    key = re.findall(r"`([a-z-]+)`", keys)[0]
    sent = INVALID[key]
    if key == "unknown-command":
        sent = sent[answer != "none"]
    machine = Broker(Limits(max_message=1000), now=0.0)
    turns.receive(machine, [b"amy", *message('REQUEST 0 sum "x"')], 0.0)
    told = turns.receive(machine, [b"amy", *sent], 0.0)
    assert machine.stats.invalid == {key: 1}
    if answer == "none":
        assert told == []
        return
    ((_, *frames),) = told
    (error,) = batch.to_client(frames, 1)
    assert (error.id, error.code) == (0 if key == "number-in-use" else 1, int(answer.removeprefix("ERROR ")))


READY = message("READY credit=1 sum")
UNEXPECTED = {
    "second-ready": [READY, READY],
    "not-registered": [[b"", b"MDPWX1", b"\x09", record(10, 0, b"\0\0\0\3")]],
    "wrong-dialect": [READY, [b"MDPW02", b"\5"]],
    "reply-without-request": [READY, [b"", b"MDPWX1", b"\x09", record(4, 400, body_of(b"x"))]],
    "reply-to-wrong-client": [READY, message('REQUEST 1 sum "x"'), [b"", b"MDPWX1", b"\x09", record(11, 400)]],
    "reserved-name": [message("READY credit=1 mmi.sum")],
    "too-many-workers": [[b"1", *READY], [b"2", *READY], [b"3", *READY]],
    "too-many-services": [READY, [b"3", *message("READY credit=1 other")]],
    "not-allowed": [READY],
    "draining": [READY],
}  # fmt: skip


def test_every_reason_for_a_disconnect_has_its_row():
    table = [cells[0].strip("`") for cells in rows("Invalid and unexpected messages") if len(cells) == 2]
    of_other_dialects = {Refusal.OVERSIZED_REPLY}
    assert set(table) == set(UNEXPECTED) == set(Refusal) - of_other_dialects


def commands_to_worker(messages):
    found = [(frames, wire.decode_broker(frames)) for _, *frames in messages]
    return [
        command
        for frames, each in found
        for command in (batch.to_worker(frames, each.at) if isinstance(each, wire.Batched) else [each])
    ]


@pytest.mark.parametrize("reason", UNEXPECTED)
def test_unexpected_commands_are_answered_with_disconnect(reason):
    machine = Broker(Limits(max_workers=2, max_services=1), now=0.0, first_address=FIRST_ADDRESS)
    role = machine.roles.nobody if reason == Refusal.NOT_ALLOWED else None
    if reason == Refusal.DRAINING:
        turns.drain(machine, 0.0)
    *before, told = [turns.receive(machine, [b"amy", *each], 0.0, role) for each in UNEXPECTED[reason]]
    (command,) = commands_to_worker(told)
    assert isinstance(command, wire.Disconnect)
    assert (command.text != b"") is (reason == Refusal.NOT_ALLOWED)
    assert not [each for each in commands_to_worker(chain(*before)) if isinstance(each, wire.Disconnect)]
    assert machine.stats.disconnected == {reason: 1}


BAD_RECORDS = {
    "fewer than 13 bytes": b"\0" * 12,
    "`size` is below 9": (8).to_bytes(4) + b"\5" + (7).to_bytes(8),
    "the fields do not fit": (10).to_bytes(4) + b"\5" + (7).to_bytes(8) + b"x",
    "the code is not": (9).to_bytes(4) + b"\7" + (7).to_bytes(8),
    "the fields are readable": (19).to_bytes(4) + b"\1" + (7).to_bytes(8) + b"\0\0\0\0" + b"\1e" + b"\0\0" + b"\0\0",
    "attachments are left over": b"",
}
CANCEL = (9).to_bytes(4) + b"\5" + (8).to_bytes(8)
LARGE = (23).to_bytes(4) + b"\1" + (9).to_bytes(8) + b"\0\0\0\0" + b"\1e" + b"\0\0" + b"\0\1\xff\xff\xff\xff"
"""A request whose body is an attachment."""


@pytest.mark.parametrize(("beginning", "before"), BAD_RECORDS.items(), ids=BAD_RECORDS)
def test_the_page_says_what_a_receiver_does(beginning, before):
    """Behind the record are a valid one, one with an attachment, and an unused attachment."""
    ((_, reason, consequence),) = [cells for cells in rows("What receivers do") if cells[0].startswith(beginning)]
    sent = [b"", wire.CX1, b"\x09", before + CANCEL + LARGE, b"attached"]
    if not before:
        sent.append(b"left over")
    commands = batch.from_client(sent, 1, (b"",), 1000, 1000)
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
        (int(clients.GIVEN_UP), "for {} seconds)"),
        (x1.MAX_RECORDS, "at most {} records"),
        (x1.MAX_RECORDS_BYTES, "SHOULD have at most {} bytes together"),
        (x1.MAX_ATTACHMENTS, "at most {} frames and"),
        (x1.MAX_ATTACHED_BYTES, "frames and {} bytes"),
        (x1.MAX_TEXT, "it has at most {} bytes"),
    ):
        assert said.format(number) in text, said
