"""Frames ↔ commands: every layout of CONFORMANCE.md, every way to get it wrong."""

import json
import math

import pytest

from zmdp.mdp import wire
from zmdp.mdp.errors import SettingError
from zmdp.mdp.wire import (
    C01,
    C02,
    CL1,
    CX1,
    MAX_NESTING,
    MAX_OPTIONS,
    W01,
    W02,
    WL1,
    WX1,
    Invalid,
    Reason,
    names,
    x1,
)  # fmt: skip
from zmdp.workers.session.request import Request

MAX_MESSAGE = 2000
MAX_FRAMES = 30
LONG = b"x" * 256
LARGE = b"L" * (MAX_OPTIONS + 1)


def from_peer(*frames):
    """What the broker makes of `frames`, which came from the peer `id`."""
    return wire.decode_peer([b"id", *frames], max_message=MAX_MESSAGE, max_frames=MAX_FRAMES)


def from_broker(*frames):
    return wire.decode_broker(list(frames))


# ── a client or a worker to the broker ───────────────────────────────────────────────────────────────────────────────

FROM_PEER = {
    "0.2 REQUEST": ([C02, b"\x01", b"echo", b"x"], wire.Request((b"id",), C02, b"echo", [b"x"])),  # C2
    "0.2 REQUEST, long body": (
        [C02, b"\x01", b"echo", b"", b"x", b""],
        wire.Request((b"id",), C02, b"echo", [b"", b"x", b""]),
    ),
    "0.1 REQUEST": ([b"", C01, b"echo", b"x", b"y"], wire.Request((b"id", b""), C01, b"echo", [b"x", b"y"])),  # C24
    "0.1 REQUEST, no envelope": ([C01, b"echo", b"x"], wire.Request((b"id",), C01, b"echo", [b"x"])),
    "0.2 READY": ([W02, b"\x01", b"echo"], wire.Ready((b"id",), W02, b"echo")),  # C7
    "0.2 PARTIAL": ([W02, b"\x03", b"c", b"", b"x"], wire.Reply((b"id",), W02, False, b"c", [b"x"])),
    "0.2 FINAL": ([W02, b"\x04", b"c", b"", b"x"], wire.Reply((b"id",), W02, True, b"c", [b"x"])),
    "0.2 HEARTBEAT": ([W02, b"\x05"], wire.Heartbeat((b"id",), W02)),
    "0.2 DISCONNECT": ([W02, b"\x06"], wire.Disconnect((b"id",), W02)),
    "0.1 READY": ([b"", W01, b"\x01", b"echo"], wire.Ready((b"id", b""), W01, b"echo")),  # C24
    "0.1 REPLY": ([b"", W01, b"\x03", b"c", b"", b"x"], wire.Reply((b"id", b""), W01, True, b"c", [b"x"])),
    "0.1 REPLY, no empty frame": (  # C33
        [b"", W01, b"\x03", b"5", b"x", b"", b"y"], wire.Reply((b"id", b""), W01, True, 5, [b"x", b"", b"y"])
    ),
    "0.1 HEARTBEAT": ([b"", W01, b"\x04"], wire.Heartbeat((b"id", b""), W01)),
    "0.1 DISCONNECT": ([b"", W01, b"\x05"], wire.Disconnect((b"id", b""), W01)),
    "an integer for an address": ([W02, b"\x04", b"17", b"", b"x"], wire.Reply((b"id",), W02, True, 17, [b"x"])),  # C32
    "opaque address": ([W02, b"\x04", b"\0" * 255, b"", b"x"], wire.Reply((b"id",), W02, True, b"\0" * 255, [b"x"])),
}  # fmt: skip


@pytest.mark.parametrize(("frames", "command"), FROM_PEER.values(), ids=FROM_PEER)
def test_what_a_peer_sent_is_decoded(frames, command):  # C2, C7, C24, C32, C33
    read = from_peer(*frames)
    assert (type(read), read) == (type(command), command)


