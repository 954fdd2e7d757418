"""X1's messages: pure and compiled, each rule of them, and any bytes instead of them."""

import struct
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zmdp.mdp import wire
from zmdp.mdp.wire import CX1, MAX_OPTIONS, NO_OPTIONS, SHARED, WX1, Invalid, Options, Reason, batch, x1
from zmdp.mdp.wire.x1 import MAX_ATTACHED_BYTES, MAX_ATTACHMENTS, MAX_RECORDS, MAX_RECORDS_BYTES

ROUTE = (b"id", b"")
MAX_BODY = 20_000
MAX_FRAMES = 4
LARGEST = (1 << 64) - 1


@cache
def implementations():
    """`batch` in pure Python, and compiled if it is."""
    source = Path(batch.__file__).with_name("batch.py")
    if Path(batch.__file__) == source:
        return {"pure": batch}
    spec = spec_from_file_location("zmdp.mdp.wire.pure_batch", source)
    pure = module_from_spec(spec)
    spec.loader.exec_module(pure)
    return {"pure": pure, "compiled": batch}


@pytest.fixture(scope="module", params=["pure", pytest.param("compiled", marks=pytest.mark.compiled_only)])
def implementation(request):
    return implementations()[request.param]


def both():
    """The implementations there are: where one is compiled, they are compared."""
    return list(implementations().values())


def body_of(command):
    return command.detail if isinstance(command, wire.Error) else getattr(command, "body", [])


def record(command, number, rest=b""):
    return struct.pack(">IBQ", 9 + len(rest), command, number) + rest


def body(*frames):
    """A body; None is an attachment."""
    packed = [b"\xff\xff\xff\xff" if each is None else struct.pack(">I", len(each)) + each for each in frames]
    return struct.pack(">H", len(frames)) + b"".join(packed)


def request(number=7, ttl=0, service=b"echo", options=b"", rest=None):
    rest = body(b"x") if rest is None else rest
    head = struct.pack(">IB", ttl, len(service)) + service + struct.pack(">H", len(options)) + options
    return record(1, number, head + rest)


def ready(credit=1, service=b"echo", options=b"", rest=b""):
    head = struct.pack(">IB", credit, len(service)) + service + struct.pack(">H", len(options)) + options
    return record(1, 0, head + rest)


def work(address=7, ttl=0, attempt=1, options=b"", rest=None):
    rest = body(b"x") if rest is None else rest
    return record(2, address, struct.pack(">IBH", ttl, attempt, len(options)) + options + rest)


def error(command, number=7, code=500, text=b"why", rest=None, reason=b"", lost=0):
    rest = body() if rest is None else rest
    head = struct.pack(">HHB", code, lost, len(reason)) + reason + struct.pack(">H", len(text)) + text
    return record(command, number, head + rest)


def read(implementation, direction, records, *attachments):
    """What `implementation` reads of a message in one direction."""
    if direction == "from_client":
        return implementation.from_client([*ROUTE, CX1, b"\x09", records, *attachments], 2, ROUTE, MAX_BODY, MAX_FRAMES)
    if direction == "from_worker":
        return implementation.from_worker([*ROUTE, WX1, b"\x09", records, *attachments], 2, ROUTE, MAX_BODY, MAX_FRAMES)
    function = getattr(implementation, direction)
    return function([b"", CX1 if direction == "to_client" else WX1, b"\x09", records, *attachments], 1)


# ── what is packed is read ───────────────────────────────────────────────────────────────────────────────────────────

ids = st.integers(0, LARGEST) | st.sampled_from([0, (1 << 62) - 1, 1 << 62, 1 << 63, LARGEST])
frames = st.binary(max_size=40) | st.sampled_from([SHARED - 1, SHARED, SHARED + 1, 3 * SHARED]).map(lambda n: b"z" * n)
bodies = st.lists(frames, min_size=1, max_size=5)
services = st.sampled_from([b"echo", "größe".encode(), b"x" * 255])
option_frames = st.sampled_from([b"", b"{}", b'{"key":5}', b'{"wait":false,"key":"%s"}' % (b"k" * (MAX_OPTIONS - 23))])
u32 = st.integers(0, 0xFFFFFFFF)


def seconds(ttl):
    return ttl / 1000 if ttl else None


def answered(direction, final, number, frames):
    if direction == "to_client":
        return wire.Reply((), CX1, final, number, frames)
    return wire.Reply(ROUTE, WX1, final, number, frames)


def failed(direction, number, code, text, detail, reason, lost):
    told = (number, code, text, detail, reason, min(lost, 65_535))
    return wire.Error((), CX1, *told) if direction == "to_client" else wire.Error(ROUTE, WX1, *told)