NOT_FROM_PEER = {
    # C15: too few frames
    "nothing": ([], Reason.TOO_FEW_FRAMES),
    "an envelope only": ([b"hop", b""], Reason.TOO_FEW_FRAMES),
    "0.2 client, header only": ([C02], Reason.TOO_FEW_FRAMES),
    "0.2 client, no service": ([C02, b"\x01"], Reason.TOO_FEW_FRAMES),
    "0.1 client, no service": ([b"", C01], Reason.TOO_FEW_FRAMES),
    "worker, header only": ([W02], Reason.TOO_FEW_FRAMES),
    "READY without service": ([W02, b"\x01"], Reason.TOO_FEW_FRAMES),
    "FINAL without address": ([W02, b"\x04"], Reason.TOO_FEW_FRAMES),
    "FINAL without delimiter": ([W02, b"\x04", b"c"], Reason.TOO_FEW_FRAMES),
    # C15: unknown header
    "unknown header": ([b"MDPC03", b"\x01", b"echo", b"x"], Reason.NO_HEADER),
    "header in lower case": ([b"mdpc02", b"\x01", b"echo", b"x"], Reason.NO_HEADER),
    "unknown header behind an envelope": ([b"", b"HTTP/1.1", b"\x01", b"echo", b"x"], Reason.NO_HEADER),
    "two empty frames": ([b"", b"", C02, b"\x01", b"echo", b"x"], Reason.NO_HEADER),
    "envelope without its empty frame": ([b"hop", C02, b"\x01", b"echo", b"x"], Reason.NO_HEADER),
    # C15: unknown command
    "0.2 client, command 0": ([C02, b"\x00", b"echo", b"x"], Reason.UNKNOWN_COMMAND),
    "0.2 client, command PARTIAL": ([C02, b"\x02", b"echo", b"x"], Reason.UNKNOWN_COMMAND),
    "0.2 client, command in text": ([C02, b"1", b"echo", b"x"], Reason.UNKNOWN_COMMAND),
    "worker, empty command": ([W02, b""], Reason.UNKNOWN_COMMAND),
    "worker, command 7": ([W02, b"\x07"], Reason.UNKNOWN_COMMAND),
    "worker, command of two bytes": ([W02, b"\x01\x01", b"echo"], Reason.UNKNOWN_COMMAND),
    "worker, command REQUEST": ([W02, b"\x02", b"c", b"", b"x"], Reason.UNKNOWN_COMMAND),
    "0.1 worker, command 6": ([b"", W01, b"\x06"], Reason.UNKNOWN_COMMAND),
    # C15: missing delimiter, C8: exactly one address frame, then one empty frame
    "FINAL with two addresses": ([W02, b"\x04", b"c", b"d", b"", b"x"], Reason.NO_DELIMITER),
    "PARTIAL with two addresses": ([W02, b"\x03", b"c", b"d", b"", b"x"], Reason.NO_DELIMITER),
    # C23: an address has 1 to 255 bytes
    "FINAL, empty address": ([W02, b"\x04", b"", b"", b"x"], Reason.BAD_ADDRESS),
    "FINAL, address too long": ([W02, b"\x04", LONG, b"", b"x"], Reason.BAD_ADDRESS),
    "REPLY, empty address, no delimiter": ([b"", W01, b"\x03", b"", b"x"], Reason.BAD_ADDRESS),
    "REPLY, address too long, no delimiter": ([b"", W01, b"\x03", LONG, b"x"], Reason.BAD_ADDRESS),
    # C19, C2, C7: body+
    "0.2 REQUEST without body": ([C02, b"\x01", b"echo"], Reason.NO_BODY),
    "0.1 REQUEST without body": ([b"", C01, b"echo"], Reason.NO_BODY),
    "FINAL without body": ([W02, b"\x04", b"c", b""], Reason.NO_BODY),
    "REPLY without body": ([b"", W01, b"\x03", b"c", b""], Reason.NO_BODY),
    "PARTIAL without body": ([W02, b"\x03", b"c", b""], Reason.NO_BODY),
    # C15, C23: service names
    "REQUEST, empty service": ([C02, b"\x01", b"", b"x"], Reason.BAD_SERVICE),
    "REQUEST, service too long": ([C02, b"\x01", LONG, b"x"], Reason.BAD_SERVICE),
    "REQUEST, unprintable service": ([b"", C01, b"a\nb", b"x"], Reason.BAD_SERVICE),
    "READY, empty service": ([W02, b"\x01", b""], Reason.BAD_SERVICE),
    "READY, no UTF-8": ([b"", W01, b"\x01", b"\xff"], Reason.BAD_SERVICE),
    # frames that no layout has
    "READY with more": ([W02, b"\x01", b"echo", b"x"], Reason.TOO_MANY_FRAMES),
    "HEARTBEAT with more": ([W02, b"\x05", b"x"], Reason.TOO_MANY_FRAMES),
    "DISCONNECT with more": ([b"", W01, b"\x05", b""], Reason.TOO_MANY_FRAMES),
    # commands of records
    "0.2 worker's ERROR": ([W02, b"\x07", b"c", b"", b"500", b"text"], Reason.UNKNOWN_COMMAND),
    "0.2 worker, records": ([W02, b"\x09", b"records"], Reason.UNKNOWN_COMMAND),
    "0.2 client, records": ([C02, b"\x09", b"records"], Reason.UNKNOWN_COMMAND),
}


@pytest.mark.parametrize(("frames", "reason"), NOT_FROM_PEER.values(), ids=NOT_FROM_PEER)
def test_what_is_no_command_has_a_reason(frames, reason):  # C15
    assert from_peer(*frames) == Invalid(reason)


INTEGERS = {b"0": 0, b"7": 7, b"9" * 18: 10**18 - 1, b"4611686018427387904": 1 << 62, b"9223372036854775808": 1 << 63}
INTEGERS[b"18446744073709551615"] = (1 << 64) - 1


@pytest.mark.parametrize(("frame", "address"), INTEGERS.items())
def test_an_address_is_an_integer_of_64_bits(frame, address):  # C32
    assert wire.id_of(frame) == address
    assert type(wire.id_of(frame)) is int
    assert wire.frame_of(address) == frame


OTHER_ADDRESSES = [
    b"", b"00", b"07", b"-1", b"+1", b" 1", b"1 ", b"1.0", b"0x1", b"1_0", b"18446744073709551616", b"9" * 20,
    b"9" * 21, b"1" * 17 + b"/", b"1" * 17 + b":", b"1" * 5000, b"a", b"\0", "٥".encode(), "٥".encode("utf-16"),
]  # fmt: skip


@pytest.mark.parametrize("frame", OTHER_ADDRESSES, ids=lambda frame: repr(frame[:30]))
def test_any_other_address_is_its_frame(frame):  # C32
    assert wire.id_of(frame) is frame
    assert wire.frame_of(frame) is frame


def test_no_address_is_an_empty_frame():
    assert wire.frame_of(None) == b""


# ── what an X1 worker says of itself ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("text", ["w\n1", "w\x1b1", "w\ud8001", "w\u20281"], ids=ascii)
def test_what_a_worker_says_of_itself_can_be_shown(text):
    raw = json.dumps({"name": text, "host": text, "version": text}).encode()
    assert x1.ready_with((b"id",), b"echo", raw, 1) == wire.Ready((b"id",), WX1, b"echo", 1, "w?1", "w?1", 0, "w?1")


def test_what_a_worker_says_of_itself_is_cut():
    raw = json.dumps({"name": "ü" * 300, "host": "h" * 256, "version": "\n" * 300}).encode()
    ready = x1.ready_with((b"id",), b"echo", raw, 1)
    assert (ready.name, ready.host, ready.version) == ("ü" * 255, "h" * 255, "?" * 255)


BAD_READY_OPTIONS = {
    "no JSON": b"name=w",
    "a list": b"[1]",
    "name a number": b'{"name":1}',
    "host null": b'{"host":null}',
    "version a list": b'{"version":[1]}',
    "pid in text": b'{"pid":"1"}',
    "pid true": b'{"pid":true}',
    "pid below 0": b'{"pid":-1}',
    "pid above 32 bits": b'{"pid":4294967296}',
    "dialect in text": b'{"dialect":"0.2"}',
    "about a list": b'{"about":[1]}',
    "about null": b'{"about":null}',
    "hops in text": b'{"hops":"1"}',
    "hops true": b'{"hops":true}',
    "hops below 0": b'{"hops":-1}',
    "free a float": b'{"hops":1,"free":1.0}',
    "free above 32 bits": b'{"hops":1,"free":4294967296}',
}


@pytest.mark.parametrize("raw", BAD_READY_OPTIONS.values(), ids=BAD_READY_OPTIONS)
def test_other_options_of_a_worker_are_malformed(raw):
    assert x1.ready_with((b"id",), b"echo", raw, 1) == Invalid(Reason.BAD_OPTIONS)


# ── messages of X1 ───────────────────────────────────────────────────────────────────────────────────────────────────