def replies(direction, partial, final, failure):
    """PARTIAL, FINAL and ERROR, by their bytes in that direction: what is called, and what is read."""
    return (
        st.tuples(ids, bodies, st.booleans()).map(
            lambda a: (("reply", final if a[2] else partial, a[0], a[1]), answered(direction, a[2], a[0], a[1]))
        )
        | st.tuples(
            ids, st.integers(0, 999), st.binary(max_size=30), st.lists(frames, max_size=1), st.binary(max_size=255),
            st.integers(0, 65_537),
        ).map(lambda a: (("error", failure, *a), failed(direction, *a)))
    )  # fmt: skip


COMMANDS = {
    "from_client": st.tuples(ids, u32 | st.just(0), services, option_frames, bodies).map(
        lambda a: (
            ("request_to_broker", *a),
            wire.Request(ROUTE, CX1, a[2], a[4], wire.parse_options(a[3]), a[0], seconds(a[1])),
        )
    ) | ids.map(lambda n: (("signal", 5, n), wire.Cancel(ROUTE, CX1, n))),
    "from_worker": replies("from_worker", 3, 4, 7)
    | ids.map(lambda n: (("signal", 11, n), wire.Release(ROUTE, WX1, n)))
    | u32.map(lambda credit: (("credit", credit), wire.Credit(ROUTE, WX1, credit)))
    | st.tuples(u32, services, st.sampled_from([b"", b'{"name":"w"}'])).map(
        lambda a: (("ready", *a), wire.Ready(ROUTE, WX1, a[1], a[0], "w" if a[2] else ""))
    ),
    "to_client": replies("to_client", 2, 3, 4),
    "to_worker": st.tuples(ids, u32 | st.just(0), st.integers(0, 255), option_frames, bodies).map(
        lambda a: (
            ("request_to_worker", *a),
            wire.Request((), WX1, b"", a[4], wire.parse_options(a[3]), a[0], seconds(a[1]), a[2]),
        )
    ) | ids.map(lambda n: (("signal", 8, n), wire.Cancel((), WX1, n))),
}  # fmt: skip
directions = pytest.mark.parametrize("direction", COMMANDS)


def shaped(command):
    """`command` to be compared, types included but for those of frames."""
    return type(command), tuple(command)


@directions
@settings(max_examples=60)
@given(data=st.data())
def test_what_is_packed_is_read_by_either_implementation(direction, data):
    added = data.draw(st.lists(COMMANDS[direction], max_size=30))
    header = CX1 if "client" in direction else WX1
    packed = []
    for module in both():
        each = module.Batch((b"peer", b""), header)
        for (method, *arguments), _ in added:
            getattr(each, method)(*arguments)
        assert bool(len(each)) == bool(added)
        packed.append(each.messages())
        assert len(each) == 0
        assert each.messages() == []
    assert all(messages == packed[0] for messages in packed)
    for as_views in (False, True):
        for module in both():
            commands = []
            for message in packed[0]:
                assert message[:4] == [b"peer", b"", header, b"\x09"]
                records, *attachments = message[4:]
                if as_views:
                    records, attachments = memoryview(records), [memoryview(each) for each in attachments]
                # None of them is over a limit.
                limits = (1 << 30, 1 << 30) if direction.startswith("from") else ()
                commands += getattr(module, direction)(
                    [*ROUTE, header, b"\x09", records, *attachments], 2, *((ROUTE, *limits) if limits else ())
                )
            assert [*map(shaped, commands)] == [shaped(command) for _, command in added]
            kinds = {type(each) for command in commands for each in body_of(command)}
            assert kinds <= ({bytes, memoryview} if as_views else {bytes})


# ── messages and their limits ────────────────────────────────────────────────────────────────────────────────────────