BEFORE = {  # what stands before the header
    "nothing": [],
    "an empty frame": [b""],
    "a proxy": [b"\0" * 255, b""],
    "what looks like a header": [b"hop", CX1, b""],
    "the deepest envelope": [b"x"] * 15 + [b""],
}
each_header = pytest.mark.parametrize("header", [CX1, WX1, CL1, WL1])


@each_header
@pytest.mark.parametrize("envelope", BEFORE.values(), ids=BEFORE)
def test_a_message_of_x1_is_for_batch(envelope, header):  # X1, C22
    at = len(envelope) + 1
    route = (b"id", *envelope)
    for rest in ([b"\x09", b"records"], [b"\x09", memoryview(LARGE), b"more", memoryview(LARGE)], [b"\x09"]):
        assert from_peer(*envelope, header, *rest) == wire.Batched(route, header, at, False)
        assert from_broker(*envelope, header, *rest) == wire.Batched(tuple(envelope), header, at - 1, False)
    assert from_peer(*envelope, header) == wire.Batched(route, header, at, True)
    assert from_broker(*envelope, header) == wire.Batched(tuple(envelope), header, at - 1, True)
    for command in (b"", b"\0", b"\x01", b"\x06", b"\x09\x09", memoryview(LARGE)):
        assert from_peer(*envelope, header, command, b"x") == Invalid(Reason.UNKNOWN_COMMAND)
        assert from_broker(*envelope, header, command, b"x") == Invalid(Reason.UNKNOWN_COMMAND)


def test_limits_are_those_of_each_record():  # X1
    message = [b"id", b"", CX1, b"\x09", *[b"x" * 1000] * 50]
    assert wire.decode_peer(message, max_message=10, max_frames=2) == wire.Batched((b"id", b""), CX1, 2, False)


@each_header
@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ([b"hop"], Reason.NO_HEADER),
        ([b"hop", b"", b"x"], Reason.NO_HEADER),
        ([LONG, b""], Reason.NO_HEADER),
        ([b"x"] * 16 + [b""], Reason.ENVELOPE_TOO_DEEP),
    ],
    ids=["no end of the envelope", "a frame behind it", "a frame longer than an address", "too deep"],
)
def test_what_stands_elsewhere_is_no_header(before, reason, header):  # C15, C22, C23
    for message in ([*before, header], [*before, header, b"\x09", b"records"]):
        assert from_peer(*message) == from_broker(*message) == Invalid(reason)


# ── over the limits ──────────────────────────────────────────────────────────────────────────────────────────────────

MORE = [b"x"] * MAX_FRAMES


def told(reason):
    return Invalid(reason, over_limit=True)


def oversized(reason, kind, address, *envelope, header=W02):
    return wire.Oversized((b"id", *envelope), header, reason, kind, address)


OVER_LIMIT = {
    "REQUEST": ([C02, b"\x01", b"echo", *MORE], told(Reason.TOO_MANY_FRAMES)),
    "REQUEST behind an envelope": ([b"1", b"", C02, b"\x01", b"echo", b"x" * 2000], told(Reason.TOO_LARGE)),
    "a frame longer than an address": ([LONG, b"", C02, b"\x01", b"echo", *MORE], told(Reason.TOO_MANY_FRAMES)),
    "the empty frame is the last": ([b"1" * 255] * 8 + [b""], told(Reason.TOO_LARGE)),
    "the header is the last": ([b"1" * 255] * 8 + [b"", W02], told(Reason.TOO_LARGE)),
    "one frame": ([b"x" * 2001], told(Reason.TOO_LARGE)),
    # a worker's reply concerns the request that it is for
    "FINAL": ([W02, b"\x04", b"c", b"", *MORE], oversized(Reason.TOO_MANY_FRAMES, wire.FINAL, b"c")),
    "FINAL, too large": ([W02, b"\x04", b"7", b"", b"x" * 2000], oversized(Reason.TOO_LARGE, wire.FINAL, 7)),
    "PARTIAL": ([b"", W02, b"\x03", b"7", b"", b"x" * 2000], oversized(Reason.TOO_LARGE, wire.PARTIAL, 7, b"")),
    "0.1 REPLY": (
        [b"", W01, b"\x03", b"7", b"x" * 2000],
        oversized(Reason.TOO_LARGE, wire.FINAL, 7, b"", header=W01),
    ),
    "FINAL, deepest envelope": (
        [b"x"] * 15 + [b"", W02, b"\x04", b"7", *MORE],
        oversized(Reason.TOO_MANY_FRAMES, wire.FINAL, 7, *[b"x"] * 15, b""),
    ),
    "FINAL, envelope too deep": ([b"x"] * 16 + [b"", W02, b"\x04", b"7", *MORE], told(Reason.TOO_MANY_FRAMES)),
    "FINAL without an address": ([*[b"x" * 255] * 8, b"", W02, b"\x04"], told(Reason.TOO_LARGE)),
    "FINAL, empty address": ([W02, b"\x04", b"", *MORE], told(Reason.TOO_MANY_FRAMES)),
    "FINAL, address too long": ([W02, b"\x04", LONG, *MORE], told(Reason.TOO_MANY_FRAMES)),
    "READY": ([W02, b"\x01", b"echo", *MORE], told(Reason.TOO_MANY_FRAMES)),
    "an unknown command of a worker": ([W02, b"\x99", b"c", *MORE], told(Reason.TOO_MANY_FRAMES)),
}


@pytest.mark.parametrize(("frames", "read"), OVER_LIMIT.values(), ids=OVER_LIMIT)
def test_what_is_over_a_limit_is_told_to_whom_it_concerns(frames, read):  # C15
    assert from_peer(*frames) == read


@pytest.mark.parametrize("large", [LARGE, LARGE[:-1], LARGE[: wire.SHARED]], ids=len)
@pytest.mark.parametrize("max_message", [MAX_MESSAGE, 10 * len(LARGE)])
@pytest.mark.parametrize("frames", [frames for frames, _ in FROM_PEER.values()], ids=FROM_PEER)
def test_a_large_frame_may_be_a_memoryview(frames, max_message, large):
    """It is taken for what it would be as bytes, wherever it stands."""
    given = [b"id", *frames]
    for at in range(1, len(given) + 1):
        for after in range(at, len(given) + 1):
            plain, shared = list(given), list(given)
            for place in {at, after}:
                plain[place : place + 1] = [large]
                shared[place : place + 1] = [memoryview(large)]
            limits = {"max_message": max_message, "max_frames": MAX_FRAMES}
            command = wire.decode_peer(shared, **limits)
            assert command == wire.decode_peer(plain, **limits)
            if command == wire.decode_peer(given, **limits):
                raise AssertionError("it was ignored")
            if getattr(command, "body", None):
                assert command.body == shared[-len(command.body) :]
                assert any(isinstance(frame, memoryview) for frame in command.body)


def test_what_is_asked_of_the_broker_itself_is_always_bytes():
    question = wire.decode_peer(
        [b"id", C02, b"\x01", b"mmi.service", memoryview(LARGE)], max_message=10 * len(LARGE), max_frames=MAX_FRAMES
    )
    assert isinstance(question.body[0], bytes)


def test_a_command_shows_what_it_says():
    command = wire.Request((b"id",), C02, b"echo", [b"x"])
    assert repr(command) == (
        "Request((b'id',), b'MDPC02', b'echo', [b'x'], Options(b'', True, False, None, None, ''), None, None, 0)"
    )
    assert command != wire.Reply((b"id",), W02, True, b"c", [b"x"])
    assert command != 1
    assert (command[1], command[2:4]) == (C02, (b"echo", [b"x"]))


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_size_is_that_of_all_frames(kind):
    assert wire.size_of(kind([])) == 0
    assert wire.size_of(kind([b"", b"abc", memoryview(b"de")])) == 5


def test_a_message_may_have_max_frames():
    body = [b""] * (MAX_FRAMES - 4)
    assert from_peer(C02, b"\x01", b"echo", *body) == wire.Request((b"id",), C02, b"echo", body)
    assert from_peer(C02, b"\x01", b"echo", *body, b"") == told(Reason.TOO_MANY_FRAMES)


def test_a_message_may_have_max_bytes():
    body = b"x" * (MAX_MESSAGE - len(b"id" + C02 + b"\x01" + b"echo"))
    assert from_peer(C02, b"\x01", b"echo", body) == wire.Request((b"id",), C02, b"echo", [body])
    assert from_peer(C02, b"\x01", b"echo", body, b"x") == told(Reason.TOO_LARGE)


# ── envelopes ────────────────────────────────────────────────────────────────────────────────────────────────────────