SPLIT = {  # bodies; how many records each message has
    "records": ([[b"x"]] * (2 * MAX_RECORDS + 1), [MAX_RECORDS, MAX_RECORDS, 1]),
    "bytes, exactly": ([[b"x" * (SHARED - 19)]] * 9, [8, 1]),
    "bytes, one too many": ([[b"x" * (SHARED - 19)]] * 7 + [[b"x" * (SHARED - 18)]], [7, 1]),
    "a record longer than the limit": ([[b"x"], [b"x" * 8000] * 9, [b"x"], [b"x"]], [1, 1, 2]),
    "it may be the first": ([[b"x" * 8000] * 9, [b"x"]], [1, 1]),
    "attachments": ([[b"x" * SHARED]] * (MAX_ATTACHMENTS + 1), [MAX_ATTACHMENTS, 1]),
    "attachments of one record": (
        [[b"x"], [b"x" * SHARED] * (MAX_ATTACHMENTS + 1), [b"x"], [b"x" * SHARED]],
        [1, 2, 1],
    ),
    "attached bytes": ([[b"x" * (MAX_ATTACHED_BYTES // 2)]] * 3, [2, 1]),
    "attached bytes, one too many": (
        [[b"x" * (MAX_ATTACHED_BYTES // 2)], [b"x" * (MAX_ATTACHED_BYTES // 2 + 1)]],
        [1, 1],
    ),
    "what has no attachment goes along": ([[b"x" * (2 * MAX_ATTACHED_BYTES)], [b"x"], [b"x"]], [3]),
    "what follows counts anew": ([[b"x" * (2 * MAX_ATTACHED_BYTES)], [b"x" * SHARED], [b"x" * SHARED]], [1, 2]),
}


@pytest.mark.parametrize(("bodies", "counts"), SPLIT.values(), ids=SPLIT)
def test_a_message_has_limits(implementation, bodies, counts):
    each = implementation.Batch(ROUTE, WX1)
    for number, frames in enumerate(bodies):
        each.reply(4, number, frames)
    messages = each.messages()
    read = [implementation.from_worker(message, 2, ROUTE, 1 << 30, 99) for message in messages]
    assert [len(commands) for commands in read] == counts
    assert [command.body for commands in read for command in commands] == bodies
    assert [command.id for commands in read for command in commands] == [*range(len(bodies))]
    for message, count in zip(messages, counts, strict=True):
        assert message[:4] == [*ROUTE, WX1, b"\x09"]
        assert count == 1 or len(message[4]) <= MAX_RECORDS_BYTES


def test_frames_may_be_memoryviews_and_attachments_stay_what_they_are(implementation):
    large, larger = memoryview(b"L" * SHARED), bytearray(b"M" * (SHARED + 1))
    each = implementation.Batch((), WX1)
    each.reply(4, 1, [memoryview(b"small"), large, bytearray(b"ba"), larger, memoryview(b"0123456789")[2:4]])
    (message,) = each.messages()
    assert message[2] == record(4, 1, body(b"small", None, b"ba", None, b"23"))
    assert message[3] is large
    assert message[4] is larger


def test_a_frame_of_wider_items_is_its_bytes(implementation):
    each = implementation.Batch((), WX1)
    each.reply(4, 1, [memoryview(bytes(8000)).cast("Q"), b"x"])
    (message,) = each.messages()
    assert message[2] == record(4, 1, body(bytes(8000), b"x"))


def test_a_body_may_be_any_sequence(implementation):
    each = implementation.Batch((), WX1)
    for frames in ((), (b"a", b"b"), fuzz_list([b"a", b"b"])):
        each.reply(4, 1, frames)
    (message,) = each.messages()
    assert message[2] == record(4, 1, body()) + 2 * record(4, 1, body(b"a", b"b"))


class fuzz_list(list):  # noqa: N801
    """Like the replies that people get."""


def test_text_reason_and_number_of_lost_workers_are_cut(implementation):
    each = implementation.Batch((), WX1)
    each.error(7, 1, 500, b"x" * 70_000, [], b"y" * 300, 70_000)
    (message,) = each.messages()
    cut = wire.Error(ROUTE, WX1, 1, 500, b"x" * 65_535, [], b"y" * 255, 65_535)
    assert read(implementation, "from_worker", message[2]) == [cut]


def test_an_attempt_above_255_is_told_as_255(implementation):
    each = implementation.Batch((), WX1)
    for attempt in (255, 256, 1000):
        each.request_to_worker(1, 0, attempt, b"", [b"x"])
    (message,) = each.messages()
    assert [command.attempt for command in read(implementation, "to_worker", message[2])] == [255, 255, 255]


UNPACKABLE = {
    "a number above 64 bits": ("request_to_broker", 1 << 64, 0, b"echo", b"", [b"x"]),
    "a number below 0": ("signal", 5, -1),
    "a ttl above 32 bits": ("request_to_broker", 1, 1 << 32, b"echo", b"", [b"x"]),
    "a service of 256 bytes": ("request_to_broker", 1, 0, b"x" * 256, b"", [b"x"]),
    "a worker's service of 256 bytes": ("ready", 1, b"x" * 256, b""),
    "options above 16 bits": ("request_to_broker", 1, 0, b"echo", b"x" * 65_536, [b"x"]),
    "a worker's options above 16 bits": ("ready", 1, b"echo", b"x" * 65_536),
    "options to a worker above 16 bits": ("request_to_worker", 1, 0, 1, b"x" * 65_536, [b"x"]),
    "frames above 16 bits": ("reply", 4, 1, [b""] * 65_536),
    "a code above 16 bits": ("error", 7, 1, 65_536, b"", []),
    "a frame that is not bytes": ("reply", 4, 1, [b"x" * 100, "text"]),
    "a frame of integers": ("reply", 4, 1, [b"x" * SHARED, b"x", [1, 2]]),
    "a frame without a length": ("reply", 4, 1, [b"x" * SHARED, b"x", 5]),
    "credit above 32 bits": ("credit", 1 << 32),
    "no service": ("request_to_broker", 1, 0, None, b"", [b"x"]),
}


@pytest.mark.parametrize(("method", "arguments"), [(m, a) for m, *a in UNPACKABLE.values()], ids=UNPACKABLE)
def test_what_a_record_cannot_hold_is_not_added(implementation, method, arguments):
    each = implementation.Batch((), WX1)
    each.reply(4, 1, [b"L" * SHARED, b"before"])
    with pytest.raises((OverflowError, TypeError, struct.error)):
        getattr(each, method)(*arguments)
    each.reply(4, 2, [b"M" * SHARED, b"after"])
    records = record(4, 1, body(None, b"before")) + record(4, 2, body(None, b"after"))
    assert each.messages() == [[WX1, b"\x09", records, b"L" * SHARED, b"M" * SHARED]]


def test_limits_of_options_and_of_records_agree():
    assert wire.MAX_OPTIONS == 0xFFFF


# ── what a record may say ────────────────────────────────────────────────────────────────────────────────────────────

RAW = b'{"ttl":5,"wait":false}'
INFORMED = b'{"credit":5,"name":"w","host":"h","pid":7,"version":"1","dialect":true,"hops":1,"free":2}'
VIEW = memoryview(b"L" * SHARED)

READ = {  # direction, records, attachments; and what is read, beside what the property above packs and reads
    "nothing": ("from_client", b"", [], []),
    # from a client
    "REQUEST with options, whose ttl is not X1's": (
        "from_client",
        request(options=RAW),
        [],
        [wire.Request(ROUTE, CX1, b"echo", [b"x"], Options(RAW, False), 7)],
    ),
    "attachments, in order": (
        "from_client",
        request(1, rest=body(None, b"", None)) + record(5, 9) + request(2, rest=body(None)),
        [VIEW, b"short", b"another"],
        [
            wire.Request(ROUTE, CX1, b"echo", [VIEW, b"", b"short"], NO_OPTIONS, 1),
            wire.Cancel(ROUTE, CX1, 9),
            wire.Request(ROUTE, CX1, b"echo", [b"another"], NO_OPTIONS, 2),
        ],
    ),
    "a question to the broker has no large frame": (
        "from_client",
        request(service=b"mmi.service", rest=body(b"echo", None)),
        [VIEW],
        [wire.Request(ROUTE, CX1, b"mmi.service", [b"echo", wire.OVERLONG], NO_OPTIONS, 7)],
    ),
    "as many frames and bytes as are allowed": (
        "from_client",
        request(rest=body(None, b"", b"", b"")),
        [b"x" * MAX_BODY],
        [wire.Request(ROUTE, CX1, b"echo", [b"x" * MAX_BODY, b"", b"", b""], NO_OPTIONS, 7)],
    ),
    # from a worker
    "READY with options, whose credit is not X1's": (
        "from_worker",
        ready(0, options=INFORMED),
        [],
        [wire.Ready(ROUTE, WX1, b"echo", 0, "w", "h", 7, "1", True, 1, 2)],
    ),
    "READY that describes the service": (
        "from_worker", ready(options=b'{"about": {"version": "1", "codec": "json"}}'), [],
        [wire.Ready(ROUTE, WX1, b"echo", 1, about=b'{"version":"1","codec":"json"}')],
    ),
    "DISCONNECT": ("from_worker", record(6, 0), [], [wire.Disconnect(ROUTE, WX1)]),
    "DISCONNECT with a text": (
        "from_worker", record(6, 0, b"a\xffb") + record(11, 7), [],
        [wire.Disconnect(ROUTE, WX1, b"a\xffb"), wire.Release(ROUTE, WX1, 7)],
    ),
    "DISCONNECT with a text that is cut": (
        "from_worker", record(6, 0, b"x" * (x1.MAX_TEXT + 1)), [],
        [wire.Disconnect(ROUTE, WX1, b"x" * x1.MAX_TEXT)],
    ),
    # to a client
    "LIMITS to a client": (
        "to_client", record(6, 0, bytes(5) + b"\1\0\0\0\0\4\0"), [], [wire.Limits((), CX1, 1 << 16, 1024)]
    ),
    "DISCONNECT to a client": ("to_client", record(7, 0), [], [wire.Disconnect((), CX1)]),
    "DISCONNECT with a text to a client": ("to_client", record(7, 0, b"why"), [], [wire.Disconnect((), CX1, b"why")]),
    # to a worker
    "DISCONNECT to a worker": ("to_worker", record(6, 0), [], [wire.Disconnect((), WX1)]),
    "DISCONNECT with a text to a worker": ("to_worker", record(6, 0, b"why"), [], [wire.Disconnect((), WX1, b"why")]),
}  # fmt: skip


@pytest.mark.parametrize(("direction", "records", "attachments", "commands"), READ.values(), ids=READ)
def test_records_are_read(implementation, direction, records, attachments, commands):
    for form in (records, memoryview(records)):
        found = read(implementation, direction, form, *attachments)
        assert [*map(shaped, found)] == [*map(shaped, commands)]
    for command in found:
        for frame in body_of(command):
            assert (
                type(frame) is memoryview
                or frame == b""
                or len(frame) < SHARED
                or frame in (*attachments, wire.OVERLONG)
            )


# ── what is wrong with a record (C43) ────────────────────────────────────────────────────────────────────────────────


def told(reason, number=7, over_limit=False):
    """What a client can be told."""
    return Invalid(reason, ROUTE, number, over_limit)


def sized(records, size):
    """`records` with another size at the beginning."""
    return struct.pack(">I", size) + records[4:]


CANCELLED = wire.Cancel(ROUTE, CX1, 8)
AFTER = record(5, 8)
"""A record that is read wherever it is known to begin."""
TOO_MANY = [b""] * (MAX_FRAMES + 1)
BROKEN = [told(Reason.BAD_RECORD), CANCELLED]
UNREADABLE = [Invalid(Reason.BAD_RECORD)]

WRONG = {  # direction, records, attachments; and what is read
    # where the next record begins is unknown
    "no more than a size": ("from_client", b"\0\0\0\x09", [], UNREADABLE),
    "half a head": ("from_client", AFTER + AFTER[:12], [], [CANCELLED, Invalid(Reason.BAD_RECORD)]),
    "a size of nothing": ("from_client", sized(AFTER, 0) + AFTER, [], [told(Reason.BAD_RECORD, 8)]),
    "a size of less than a head": ("from_client", sized(AFTER, 8) + AFTER, [], [told(Reason.BAD_RECORD, 8)]),
    "a size beyond the end": ("from_client", sized(AFTER, 10), [], [told(Reason.BAD_RECORD, 8)]),
    "the largest size": ("from_client", AFTER + sized(request(), 0xFFFFFFFF), [], [CANCELLED, told(Reason.BAD_RECORD)]),
    "one record too many": (
        "from_client", AFTER * (MAX_RECORDS + 5), [], [CANCELLED] * MAX_RECORDS + [told(Reason.BAD_RECORD, 8)]
    ),
    "one record too many, and one attachment": (
        "from_client", AFTER * MAX_RECORDS, [b"x"], [CANCELLED] * MAX_RECORDS + [Invalid(Reason.TOO_MANY_FRAMES)]
    ),
    "from a worker, a size beyond the end": ("from_worker", sized(AFTER, 10), [], UNREADABLE),
    # records of clients
    "an unknown command": ("from_client", record(2, 7) + AFTER, [], [told(Reason.UNKNOWN_COMMAND), CANCELLED]),
    "DISCONNECT from a client": ("from_client", record(7, 7) + AFTER, [], [told(Reason.UNKNOWN_COMMAND), CANCELLED]),
    "command 0": ("from_client", record(0, 7, b"xyz") + AFTER, [], [told(Reason.UNKNOWN_COMMAND), CANCELLED]),
    "REQUEST without a ttl": ("from_client", record(1, 7, b"\0\0\0") + AFTER, [], BROKEN),
    "REQUEST without a service": ("from_client", record(1, 7, bytes(4)) + AFTER, [], BROKEN),
    "a service that goes beyond": (
        "from_client", record(1, 7, bytes(4) + b"\x05echo") + AFTER, [], BROKEN
    ),
    "REQUEST without options": (
        "from_client", record(1, 7, bytes(4) + b"\x04echo\0") + AFTER, [], BROKEN
    ),
    "options that go beyond": (
        "from_client", record(1, 7, bytes(4) + b"\x04echo\xff\xff{}") + AFTER, [], BROKEN
    ),
    "REQUEST without a body": ("from_client", request(rest=b"") + AFTER, [], BROKEN),
    "half a count": ("from_client", request(rest=b"\0") + AFTER, [], BROKEN),
    "a count of more than is there": (
        "from_client", request(rest=b"\xff\xff" + body(b"x")[2:]) + AFTER, [], BROKEN
    ),
    "half a length": ("from_client", request(rest=b"\0\1\0\0\0") + AFTER, [], BROKEN),
    "a length that goes beyond": (
        "from_client", request(rest=b"\0\1\0\0\0\2x") + AFTER, [], BROKEN
    ),
    "the largest length": (
        "from_client", request(rest=b"\0\1\xff\xff\xff\xfex") + AFTER, [], BROKEN
    ),
    "more behind the body": ("from_client", request(rest=body(b"x") + b"y") + AFTER, [], BROKEN),
    "more behind CANCEL": ("from_client", record(5, 7, b"x") + AFTER, [], BROKEN),
    "no body": ("from_client", request(rest=body()) + AFTER, [], [told(Reason.NO_BODY), CANCELLED]),  # C19
    "no service": ("from_client", request(service=b"") + AFTER, [], [told(Reason.BAD_SERVICE), CANCELLED]),
    "a service that is not UTF-8": (
        "from_client", request(service=b"\xff") + AFTER, [], [told(Reason.BAD_SERVICE), CANCELLED]
    ),
    "options that are not an object": (
        "from_client", request(options=b"[]") + AFTER, [], [told(Reason.BAD_OPTIONS), CANCELLED]
    ),
    "options that are wrong beside a ttl": (
        "from_client", request(ttl=1, options=b"ttl") + AFTER, [], [told(Reason.BAD_OPTIONS), CANCELLED]
    ),
    "too many frames": (
        "from_client", request(rest=body(*TOO_MANY)) + AFTER, [],
        [told(Reason.TOO_MANY_FRAMES, 7, True), CANCELLED],
    ),
    "too large": (
        "from_client", request(rest=body(b"x", b"x" * MAX_BODY)) + AFTER, [],
        [told(Reason.TOO_LARGE, 7, True), CANCELLED],
    ),
    "too large with its attachment": (
        "from_client", request(rest=body(b"x", None)) + request(rest=body(None)), [b"x" * MAX_BODY, b"next"],
        [told(Reason.TOO_LARGE, 7, True), wire.Request(ROUTE, CX1, b"echo", [b"next"], NO_OPTIONS, 7)],
    ),
    "too many frames, attached": (
        "from_client", request(rest=body(*[None] * 5)) + request(rest=body(None)), [*TOO_MANY, b"next"],
        [told(Reason.TOO_MANY_FRAMES, 7, True), wire.Request(ROUTE, CX1, b"echo", [b"next"], NO_OPTIONS, 7)],
    ),
    # which attachment is the next is unknown
    "a missing attachment": (
        "from_client", request(rest=body(None)) + AFTER, [], BROKEN
    ),
    "attachments after a record that cannot be read": (
        "from_client", request(1, rest=b"\0") + request(2, rest=body(None)) + request(3), [b"whose?"],
        [
            told(Reason.BAD_RECORD, 1), told(Reason.BAD_RECORD, 2),
            wire.Request(ROUTE, CX1, b"echo", [b"x"], NO_OPTIONS, 3),
        ],
    ),
    "attachments after an unknown command": (
        "from_client", record(99, 1) + request(2, rest=body(None)), [b"whose?"],
        [told(Reason.UNKNOWN_COMMAND, 1), told(Reason.BAD_RECORD, 2)],
    ),
    "attachments after one that is only not accepted": (
        "from_client", request(1, service=b"", rest=body(None)) + request(2, rest=body(None)), [b"first", b"second"],
        [told(Reason.BAD_SERVICE, 1), wire.Request(ROUTE, CX1, b"echo", [b"second"], NO_OPTIONS, 2)],
    ),
    "an attachment of no record": ("from_client", AFTER, [b"x"], [CANCELLED, Invalid(Reason.TOO_MANY_FRAMES)]),
    "attachments without records": ("from_worker", b"", [b"x", b"y"], [Invalid(Reason.TOO_MANY_FRAMES)]),
    # records of workers, who are told nothing
    "REQUEST from a worker": ("from_worker", record(2, 7), [], [Invalid(Reason.UNKNOWN_COMMAND)]),
    "CANCEL from a worker": ("from_worker", record(8, 7), [], [Invalid(Reason.UNKNOWN_COMMAND)]),
    "command 12 from a worker": ("from_worker", record(12, 7), [], [Invalid(Reason.UNKNOWN_COMMAND)]),
    "HEARTBEAT in a record": ("from_worker", record(5, 7), [], [Invalid(Reason.UNKNOWN_COMMAND)]),
    "FINAL without a body": ("from_worker", record(4, 7), [], UNREADABLE),
    "FINAL with an empty body": ("from_worker", record(4, 7, body()), [], [Invalid(Reason.NO_BODY)]),
    "FINAL, too large": (
        "from_worker", record(4, 7, body(None)), [b"x" * (MAX_BODY + 1)],
        [wire.Oversized(ROUTE, WX1, Reason.TOO_LARGE, wire.FINAL, 7)],
    ),
    "PARTIAL, too many frames": (
        "from_worker", record(3, LARGEST, body(*TOO_MANY)), [],
        [wire.Oversized(ROUTE, WX1, Reason.TOO_MANY_FRAMES, wire.PARTIAL, LARGEST)],
    ),
    "ERROR, too large": (
        "from_worker", error(7, rest=body(b"x" * (MAX_BODY + 1))), [],
        [wire.Oversized(ROUTE, WX1, Reason.TOO_LARGE, wire.ERROR, 7)],
    ),
    "ERROR without a code": ("from_worker", record(7, 7, b"\0"), [], UNREADABLE),
    "ERROR, its reason goes beyond": ("from_worker", record(7, 7, b"\0\0\0\2x"), [], UNREADABLE),
    "ERROR, its text goes beyond": ("from_worker", record(7, 7, bytes(5) + b"\0\2x"), [], UNREADABLE),
    "ERROR without a body": ("from_worker", error(7, rest=b""), [], UNREADABLE),
    "ERROR of four digits": ("from_worker", error(7, code=1000), [], [Invalid(Reason.BAD_CODE)]),
    "ERROR with two details": ("from_worker", error(7, rest=body(b"", b"")), [], [Invalid(Reason.TOO_MANY_FRAMES)]),
    "READY, half its credit": ("from_worker", record(1, 0, b"\0\0"), [], UNREADABLE),
    "READY without a service": ("from_worker", record(1, 0, bytes(4)), [], UNREADABLE),
    "READY, its service goes beyond": (
        "from_worker", record(1, 0, bytes(4) + b"\x05echo"), [], UNREADABLE
    ),
    "READY without options": (
        "from_worker", record(1, 0, bytes(4) + b"\x04echo\0"), [], UNREADABLE
    ),
    "READY, its options go beyond": (
        "from_worker", record(1, 0, bytes(4) + b"\x04echo\0\5{}"), [], UNREADABLE
    ),
    "READY with more": ("from_worker", ready(rest=b"x"), [], UNREADABLE),
    "READY with bad options": ("from_worker", ready(options=b'{"pid":"x"}'), [], [Invalid(Reason.BAD_OPTIONS)]),
    "READY for no service": ("from_worker", ready(service=b""), [], [Invalid(Reason.BAD_SERVICE)]),
    "CREDIT without a number": ("from_worker", record(10, 0), [], UNREADABLE),
    "CREDIT with more": ("from_worker", record(10, 0, bytes(5)), [], UNREADABLE),
    "RELEASE with more": ("from_worker", record(11, 0, b"x"), [], UNREADABLE),
    # records of the broker
    "REQUEST to a client": ("to_client", record(1, 7), [], [Invalid(Reason.UNKNOWN_COMMAND)]),
    "CANCEL to a client": ("to_client", record(5, 7), [], [Invalid(Reason.UNKNOWN_COMMAND)]),
    "LIMITS to a client, too short": ("to_client", record(6, 7, bytes(11)), [], UNREADABLE),
    "LIMITS to a client, too long": ("to_client", record(6, 7, bytes(13)), [], UNREADABLE),
    "LIMITS of a client with fields": (
        "from_client", record(6, 7, bytes(12)), [], [Invalid(Reason.BAD_RECORD, ROUTE, 7)]
    ),
    "FINAL to a client, truncated": ("to_client", record(3, 7, b"\0\1\0"), [], UNREADABLE),
    "FINAL to a client, no body": ("to_client", record(3, 7, body()), [], [Invalid(Reason.NO_BODY)]),
    "ERROR to a client, no code": ("to_client", record(4, 7, b"\0\0\0"), [], UNREADABLE),
    "ERROR to a client, its text goes beyond": ("to_client", record(4, 7, bytes(3) + b"\1"), [], UNREADABLE),
    "ERROR to a client without a body": ("to_client", error(4, rest=b""), [], UNREADABLE),
    "ERROR to a client of four digits": ("to_client", error(4, code=65535), [], [Invalid(Reason.BAD_CODE)]),
    "ERROR to a client with two details": (
        "to_client", error(4, rest=body(b"", b"")), [], [Invalid(Reason.TOO_MANY_FRAMES)]
    ),
    "READY to a worker": ("to_worker", record(1, 7), [], [Invalid(Reason.UNKNOWN_COMMAND)]),
    "ERROR to a worker": ("to_worker", error(7), [], [Invalid(Reason.UNKNOWN_COMMAND)]),
    "REQUEST to a worker, half its ttl": ("to_worker", record(2, 7, b"\0\0"), [], UNREADABLE),
    "REQUEST to a worker, its options go beyond": (
        "to_worker", record(2, 7, bytes(6) + b"\1"), [], UNREADABLE
    ),
    "REQUEST to a worker without a body": ("to_worker", work(rest=b""), [], UNREADABLE),
    "REQUEST to a worker, bad options": ("to_worker", work(options=b"{"), [], [Invalid(Reason.BAD_OPTIONS)]),
    "REQUEST to a worker, an empty body": ("to_worker", work(rest=body()), [], [Invalid(Reason.NO_BODY)]),
    "CANCEL to a worker with more": ("to_worker", record(8, 7, b"x"), [], UNREADABLE),
}  # fmt: skip


@pytest.mark.parametrize(("direction", "records", "attachments", "commands"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_has_a_reason_and_touches_no_other_record(
    implementation, direction, records, attachments, commands
):  # C43
    for form in (records, memoryview(records)):
        found = read(implementation, direction, form, *attachments)
        assert [*map(shaped, found)] == [*map(shaped, commands)]


@directions
def test_a_message_may_end_after_its_header(implementation, direction):  # C43
    limits = (ROUTE, 1, 1) if direction.startswith("from") else ()
    function = getattr(implementation, direction)
    assert function([*ROUTE, CX1], 2, *limits) == function([*ROUTE, CX1, b"\x09"], 2, *limits) == []


def size_of(frames):
    """Bytes of `frames`, but for what the broker has in place of a large frame in a question to itself."""
    return sum(len(each) for each in frames if each is not wire.OVERLONG)


def shape(command):
    """Everything about a command that can be compared, types included."""
    fields = [(type(field), tuple(field) if isinstance(field, Options) else field) for field in command]
    return type(command), fields, [type(each) for each in body_of(command)]


@st.composite
def nearly_messages(draw):
    """Records of commands, or some that are wrong, with some bytes removed, replaced, or added; and attachments."""
    packed = batch.Batch((), CX1)
    for (method, *arguments), _ in draw(st.lists(COMMANDS[draw(st.sampled_from([*COMMANDS]))], max_size=3)):
        getattr(packed, method)(*arguments)
    _, _, data, *attachments = next(iter(packed.messages()), [b"", b"", b""])
    data = (
        bytes(data) or draw(st.sampled_from([records for _, records, *_ in [*READ.values(), *WRONG.values()]]))[:5000]
    )
    for _ in range(draw(st.integers(0, 2))):
        at, size = draw(st.integers(0, len(data))), draw(st.sampled_from([0, 1, 2, 4, 8]))
        data = data[:at] + draw(st.binary(max_size=8)) + data[at + size :]
    return data, [*attachments, *draw(st.lists(frames, max_size=1))]


@settings(max_examples=500)
@given(
    given_=st.tuples(st.binary(max_size=200), st.lists(frames, max_size=3)) | nearly_messages(),
    as_view=st.booleans(),
    limits=st.sampled_from([(0, 1024), (20, 1024), (1 << 20, 1), (1 << 20, 2)]),
)
@example(given_=(b"", []), as_view=False, limits=(MAX_BODY, MAX_FRAMES))
def test_any_bytes_are_read_alike_and_take_no_more_memory_than_they_are(given_, as_view, limits):  # C43
    records, attachments = given_
    message = [*ROUTE, CX1, b"\x09", memoryview(records) if as_view else records, *attachments]
    max_body, max_frames = limits
    read = []
    for module in both():
        from_peers = [module.from_client(message, 2, ROUTE, *limits), module.from_worker(message, 2, ROUTE, *limits)]
        read.append([*from_peers, module.to_client(message, 2), module.to_worker(message, 2)])
        for commands in read[-1]:
            assert len(commands) <= MAX_RECORDS + 1
            assert sum(size_of(body_of(command)) for command in commands) <= size_of(message)
        for command in [*from_peers[0], *from_peers[1]]:
            assert size_of(body_of(command)) <= max_body
            assert len(body_of(command)) <= max_frames
    for other in read[1:]:
        assert [[*map(shape, each)] for each in other] == [[*map(shape, each)] for each in read[0]]


def test_what_is_shared_among_records_is_told_apart(implementation):
    """The last service and the last options are kept: each record is read as if it were alone."""
    random = Random(5)
    names = [b"echo", b"echp", b"ech", b"", b"\xff"]
    raws = [b"", b"{}", b'{"wait":false}', b'{"wait":fals}']
    for _ in range(30):
        chosen = [(random.choice([0, 1, 2]), random.choice(names), random.choice(raws)) for _ in range(20)]
        requests = [request(1, ttl, name, raw) for ttl, name, raw in chosen]
        works = [work(1, ttl, 1, raw) for ttl, _, raw in chosen]
        for direction, records in (("from_client", requests), ("to_worker", works)):
            alone = [command for each in records for command in read(implementation, direction, each)]
            together = read(implementation, direction, b"".join(records))
            assert [*map(shaped, together)] == [*map(shaped, alone)]