NO_ENVELOPES = {
    "seventeen frames": ([b"hop"] * 16 + [b"", W02, b"\x05"], Reason.ENVELOPE_TOO_DEEP),
    "no end in sight": ([b"hop"] * 17, Reason.ENVELOPE_TOO_DEEP),
    "sixteen frames that are none": ([b"hop"] * 16, Reason.NO_HEADER),
    "a frame longer than an address": ([LONG, b"", W02, b"\x05"], Reason.NO_HEADER),
}


@pytest.mark.parametrize(("frames", "reason"), NO_ENVELOPES.values(), ids=NO_ENVELOPES)
def test_an_envelope_has_at_most_sixteen_addresses(frames, reason):  # C22, C23
    assert from_peer(*frames) == Invalid(reason)


def test_the_body_is_not_searched_for_a_header():
    request = wire.Request((b"id",), C02, b"echo", [b"", W02, b"\x06"])
    assert from_peer(C02, b"\x01", b"echo", b"", W02, b"\x06") == request


# ── the broker to a client or a worker ───────────────────────────────────────────────────────────────────────────────

NOT_FROM_BROKER = {
    "0.2 client, header only": ([C02], Reason.TOO_FEW_FRAMES),
    "0.2 FINAL without body": ([C02, b"\x03", b"echo"], Reason.TOO_FEW_FRAMES),
    "0.1 reply without body": ([b"", C01, b"echo"], Reason.TOO_FEW_FRAMES),
    "worker, header only": ([W02], Reason.TOO_FEW_FRAMES),
    "REQUEST without delimiter": ([W02, b"\x02", b"c"], Reason.TOO_FEW_FRAMES),
    "0.2 client, command REQUEST": ([C02, b"\x01", b"echo", b"x"], Reason.UNKNOWN_COMMAND),
    "0.2 client, command 4": ([C02, b"\x04", b"echo", b"x"], Reason.UNKNOWN_COMMAND),
    "worker, command READY": ([W02, b"\x01", b"echo"], Reason.UNKNOWN_COMMAND),
    "0.1 worker, command 6": ([W01, b"\x06"], Reason.UNKNOWN_COMMAND),
    "REQUEST with two addresses": ([W02, b"\x02", b"c", b"d", b"", b"x"], Reason.NO_DELIMITER),
    "REQUEST, empty address": ([W02, b"\x02", b"", b"", b"x"], Reason.BAD_ADDRESS),
    "REQUEST without body": ([W02, b"\x02", b"c", b""], Reason.NO_BODY),
    "HEARTBEAT with more": ([W02, b"\x05", b""], Reason.TOO_MANY_FRAMES),
    "unknown header": ([b"MDPX02", b"\x05"], Reason.NO_HEADER),
    "DISCONNECT with a text": ([W02, b"\x06", b"why"], Reason.TOO_MANY_FRAMES),
    "0.2 CANCEL": ([W02, b"\x08", b"c", b""], Reason.UNKNOWN_COMMAND),
    "0.2 worker, records": ([W02, b"\x09", b"records"], Reason.UNKNOWN_COMMAND),
}


@pytest.mark.parametrize(("frames", "reason"), NOT_FROM_BROKER.values(), ids=NOT_FROM_BROKER)
def test_what_a_broker_cannot_mean_has_a_reason(frames, reason):  # C15
    assert from_broker(*frames) == Invalid(reason)


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def nested(depth):
    """Options in which an object, and lists, are `depth` deep."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


GOOD_OPTIONS = {  # what is sent; wait, and for a handler the headers
    "nothing": (b"", True, {}),
    "empty": (b"{}", True, {}),
    "white space": (b' { "wait" : false } ', False, {}),
    "wait": (b'{"wait":true}', True, {}),
    "do not wait": (b'{"wait":false}', False, {}),
    "headers": ('{"headers":{"a":"1","ä":""}}'.encode(), True, {"a": "1", "ä": ""}),
    "a lone surrogate": (b'{"headers":{"a":"\\ud800"}}', True, {"a": "\ud800"}),
    "unknown keys": (b'{"key":[1,{"x":null}],"n":1.5e-300}', True, {}),
    "what a record has beside them": (b'{"ttl":"5","attempt":3}', True, {}),
    "duplicate keys": (b'{"wait":true,"wait":false}', False, {}),
    "as deep as can be": (nested(MAX_NESTING), True, {}),
    "many beside each other": (b'{"a":[' + b"{}," * 500 + b"[]]}", True, {}),
    "a large integer": (b'{"n":' + b"9" * 4300 + b"}", True, {}),
}


@pytest.mark.parametrize(("raw", "wait", "headers"), GOOD_OPTIONS.values(), ids=GOOD_OPTIONS)
def test_options_are_empty_or_an_object(raw, wait, headers):  # X1
    options = wire.parse_options(raw)
    assert options is not None
    assert (options.raw, options.wait) == (raw, wait)
    assert options.values() == (json.loads(raw) if raw else {})
    request = Request([b"x"], service="s", client=1, options=options)
    assert (request.headers, request.attempt, request.options) == (headers, 1, options.values())
    assert request.deadline is None
    assert wire.parse_options(raw) == options


BAD_OPTIONS = {
    "no JSON": b"wait=true",
    "half of it": b'{"a":5',
    "more than it": b'{"a":5}}',
    "no UTF-8": b'{"a":"\xff"}',
    "another encoding": '{"a":5}'.encode("utf-16"),
    "a byte order mark": '\ufeff{"a":5}'.encode(),
    "control character": b'{"a":"\n"}',
    "one quote": b"{'a':5}",
    "a list": b"[]",
    "a number": b"5",
    "text": b'"wait"',
    "null": b"null",
    "an infinite number": b'{"a":-Infinity}',
    "any number that is none": b'{"a":NaN}',
    "any number that is infinite": b'{"a":[1e400]}',
    "an integer that is too large": b'{"n":' + b"9" * 4301 + b"}",
    "wait 0": b'{"wait":0}',
    "wait null": b'{"wait":null}',
    "wait in text": b'{"wait":"false"}',
    "headers a list": b'{"headers":["a"]}',
    "headers null": b'{"headers":null}',
    "a header that is a number": b'{"headers":{"a":"1","b":2}}',
    "a header that is null": b'{"headers":{"a":null}}',
    "on_behalf a list": b'{"on_behalf":["a"]}',
    "broker a number": b'{"broker":1}',
    "broker a list": b'{"broker":["a"]}',
    "broker half a character": b'{"broker":"\\ud800"}',
    "broker with a line feed": b'{"broker":"a\\n"}',
    "too deep": nested(MAX_NESTING + 1),
    "much too deep": nested(500),
    "too deep for the parser": nested(30_000),
}


@pytest.mark.parametrize("raw", BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_other_options_are_malformed(raw):  # X1
    assert wire.parse_options(raw) is None


def test_what_a_request_over_a_link_has_passed_is_apart_from_its_options():  # C44
    raw = b'{"via":["a","b"],"attempts":2,"user":"shop","admin":true,"on_behalf":"x","key":1}'
    assert wire.passed(raw) == wire.Passed(("a", "b"), 2, "shop", b'{"key":1}')
    assert wire.passed(b'{"via":["a"]}') == wire.Passed(("a",), 0, None, b"")
    assert wire.passed(b'{"via":["a"],"client_dialect":"0.1"}') == wire.Passed(("a",), 0, None, b"", "0.1")


BAD_WAYS = {
    "no options": b"",
    "no JSON": b"{",
    "no brokers": b'{"key":1}',
    "not even one": b'{"via":[]}',
    "in text": b'{"via":"a"}',
    "a broker that is a number": b'{"via":["a",1]}',
    "attempts below 0": b'{"via":["a"],"attempts":-1}',
    "attempts true": b'{"via":["a"],"attempts":true}',
    "attempts in text": b'{"via":["a"],"attempts":"1"}',
    "attempts above 32 bits": b'{"via":["a"],"attempts":4294967296}',
    "a user that is a number": b'{"via":["a"],"user":1}',
    "a dialect that is a number": b'{"via":["a"],"client_dialect":0.1}',
    "a long one": b'{"via":[],"key":"' + b"x" * 300 + b'"}',
}


@pytest.mark.parametrize("raw", BAD_WAYS.values(), ids=BAD_WAYS)
def test_what_another_broker_says_of_a_requests_way_may_be_malformed(raw):  # C44
    assert wire.passed(raw) is None


def test_options_are_written():  # X1
    assert wire.encode_options({}) == b""
    assert wire.encode_options({"wait": False, "headers": {"a": "ä"}, "key": [None, 1.5]}) == (
        b'{"wait":false,"headers":{"a":"\\u00e4"},"key":[null,1.5]}'
    )
    assert len(wire.encode_options({"a": "x" * (MAX_OPTIONS - 8)})) == MAX_OPTIONS


ENDLESS: list[object] = []
for _ in range(100_000):
    ENDLESS = [ENDLESS]
UNSENDABLE = {  # and the beginning of what is said about it
    "bytes": ({"a": b"x"}, "options cannot be sent as JSON: Object of type bytes"),
    "no number": ({"a": math.nan}, "options cannot be sent as JSON: Out of range float"),
    "too deep for JSON": ({"a": ENDLESS}, "options cannot be sent as JSON: it is nested too deeply"),
    "wait 1": ({"wait": 1}, "options b'{\"wait\":1}' are invalid: wait must be"),
    "header 1": ({"headers": {"a": 1}}, 'options b\'{"headers":{"a":1}}\' are invalid: wait must be'),
    "too deep": ({"a": json.loads("[" * 64 + "]" * 64)}, 'options b\'{"a":[[['),
    "too long": ({"a": "x" * (MAX_OPTIONS - 7)}, 'options b\'{"a":"xxx'),
}


@pytest.mark.parametrize(("values", "text"), UNSENDABLE.values(), ids=UNSENDABLE)
def test_options_that_cannot_be_sent_are_told_to_whoever_tries(values, text):  # X1
    with pytest.raises(SettingError) as error:
        wire.encode_options(values)
    assert str(error.value).startswith(text)
    assert len(str(error.value)) < 500


# ── service names ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [b"e", b"echo", "größe→".encode(), b"with space", b"mmi.service", b"x" * 255])
def test_a_service_name_is_printable_utf8(name):  # C23
    assert wire.valid_service(name)


@pytest.mark.parametrize(
    "name", [b"", LONG, b"\x00", b"a\tb", b"a\n", b"\xff", b"\xc3", "\u200b".encode(), "é".encode() * 128]
)
def test_any_other_bytes_name_no_service(name):  # C23
    assert not wire.valid_service(name)


@pytest.mark.parametrize(
    "name", ["größe", "größe".encode(), bytearray("größe", "utf-8")], ids=["str", "bytes", "bytearray"]
)
def test_a_service_may_be_named_in_text_or_bytes(name):
    assert wire.service_name(name) == "größe".encode()


@pytest.mark.parametrize("name", ["", "x" * 256, "a\nb", b"\xff", "a\udcff", "\ud800", b""], ids=ascii)
def test_what_names_no_service_is_told_to_whoever_tries(name):  # C23
    with pytest.raises(SettingError) as error:
        wire.service_name(name)
    assert str(error.value) == f"{name!r} is not a valid service name: it must have 1 to 255 bytes of printable text"


# ── a failure told in a FINAL ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("code", "text"), [(500, "it broke"), (404, ""), (7, "größe"), (0, "zero")])
def test_a_failure_reads_as_it_was_written(code, text):
    assert wire.parse_error(wire.error_body(code, text)) == (code, text)


def test_a_failure_of_unencodable_text_is_still_told():
    assert wire.error_body(500, "a\ud800b") == [b"zmdp.error", b"500", b"a?b"]


@pytest.mark.parametrize(
    "body",
    [
        [b"x"],
        [b"zmdp.error", b"500"],
        [b"zmdp.error", b"500", b"text", b"more"],
        [b"zmdp.errors", b"500", b"text"],
        [b"zmdp.error", b"5", b"text"],
        [b"zmdp.error", b"5000", b"text"],
        [b"zmdp.error", b"+50", b"text"],
        [b"zmdp.error", "٥".encode() + b"0", b"text"],
    ],
    ids=repr,
)
def test_any_other_body_is_no_failure(body):
    assert wire.parse_error(body) is None


def test_what_is_known_of_names_is_bounded():
    for number in range(2 * names.MAX_KNOWN_NAMES):
        assert wire.service_name(f"service-{number}") == b"service-%d" % number
        assert len(names._encoded) <= names.MAX_KNOWN_NAMES


@pytest.mark.parametrize("given", [None, 5, print])
def test_a_service_name_of_another_type_is_named(given):
    with pytest.raises(SettingError, match="it must be named by a text") as caught:
        wire.service_name(given)
    assert ("put the name first" in str(caught.value)) is callable(given)
