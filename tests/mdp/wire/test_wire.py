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
    NO_OPTIONS,
    W01,
    W02,
    WL1,
    WX1,
    Invalid,
    Options,
    Reason,
    names,
)  # fmt: skip
from zmdp.workers.request import Request

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
    # X1
    "X1 REQUEST": (
        [b"1", b"", CX1, b"\x01", b"echo", b"", b"x", b""],
        wire.Request((b"id", b""), CX1, b"echo", [b"x", b""], NO_OPTIONS, 1),
    ),
    "X1 REQUEST with options": (
        [b"1", b"", CX1, b"\x01", b"echo", b'{"ttl":1500,"wait":false}', b"x"],
        wire.Request(
            (b"id", b""), CX1, b"echo", [b"x"], Options(b'{"ttl":1500,"wait":false}', 1.5, False), 1
        ),
    ),
    "X1 REQUEST through a proxy": (
        [b"proxy", b"\0" * 255, b"7", b"", CX1, b"\x01", b"echo", b"", b"x"],
        wire.Request((b"id", b"proxy", b"\0" * 255, b""), CX1, b"echo", [b"x"], NO_OPTIONS, 7),
    ),
    "X1 REQUEST, a number that is not an integer": (
        [b"07", b"", CX1, b"\x01", b"echo", b"", b"x"],
        wire.Request((b"id", b""), CX1, b"echo", [b"x"], NO_OPTIONS, b"07"),
    ),
    "X1 CANCEL": ([b"1", b"", CX1, b"\x05", b"echo"], wire.Cancel((b"id", b""), CX1, 1, b"echo")),
    "X1 CANCEL through a proxy": (
        [b"proxy", b"n", b"", CX1, b"\x05", b"echo"],
        wire.Cancel((b"id", b"proxy", b""), CX1, b"n", b"echo"),
    ),
    "X1 client's HEARTBEAT": ([b"", CX1, b"\x06"], wire.Heartbeat((b"id", b""), CX1)),
    "X1 client's HEARTBEAT, numbered": ([b"1", b"", CX1, b"\x06"], wire.Heartbeat((b"id", b"1", b""), CX1)),
    "X1 client's HEARTBEAT, no envelope": ([CX1, b"\x06"], wire.Heartbeat((b"id",), CX1)),
    "X1 READY": ([WX1, b"\x01", b"echo"], wire.Ready((b"id",), WX1, b"echo")),
    "X1 READY, no options": ([WX1, b"\x01", b"echo", b""], wire.Ready((b"id",), WX1, b"echo")),
    "X1 READY with options": (
        [b"", WX1, b"\x01", b"echo", b'{"credit":64,"name":"w","host":"h","pid":7,"version":"1"}'],
        wire.Ready((b"id", b""), WX1, b"echo", 64, "w", "h", 7, "1"),
    ),
    "X1 READY with some of them": (
        [WX1, b"\x01", b"echo", b'{"credit":0,"host":"h","zone":3}'], wire.Ready((b"id",), WX1, b"echo", 0, "", "h")
    ),
    "X1 worker's PARTIAL": ([WX1, b"\x03", b"c", b"", b"x"], wire.Reply((b"id",), WX1, False, b"c", [b"x"])),
    "X1 worker's FINAL": ([WX1, b"\x04", b"12", b"", b"x"], wire.Reply((b"id",), WX1, True, 12, [b"x"])),
    "X1 CREDIT": ([WX1, b"\x0a", b"64"], wire.Credit((b"id",), WX1, 64)),
    "X1 CREDIT 0": ([b"", WX1, b"\x0a", b"0"], wire.Credit((b"id", b""), WX1, 0)),
    "X1 CREDIT of 20 digits": ([WX1, b"\x0a", b"9" * 20], wire.Credit((b"id",), WX1, 10**20 - 1)),
    "X1 RELEASE": ([WX1, b"\x0b", b"12", b""], wire.Release((b"id",), WX1, 12)),
    "X1 RELEASE of no integer": ([b"", WX1, b"\x0b", b"c", b""], wire.Release((b"id", b""), WX1, b"c")),
    "X1 worker's HEARTBEAT": ([WX1, b"\x05"], wire.Heartbeat((b"id",), WX1)),
    "X1 DISCONNECT": ([WX1, b"\x06"], wire.Disconnect((b"id",), WX1)),
    "X1 worker's ERROR": (
        [WX1, b"\x07", b"c", b"", b"500", b"it broke"],
        wire.Error((b"id",), WX1, b"c", 500, b"it broke", []),
    ),
    "X1 worker's ERROR with detail": (
        [b"hop", b"", WX1, b"\x07", b"7", b"", b"022", b"", b"\0"],
        wire.Error((b"id", b"hop", b""), WX1, 7, 22, b"", [b"\0"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("frames", "command"), FROM_PEER.values(), ids=FROM_PEER)
def test_what_a_peer_sent_is_decoded(frames, command):
    read = from_peer(*frames)
    assert (type(read), read) == (type(command), command)


@pytest.mark.parametrize("path", [[], [b""], [b"hop", b""]], ids=["no envelope", "an empty frame", "a proxy"])
def test_the_end_of_a_link_may_have_a_text(path):  # C44
    assert from_peer(*path, WL1, b"\x06") == wire.Disconnect((b"id", *path), WL1)
    assert from_peer(*path, WL1, b"\x06", b"why") == wire.Disconnect((b"id", *path), WL1, b"why")


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
    # X1 clients without an envelope: there is nobody to tell
    "X1 client, no number": ([CX1, b"\x01", b"echo", b"", b"x"], Reason.NO_NUMBER),
    "X1 client, CANCEL without number": ([CX1, b"\x05", b"echo"], Reason.NO_NUMBER),
    "X1 client, command FINAL": ([CX1, b"\x03", b"echo", b"x"], Reason.UNKNOWN_COMMAND),
    "X1 client, no service": ([CX1, b"\x01"], Reason.TOO_FEW_FRAMES),
    "X1 client, bad service": ([CX1, b"\x01", b"\n", b"", b"x"], Reason.BAD_SERVICE),
    "X1 client, HEARTBEAT with more": ([CX1, b"\x06", b"x"], Reason.TOO_MANY_FRAMES),
    # X1 workers
    "X1 worker, command CANCEL": ([WX1, b"\x08", b"c", b""], Reason.UNKNOWN_COMMAND),
    "X1 worker, command 12": ([WX1, b"\x0c", b"c", b""], Reason.UNKNOWN_COMMAND),
    "0.2 worker, command 9": ([W02, b"\x09", b"c", b""], Reason.UNKNOWN_COMMAND),
    "X1 READY with more": ([WX1, b"\x01", b"echo", b"", b""], Reason.TOO_MANY_FRAMES),
    "X1 READY, no service": ([WX1, b"\x01", b""], Reason.BAD_SERVICE),
    "0.2 READY with options": ([W02, b"\x01", b"echo", b"{}"], Reason.TOO_MANY_FRAMES),
    "CREDIT without a number": ([WX1, b"\x0a"], Reason.TOO_FEW_FRAMES),
    "CREDIT with more": ([WX1, b"\x0a", b"1", b""], Reason.TOO_MANY_FRAMES),
    "CREDIT, empty": ([WX1, b"\x0a", b""], Reason.BAD_CREDIT),
    "CREDIT below 0": ([WX1, b"\x0a", b"-1"], Reason.BAD_CREDIT),
    "CREDIT of 21 digits": ([WX1, b"\x0a", b"1" * 21], Reason.BAD_CREDIT),
    "CREDIT in other digits": ([WX1, b"\x0a", "٥".encode()], Reason.BAD_CREDIT),
    "0.2 CREDIT": ([W02, b"\x0a", b"1"], Reason.UNKNOWN_COMMAND),
    "RELEASE without address": ([WX1, b"\x0b"], Reason.TOO_FEW_FRAMES),
    "RELEASE, empty address": ([WX1, b"\x0b", b"", b""], Reason.BAD_ADDRESS),
    "RELEASE without delimiter": ([WX1, b"\x0b", b"1", b"x"], Reason.NO_DELIMITER),
    "RELEASE with more": ([WX1, b"\x0b", b"1", b"", b""], Reason.TOO_MANY_FRAMES),
    "X1 DISCONNECT with a text": ([WX1, b"\x06", b"why"], Reason.TOO_MANY_FRAMES),
    "X1 PARTIAL without body": ([WX1, b"\x03", b"c", b""], Reason.NO_BODY),
    "ERROR without delimiter": ([WX1, b"\x07", b"c"], Reason.TOO_FEW_FRAMES),
    "ERROR without code": ([WX1, b"\x07", b"c", b""], Reason.NO_BODY),
    "ERROR without text": ([WX1, b"\x07", b"c", b"", b"500"], Reason.TOO_FEW_FRAMES),
    "ERROR with two details": ([WX1, b"\x07", b"c", b"", b"500", b"text", b"1", b"2"], Reason.TOO_MANY_FRAMES),
    "ERROR with two addresses": ([WX1, b"\x07", b"c", b"d", b"", b"500", b"text"], Reason.NO_DELIMITER),
    "ERROR, empty address": ([WX1, b"\x07", b"", b"", b"500", b"text"], Reason.BAD_ADDRESS),
    "ERROR, address too long": ([WX1, b"\x07", LONG, b"", b"500", b"text"], Reason.BAD_ADDRESS),
    "ERROR, code of two digits": ([WX1, b"\x07", b"c", b"", b"50", b"text"], Reason.BAD_CODE),
    "ERROR, code of four digits": ([WX1, b"\x07", b"c", b"", b"5000", b"text"], Reason.BAD_CODE),
    "ERROR, code with a sign": ([WX1, b"\x07", b"c", b"", b"+50", b"text"], Reason.BAD_CODE),
    "ERROR, code of other digits": ([WX1, b"\x07", b"c", b"", "٥0".encode(), b"text"], Reason.BAD_CODE),
    "0.2 worker's ERROR": ([W02, b"\x07", b"c", b"", b"500", b"text"], Reason.UNKNOWN_COMMAND),
    "end of a link with two texts": ([WL1, b"\x06", b"why", b"why"], Reason.TOO_MANY_FRAMES),  # C44
    "framed READY over a link": ([WL1, b"\x01", b"echo"], Reason.UNKNOWN_COMMAND),
    "framed REQUEST over a link": ([b"1", b"", CL1, b"\x01", b"echo", b"", b"x"], Reason.UNKNOWN_COMMAND),
    "end of a link, from a client": ([CL1, b"\x06"], Reason.UNKNOWN_COMMAND),
}


@pytest.mark.parametrize(("frames", "reason"), NOT_FROM_PEER.values(), ids=NOT_FROM_PEER)
def test_what_is_no_command_has_a_reason(frames, reason):  # C15
    assert from_peer(*frames) == Invalid(reason)


REQUESTED = [b"1", b"", CX1, b"\x01", b"echo"]
ANSWERABLE = {  # what follows the envelope; the reason; the service that the ERROR names
    "REQUEST without service": ([CX1, b"\x01"], Reason.TOO_FEW_FRAMES, b""),
    "REQUEST without options": ([CX1, b"\x01", b"echo"], Reason.TOO_FEW_FRAMES, b"echo"),
    "REQUEST without body": ([CX1, b"\x01", b"echo", b""], Reason.NO_BODY, b"echo"),  # C19
    "CANCEL without service": ([CX1, b"\x05"], Reason.TOO_FEW_FRAMES, b""),
    "CANCEL with more": ([CX1, b"\x05", b"echo", b""], Reason.TOO_MANY_FRAMES, b"echo"),
    "HEARTBEAT with more": ([CX1, b"\x06", b"echo"], Reason.TOO_MANY_FRAMES, b""),
    "empty command": ([CX1, b""], Reason.UNKNOWN_COMMAND, b""),
    "command 0": ([CX1, b"\x00", b"echo", b"", b"x"], Reason.UNKNOWN_COMMAND, b""),
    "command PARTIAL": ([CX1, b"\x02", b"echo", b"x"], Reason.UNKNOWN_COMMAND, b""),
    "command ERROR": ([CX1, b"\x04", b"echo", b"500", b"x"], Reason.UNKNOWN_COMMAND, b""),
    "command 7": ([CX1, b"\x07"], Reason.UNKNOWN_COMMAND, b""),
    "empty service": ([CX1, b"\x01", b"", b"", b"x"], Reason.BAD_SERVICE, b""),
    "service too long": ([CX1, b"\x05", LONG], Reason.BAD_SERVICE, b""),
    "unprintable service": ([CX1, b"\x01", b"\xff", b"", b"x"], Reason.BAD_SERVICE, b""),
    "options that are no JSON": ([CX1, b"\x01", b"echo", b"ttl=1", b"x"], Reason.BAD_OPTIONS, b"echo"),
}


@pytest.mark.parametrize(("frames", "reason", "service"), ANSWERABLE.values(), ids=ANSWERABLE)
@pytest.mark.parametrize("path", [[], [b"proxy"]], ids=["connected itself", "through a proxy"])
def test_what_is_wrong_with_a_numbered_message_can_be_answered(path, frames, reason, service):  # C15, X1
    assert from_peer(*path, b"1", b"", *frames) == Invalid(reason, (b"id", *path, b""), 1, service)
    assert from_peer(*path, b"one", b"", *frames) == Invalid(reason, (b"id", *path, b""), b"one", service)


@pytest.mark.parametrize("command", [[b"\x01", b"echo", b"", b"x"], [b"\x05", b"echo"]], ids=["REQUEST", "CANCEL"])
def test_an_envelope_of_nothing_but_its_empty_frame_is_no_number(command):  # X1
    assert from_peer(b"", CX1, *command) == Invalid(Reason.NO_NUMBER, (b"id", b""), None, b"echo")


@pytest.mark.parametrize("hops", [0, 14])
def test_a_number_is_the_last_frame_of_an_envelope(hops):  # C22, X1
    path = [b"n"] * hops
    command = wire.Cancel((b"id", *path, b""), CX1, 7, b"echo")
    assert from_peer(*path, b"7", b"", CX1, b"\x05", b"echo") == command
    assert from_peer(*[b"n"] * 16, b"", CX1, b"\x05", b"echo") == Invalid(Reason.ENVELOPE_TOO_DEEP)


def test_a_number_has_at_most_255_bytes():  # C23, X1
    assert from_peer(b"n" * 255, b"", CX1, b"\x05", b"echo") == wire.Cancel((b"id", b""), CX1, b"n" * 255, b"echo")
    assert from_peer(LONG, b"", CX1, b"\x05", b"echo") == Invalid(Reason.NO_HEADER)


INTEGERS = {b"0": 0, b"7": 7, b"4611686018427387904": 1 << 62, b"9223372036854775808": 1 << 63}
INTEGERS[b"18446744073709551615"] = (1 << 64) - 1


@pytest.mark.parametrize(("frame", "number"), INTEGERS.items())
def test_a_number_is_an_integer_of_64_bits(frame, number):  # X1, C32
    assert wire.id_of(frame) == number
    assert type(wire.id_of(frame)) is int
    assert wire.frame_of(number) == frame
    assert wire.envelope_of(number) == (frame, b"")


OTHER_NUMBERS = [
    b"", b"00", b"07", b"-1", b"+1", b" 1", b"1 ", b"1.0", b"0x1", b"1_0", b"18446744073709551616", b"9" * 20,
    b"9" * 21, b"1" * 5000, b"a", b"\0", "٥".encode(), "٥".encode("utf-16"),
]  # fmt: skip


@pytest.mark.parametrize("frame", OTHER_NUMBERS, ids=lambda frame: repr(frame[:30]))
def test_any_other_number_is_its_frame(frame):  # X1, C32
    assert wire.id_of(frame) is frame
    assert wire.frame_of(frame) is frame
    assert wire.envelope_of(frame) == (frame, b"")


def test_a_message_without_a_number_has_an_envelope_all_the_same():
    assert wire.envelope_of(None) == (b"",)


# ── what an X1 worker says of itself ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("text", ["w\n1", "w\x1b1", "w\ud8001", "w\u20281"], ids=ascii)
def test_what_a_worker_says_of_itself_can_be_shown(text):
    raw = json.dumps({"name": text, "host": text, "version": text}).encode()
    assert wire.ready_with((b"id",), b"echo", raw) == wire.Ready((b"id",), WX1, b"echo", 1, "w?1", "w?1", 0, "w?1")


def test_what_a_worker_says_of_itself_is_cut():
    raw = json.dumps({"name": "ü" * 300, "host": "h" * 256, "version": "\n" * 300}).encode()
    ready = wire.ready_with((b"id",), b"echo", raw)
    assert (ready.name, ready.host, ready.version) == ("ü" * 255, "h" * 255, "?" * 255)


def test_a_credit_beside_the_options_goes_before_theirs():
    assert wire.ready_with((b"id",), b"echo", b'{"credit":"many"}', 7) == wire.Ready((b"id",), WX1, b"echo", 7)
    assert wire.ready_with((b"id",), b"echo", b"", 0).credit == 0


BAD_READY_OPTIONS = {
    "no JSON": (b"credit=1", Reason.BAD_OPTIONS),
    "a list": (b"[1]", Reason.BAD_OPTIONS),
    "too long": (b'{"a":"' + b"x" * MAX_OPTIONS + b'"}', Reason.BAD_OPTIONS),
    "credit below 0": (b'{"credit":-1}', Reason.BAD_CREDIT),
    "credit true": (b'{"credit":true}', Reason.BAD_CREDIT),
    "credit null": (b'{"credit":null}', Reason.BAD_CREDIT),
    "credit a float": (b'{"credit":1.0}', Reason.BAD_CREDIT),
    "credit in text": (b'{"credit":"1"}', Reason.BAD_CREDIT),
    "name a number": (b'{"name":1}', Reason.BAD_OPTIONS),
    "host null": (b'{"host":null}', Reason.BAD_OPTIONS),
    "version a list": (b'{"version":[1]}', Reason.BAD_OPTIONS),
    "pid in text": (b'{"pid":"1"}', Reason.BAD_OPTIONS),
    "pid true": (b'{"pid":true}', Reason.BAD_OPTIONS),
    "dialect in text": (b'{"dialect":"0.2"}', Reason.BAD_OPTIONS),
    "pid below 0": (b'{"pid":-1}', Reason.BAD_OPTIONS),
    "pid above 32 bits": (b'{"pid":4294967296}', Reason.BAD_OPTIONS),
    "hops in text": (b'{"hops":"1"}', Reason.BAD_OPTIONS),
    "hops true": (b'{"hops":true}', Reason.BAD_OPTIONS),
    "hops below 0": (b'{"hops":-1}', Reason.BAD_OPTIONS),
    "free a float": (b'{"hops":1,"free":1.0}', Reason.BAD_OPTIONS),
    "free above 32 bits": (b'{"hops":1,"free":4294967296}', Reason.BAD_OPTIONS),
}


@pytest.mark.parametrize(("raw", "reason"), BAD_READY_OPTIONS.values(), ids=BAD_READY_OPTIONS)
def test_other_options_of_a_worker_are_malformed(raw, reason):
    assert wire.ready_with((b"id",), b"echo", raw) == Invalid(reason)
    message = [b"id", WX1, b"\x01", b"echo", raw]
    assert wire.decode_peer(message, max_message=1 << 20, max_frames=9) == Invalid(reason)


# ── the batched form ─────────────────────────────────────────────────────────────────────────────────────────────────

BATCHED = {  # what stands before the header
    "nothing": [],
    "an empty frame": [b""],
    "a proxy": [b"\0" * 255, b""],
    "what looks like a header": [b"hop", CX1, b""],
    "the deepest envelope": [b"x"] * 15 + [b""],
}


@pytest.mark.parametrize("header", [CX1, WX1, CL1, WL1])
@pytest.mark.parametrize("envelope", BATCHED.values(), ids=BATCHED)
def test_a_message_in_the_batched_form_is_for_batch(envelope, header):  # X1
    at = len(envelope) + 1
    for rest in ([b"\x09", b"records"], [b"\x09", memoryview(LARGE), b"more", memoryview(LARGE)], [b"\x09"]):
        route = (b"id", *envelope)
        assert from_peer(*envelope, header, *rest) == wire.Batched(route, header, at, False)
        assert from_broker(*envelope, header, *rest) == wire.Batched(tuple(envelope), header, at - 1, False)
    assert from_peer(*envelope, header) == wire.Batched((b"id", *envelope), header, at, True)
    assert from_broker(*envelope, header) == wire.Batched(tuple(envelope), header, at - 1, True)


def test_limits_are_those_of_each_record():
    message = [b"id", b"", CX1, b"\x09", *[b"x" * 1000] * 50]
    assert wire.decode_peer(message, max_message=10, max_frames=2) == wire.Batched((b"id", b""), CX1, 2, False)


NOT_BATCHED = {
    "0.2 client": ([C02, b"\x09", b"records"], Reason.UNKNOWN_COMMAND),
    "0.2 client, header only": ([C02], Reason.TOO_FEW_FRAMES),
    "0.1 worker": ([b"", W01, b"\x09", b"records"], Reason.UNKNOWN_COMMAND),
    "an envelope without its end": ([b"hop", CX1, b"\x09", b"records"], Reason.NO_HEADER),
    "a header behind an envelope that has ended": ([b"hop", b"", b"x", CX1, b"\x09", b"records"], Reason.NO_HEADER),
    "an envelope that is too deep": ([b"x"] * 16 + [b"", CX1, b"\x09", b"records"], Reason.ENVELOPE_TOO_DEEP),
    "a frame longer than an address": ([LONG, b"", CX1, b"\x09", b"records"], Reason.NO_HEADER),
}


@pytest.mark.parametrize(("frames", "reason"), NOT_BATCHED.values(), ids=NOT_BATCHED)
def test_other_messages_are_not_in_the_batched_form(frames, reason):  # C15, C22
    assert from_peer(*frames) == Invalid(reason)
    assert isinstance(from_broker(*frames), Invalid)


# ── over the limits ──────────────────────────────────────────────────────────────────────────────────────────────────

MORE = [b"x"] * MAX_FRAMES


def told(reason, route=(), number=None, service=b""):
    return Invalid(reason, route, number, service, over_limit=True)


def oversized(reason, kind, address, *envelope, header=WX1):
    return wire.Oversized((b"id", *envelope), header, reason, kind, address)


OVER_LIMIT = {
    "REQUEST": ([*REQUESTED, b"", *MORE], told(Reason.TOO_MANY_FRAMES, (b"id", b""), 1, b"echo")),
    "REQUEST, too large": ([*REQUESTED, b"", b"x" * 2000], told(Reason.TOO_LARGE, (b"id", b""), 1, b"echo")),
    "REQUEST through a proxy": (
        [b"proxy", *REQUESTED, b"", b"x" * 2000],
        told(Reason.TOO_LARGE, (b"id", b"proxy", b""), 1, b"echo"),
    ),
    "REQUEST, deepest envelope": (
        [b"n"] * 15 + [b"", CX1, b"\x01", b"echo", b"", b"x" * 2000],
        told(Reason.TOO_LARGE, (b"id", *[b"n"] * 14, b""), b"n", b"echo"),
    ),
    "REQUEST, envelope too deep": (
        [b"n"] * 16 + [b"", CX1, b"\x01", b"echo", b"", b"x" * 2000],
        told(Reason.TOO_LARGE),
    ),
    "REQUEST without a number": (
        [b"", CX1, b"\x01", b"echo", b"", b"x" * 2000],
        told(Reason.TOO_LARGE, (b"id", b""), None, b"echo"),
    ),
    "bad service": ([b"1", b"", CX1, b"\x01", b"\n", b"", b"x" * 2000], told(Reason.TOO_LARGE, (b"id", b""), 1)),
    "no service": ([b"1", b"", CX1, b"\x01" * 2000], told(Reason.TOO_LARGE, (b"id", b""), 1)),
    "a service of all those bytes": (
        [b"1", b"", CX1, b"\x05", b"e" * 2000],
        told(Reason.TOO_LARGE, (b"id", b""), 1),
    ),
    "no envelope": ([CX1, b"\x01", b"echo", b"", *MORE], told(Reason.TOO_MANY_FRAMES)),
    "no envelope, large": ([CX1, b"\x01", b"echo", b"x" * 2000], told(Reason.TOO_LARGE)),
    "a frame longer than an address": ([LONG, *REQUESTED, b"", *MORE], told(Reason.TOO_MANY_FRAMES)),
    "0.2 behind an envelope": ([b"1", b"", C02, b"\x01", b"echo", *MORE], told(Reason.TOO_MANY_FRAMES)),
    "the empty frame is the last": ([b"1" * 255] * 8 + [b""], told(Reason.TOO_LARGE)),
    "the header is the last": ([b"1" * 255] * 8 + [b"", W02], told(Reason.TOO_LARGE)),
    "one frame": ([b"x" * 2001], told(Reason.TOO_LARGE)),
    # a worker's reply concerns the request that it is for
    "FINAL": ([WX1, b"\x04", b"c", b"", *MORE], oversized(Reason.TOO_MANY_FRAMES, wire.FINAL, b"c")),
    "PARTIAL": ([b"", WX1, b"\x03", b"7", b"", b"x" * 2000], oversized(Reason.TOO_LARGE, wire.PARTIAL, 7, b"")),
    "ERROR": ([WX1, b"\x07", b"7", b"", b"500", b"x" * 2000], oversized(Reason.TOO_LARGE, wire.ERROR, 7)),
    "0.2 FINAL": ([W02, b"\x04", b"7", b"", b"x" * 2000], oversized(Reason.TOO_LARGE, wire.FINAL, 7, header=W02)),
    "0.1 REPLY": (
        [b"", W01, b"\x03", b"7", b"x" * 2000],
        oversized(Reason.TOO_LARGE, wire.FINAL, 7, b"", header=W01),
    ),
    "FINAL, deepest envelope": (
        [b"x"] * 15 + [b"", WX1, b"\x04", b"7", *MORE],
        oversized(Reason.TOO_MANY_FRAMES, wire.FINAL, 7, *[b"x"] * 15, b""),
    ),
    "FINAL, envelope too deep": ([b"x"] * 16 + [b"", WX1, b"\x04", b"7", *MORE], told(Reason.TOO_MANY_FRAMES)),
    "FINAL without an address": ([*[b"x" * 255] * 8, b"", WX1, b"\x04"], told(Reason.TOO_LARGE)),
    "FINAL, empty address": ([WX1, b"\x04", b"", *MORE], told(Reason.TOO_MANY_FRAMES)),
    "FINAL, address too long": ([WX1, b"\x04", LONG, *MORE], told(Reason.TOO_MANY_FRAMES)),
    "READY": ([WX1, b"\x01", b"echo", *MORE], told(Reason.TOO_MANY_FRAMES)),
    "an unknown command of a worker": ([WX1, b"\x99", b"c", *MORE], told(Reason.TOO_MANY_FRAMES)),
}


@pytest.mark.parametrize(("frames", "read"), OVER_LIMIT.values(), ids=OVER_LIMIT)
def test_what_is_over_a_limit_is_told_to_whom_it_concerns(frames, read):  # C15, X1
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


def test_long_options_may_be_a_memoryview():  # X1
    options = b'{"ttl":1500,"key":"%s"}' % (b"k" * wire.SHARED)
    frames = [b"id", b"1", b"", CX1, b"\x01", b"echo", memoryview(options), memoryview(LARGE), b"x"]
    command = wire.decode_peer(frames, max_message=10 * len(LARGE), max_frames=MAX_FRAMES)
    assert command == wire.Request((b"id", b""), CX1, b"echo", [LARGE, b"x"], Options(options, 1.5), 1)
    assert [type(frame) for frame in command.body] == [memoryview, bytes]
    assert type(command.options.raw) is bytes


def test_what_is_asked_of_the_broker_itself_is_always_bytes():
    question = wire.decode_peer(
        [b"id", C02, b"\x01", b"mmi.service", memoryview(LARGE)], max_message=10 * len(LARGE), max_frames=MAX_FRAMES
    )
    assert isinstance(question.body[0], bytes)


def test_a_command_shows_what_it_says():
    command = wire.Request((b"id",), C02, b"echo", [b"x"])
    assert repr(command) == (
        "Request((b'id',), b'MDPC02', b'echo', [b'x'], "
        "Options(b'', None, True, False, False, False, None, None), None, None, 0)"
    )
    assert command != wire.Reply((b"id",), W02, True, b"c", [b"x"])
    assert command != 1
    assert (command[1], command[2:4]) == (C02, (b"echo", [b"x"]))


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_size_is_that_of_all_frames(kind):
    assert wire.size_of(kind([])) == 0
    assert wire.size_of(kind([b"", b"abc", memoryview(b"de")])) == 5


def test_no_frames_at_all():
    assert wire.decode_peer([], max_message=1, max_frames=1) == Invalid(Reason.TOO_FEW_FRAMES)
    assert wire.decode_broker([]) == Invalid(Reason.TOO_FEW_FRAMES)


def test_a_message_may_have_max_frames():
    body = [b""] * (MAX_FRAMES - 4)
    assert from_peer(C02, b"\x01", b"echo", *body) == wire.Request((b"id",), C02, b"echo", body)
    assert from_peer(C02, b"\x01", b"echo", *body, b"") == told(Reason.TOO_MANY_FRAMES)


def test_a_message_may_have_max_bytes():
    body = b"x" * (MAX_MESSAGE - len(b"id" + C02 + b"\x01" + b"echo"))
    assert from_peer(C02, b"\x01", b"echo", body) == wire.Request((b"id",), C02, b"echo", [body])
    assert from_peer(C02, b"\x01", b"echo", body, b"x") == told(Reason.TOO_LARGE)


# ── envelopes ────────────────────────────────────────────────────────────────────────────────────────────────────────

ENVELOPES = {
    "REQ socket": [b""],
    "proxy": [b"hop", b""],
    "looks like a header": [b"hop", C01, W02, b""],
    "longest address": [b"\xff" * 255, b""],
    "sixteen frames": [b"%d" % hop for hop in range(15)] + [b""],
}


@pytest.mark.parametrize("envelope", ENVELOPES.values(), ids=ENVELOPES)
def test_an_envelope_becomes_part_of_the_route(envelope):  # C22
    route = (b"id", *envelope)
    assert from_peer(*envelope, C02, b"\x01", b"echo", b"x") == wire.Request(route, C02, b"echo", [b"x"])
    assert from_peer(*envelope, C01, b"echo", b"x") == wire.Request(route, C01, b"echo", [b"x"])
    assert from_peer(*envelope, W02, b"\x05") == wire.Heartbeat(route, W02)
    assert from_broker(*envelope, C02, b"\x03", b"echo", b"x") == wire.Reply(
        tuple(envelope), C02, True, None, [b"x"], b"echo"
    )


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

FROM_BROKER = {
    "0.2 PARTIAL": ([C02, b"\x02", b"echo", b"x"], wire.Reply((), C02, False, None, [b"x"], b"echo")),  # C3
    "0.2 FINAL": ([C02, b"\x03", b"echo", b"x", b""], wire.Reply((), C02, True, None, [b"x", b""], b"echo")),
    "0.1 reply": ([b"", C01, b"echo", b"x"], wire.Reply((b"",), C01, True, None, [b"x"], b"echo")),  # C24
    "0.2 REQUEST": ([W02, b"\x02", b"c", b"", b"x"], wire.Request((), W02, b"", [b"x"], NO_OPTIONS, b"c")),  # C7
    "0.2 HEARTBEAT": ([W02, b"\x05"], wire.Heartbeat((), W02)),
    "0.2 DISCONNECT": ([W02, b"\x06"], wire.Disconnect((), W02)),
    "0.1 REQUEST": (
        [b"", W01, b"\x02", b"c", b"", b"x"],
        wire.Request((b"",), W01, b"", [b"x"], NO_OPTIONS, b"c"),
    ),  # C24
    "0.1 HEARTBEAT": ([b"", W01, b"\x04"], wire.Heartbeat((b"",), W01)),
    "0.1 DISCONNECT": ([b"", W01, b"\x05"], wire.Disconnect((b"",), W01)),
    # X1
    "X1 PARTIAL": ([b"1", b"", CX1, b"\x02", b"echo", b"x"], wire.Reply((b"1", b""), CX1, False, 1, [b"x"], b"echo")),
    "X1 FINAL": ([b"1", b"", CX1, b"\x03", b"echo", b""], wire.Reply((b"1", b""), CX1, True, 1, [b""], b"echo")),
    "X1 ERROR": (
        [b"1", b"", CX1, b"\x04", b"echo", b"404", b"nobody"],
        wire.Error((b"1", b""), CX1, 1, 404, b"nobody", [], b"echo"),
    ),
    "X1 ERROR with detail": (
        [b"one", b"", CX1, b"\x04", b"", b"007", b"a\xffb", b"\xff"],
        wire.Error((b"one", b""), CX1, b"one", 7, b"a\xffb", [b"\xff"]),
    ),
    "X1 client's HEARTBEAT": ([b"", CX1, b"\x06"], wire.Heartbeat((b"",), CX1)),
    "X1 client's DISCONNECT": ([b"", CX1, b"\x07"], wire.Disconnect((b"",), CX1)),
    "X1 FINAL without a number": ([CX1, b"\x03", b"echo", b"x"], wire.Reply((), CX1, True, None, [b"x"], b"echo")),
    "X1 REQUEST": ([WX1, b"\x02", b"12", b"", b"", b"x"], wire.Request((), WX1, b"", [b"x"], NO_OPTIONS, 12)),
    "X1 REQUEST with options": (
        [WX1, b"\x02", b"c", b"", b'{"attempt":2}', b"x", b"y"],
        wire.Request((), WX1, b"", [b"x", b"y"], Options(b'{"attempt":2}'), b"c"),
    ),
    "X1 CANCEL": ([b"hop", b"", WX1, b"\x08", b"12", b""], wire.Cancel((b"hop", b""), WX1, 12)),
    "X1 worker's HEARTBEAT": ([WX1, b"\x05"], wire.Heartbeat((), WX1)),
    "X1 DISCONNECT": ([WX1, b"\x06"], wire.Disconnect((), WX1)),
    "X1 DISCONNECT with a text": ([WX1, b"\x06", b"why"], wire.Disconnect((), WX1, b"why")),
}


@pytest.mark.parametrize(("frames", "command"), FROM_BROKER.values(), ids=FROM_BROKER)
def test_what_a_broker_sent_is_decoded(frames, command):
    read = from_broker(*frames)
    assert (type(read), read) == (type(command), command)


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
    # X1
    "X1 client, command REQUEST": ([CX1, b"\x01", b"echo", b"x"], Reason.UNKNOWN_COMMAND),
    "X1 client, command CANCEL": ([CX1, b"\x05", b"echo"], Reason.UNKNOWN_COMMAND),
    "X1 client, command 8": ([CX1, b"\x08", b"echo", b"x"], Reason.UNKNOWN_COMMAND),
    "X1 client, HEARTBEAT with more": ([CX1, b"\x06", b""], Reason.TOO_MANY_FRAMES),
    "X1 client, DISCONNECT with more": ([CX1, b"\x07", b""], Reason.TOO_MANY_FRAMES),
    "X1 FINAL without body": ([CX1, b"\x03", b"echo"], Reason.TOO_FEW_FRAMES),
    "ERROR without text": ([CX1, b"\x04", b"echo", b"404"], Reason.TOO_FEW_FRAMES),
    "ERROR with two details": ([CX1, b"\x04", b"echo", b"404", b"text", b"1", b"2"], Reason.TOO_MANY_FRAMES),
    "ERROR, code in text": ([CX1, b"\x04", b"echo", b"bad", b"text"], Reason.BAD_CODE),
    "X1 worker, command READY": ([WX1, b"\x01", b"echo"], Reason.UNKNOWN_COMMAND),
    "X1 worker, command ERROR": ([WX1, b"\x07", b"c", b"", b"500", b"text"], Reason.UNKNOWN_COMMAND),
    "X1 REQUEST without options": ([WX1, b"\x02", b"c", b""], Reason.NO_BODY),
    "X1 REQUEST without body": ([WX1, b"\x02", b"c", b"", b"{}"], Reason.NO_BODY),
    "X1 REQUEST, bad options": ([WX1, b"\x02", b"c", b"", b"[]", b"x"], Reason.BAD_OPTIONS),
    "X1 REQUEST with two addresses": ([WX1, b"\x02", b"c", b"d", b"", b"x"], Reason.NO_DELIMITER),
    "X1 CANCEL without address": ([WX1, b"\x08"], Reason.TOO_FEW_FRAMES),
    "X1 CANCEL, empty address": ([WX1, b"\x08", b"", b""], Reason.BAD_ADDRESS),
    "X1 CANCEL with two addresses": ([WX1, b"\x08", b"c", b"d"], Reason.NO_DELIMITER),
    "X1 CANCEL with more": ([WX1, b"\x08", b"c", b"", b""], Reason.TOO_MANY_FRAMES),
    "0.2 DISCONNECT with a text": ([W02, b"\x06", b"why"], Reason.TOO_MANY_FRAMES),
    "X1 DISCONNECT with more": ([WX1, b"\x06", b"why", b""], Reason.TOO_MANY_FRAMES),
    "0.2 CANCEL": ([W02, b"\x08", b"c", b""], Reason.UNKNOWN_COMMAND),
}


@pytest.mark.parametrize(("frames", "reason"), NOT_FROM_BROKER.values(), ids=NOT_FROM_BROKER)
def test_what_a_broker_cannot_mean_has_a_reason(frames, reason):  # C15
    assert from_broker(*frames) == Invalid(reason)


# ── encoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────

ROUTE = (b"id", b"hop", b"")
ENCODED = {
    "0.2 REQUEST": (wire.request_to_broker((), C02, b"echo", [b"x"]), [C02, b"\x01", b"echo", b"x"]),  # C1, C2
    "0.1 REQUEST": (wire.request_to_broker((b"",), C01, b"echo", [b"x"]), [b"", C01, b"echo", b"x"]),  # C24
    "0.2 PARTIAL": (
        wire.reply_to_client(ROUTE, C02, False, b"echo", [b"x"]),
        [*ROUTE, C02, b"\x02", b"echo", b"x"],
    ),  # C3
    "0.2 FINAL": (wire.reply_to_client(ROUTE, C02, True, b"echo", [b"x"]), [*ROUTE, C02, b"\x03", b"echo", b"x"]),
    "0.1 reply": (wire.reply_to_client(ROUTE, C01, True, b"echo", [b"x"]), [*ROUTE, C01, b"echo", b"x"]),
    "0.2 READY": (wire.ready((), W02, b"echo"), [W02, b"\x01", b"echo"]),  # C7
    "0.1 READY": (wire.ready((b"",), W01, b"echo"), [b"", W01, b"\x01", b"echo"]),
    "0.2 work": (wire.request_to_worker(ROUTE, W02, b"c", [b"x"]), [*ROUTE, W02, b"\x02", b"c", b"", b"x"]),
    "0.1 work": (wire.request_to_worker(ROUTE, W01, b"c", [b"x"]), [*ROUTE, W01, b"\x02", b"c", b"", b"x"]),
    "0.2 worker's PARTIAL": (
        wire.reply_to_broker((), W02, wire.Kind.PARTIAL, b"c", (b"x",)),
        [W02, b"\x03", b"c", b"", b"x"],
    ),
    "0.2 worker's FINAL": (
        wire.reply_to_broker((), W02, wire.Kind.FINAL, b"c", (b"x",)),
        [W02, b"\x04", b"c", b"", b"x"],
    ),
    "0.1 worker's REPLY": (
        wire.reply_to_broker((), W01, wire.Kind.FINAL, b"c", (b"x",)),
        [W01, b"\x03", b"c", b"", b"x"],
    ),
    "0.2 HEARTBEAT": (wire.heartbeat(ROUTE, W02), [*ROUTE, W02, b"\x05"]),
    "0.1 HEARTBEAT": (wire.heartbeat(ROUTE, W01), [*ROUTE, W01, b"\x04"]),
    "0.2 DISCONNECT": (wire.disconnect(ROUTE, W02), [*ROUTE, W02, b"\x06"]),
    "0.1 DISCONNECT": (wire.disconnect(ROUTE, W01), [*ROUTE, W01, b"\x05"]),
    # X1
    "X1 REQUEST": (
        wire.request_to_broker((b"1", b""), CX1, b"echo", [b"x", b"y"]),
        [b"1", b"", CX1, b"\x01", b"echo", b"", b"x", b"y"],
    ),
    "X1 REQUEST with options": (
        wire.request_to_broker((b"1", b""), CX1, b"echo", [b"x"], b'{"ttl":9}'),
        [b"1", b"", CX1, b"\x01", b"echo", b'{"ttl":9}', b"x"],
    ),
    "0.2 REQUEST, no options": (wire.request_to_broker((), C02, b"echo", [b"x"], b"{}"), [C02, b"\x01", b"echo", b"x"]),
    "X1 PARTIAL": (wire.reply_to_client(ROUTE, CX1, False, b"echo", [b"x"]), [*ROUTE, CX1, b"\x02", b"echo", b"x"]),
    "X1 FINAL": (wire.reply_to_client(ROUTE, CX1, True, b"echo", [b"x"]), [*ROUTE, CX1, b"\x03", b"echo", b"x"]),
    "X1 ERROR": (
        wire.error_to_client(ROUTE, b"echo", 404, b"nobody"),
        [*ROUTE, CX1, b"\x04", b"echo", b"404", b"nobody"],
    ),
    "X1 ERROR with detail": (
        wire.error_to_client(ROUTE, b"echo", 500, b"text", [b"d"]),
        [*ROUTE, CX1, b"\x04", b"echo", b"500", b"text", b"d"],
    ),
    "X1 CANCEL": (wire.cancel_to_broker((b"1", b""), b"echo"), [b"1", b"", CX1, b"\x05", b"echo"]),
    "X1 client's HEARTBEAT": (wire.heartbeat((b"",), CX1), [b"", CX1, b"\x06"]),
    "X1 READY": (wire.ready((), WX1, b"echo"), [WX1, b"\x01", b"echo"]),
    "X1 work": (
        wire.request_to_worker(ROUTE, WX1, b"c", [b"x"], b"{}"),
        [*ROUTE, WX1, b"\x02", b"c", b"", b"{}", b"x"],
    ),
    "0.2 work, no options": (
        wire.request_to_worker(ROUTE, W02, b"c", [b"x"], b"{}"),
        [*ROUTE, W02, b"\x02", b"c", b"", b"x"],
    ),
    "X1 worker's PARTIAL": (
        wire.reply_to_broker((), WX1, wire.Kind.PARTIAL, b"c", (b"x",)),
        [WX1, b"\x03", b"c", b"", b"x"],
    ),
    "X1 worker's FINAL": (
        wire.reply_to_broker((), WX1, wire.Kind.FINAL, b"c", (b"x",)),
        [WX1, b"\x04", b"c", b"", b"x"],
    ),
    "X1 worker's ERROR": (
        wire.error_to_broker((), b"c", 500, "größe".encode()),
        [WX1, b"\x07", b"c", b"", b"500", "größe".encode()],
    ),
    "X1 worker's ERROR with detail": (
        wire.error_to_broker(ROUTE, 12, 7, b"", [b"d"]),
        [*ROUTE, WX1, b"\x07", b"12", b"", b"007", b"", b"d"],
    ),
    "X1 READY with options": (wire.ready((b"",), WX1, b"echo", b"{}"), [b"", WX1, b"\x01", b"echo", b"{}"]),
    "X1 work for an integer": (
        wire.request_to_worker(ROUTE, WX1, 12, [b"x"]),
        [*ROUTE, WX1, b"\x02", b"12", b"", b"", b"x"],
    ),
    "0.2 work, the short way": (
        wire.request_to_worker((b"id",), W02, 12, [b"x"]),
        [b"id", W02, b"\x02", b"12", b"", b"x"],
    ),
    "0.2 FINAL, the short way": (
        wire.reply_to_client((b"id",), C02, True, b"e", [b"x"]),
        [b"id", C02, b"\x03", b"e", b"x"],
    ),
    "0.2 FINAL of two frames": (
        wire.reply_to_client((b"id",), C02, True, b"e", [b"x", b"y"]),
        [b"id", C02, b"\x03", b"e", b"x", b"y"],
    ),
    "FINAL to an envelope of one frame": (
        wire.reply_to_client((b"id", b""), C02, True, b"e", [b"x"]),
        [b"id", b"", C02, b"\x03", b"e", b"x"],
    ),
    "X1 CREDIT": (wire.credit((b"",), 64), [b"", WX1, b"\x0a", b"64"]),
    "X1 RELEASE": (wire.release((b"",), 12), [b"", WX1, b"\x0b", b"12", b""]),
    "X1 CANCEL to a worker": (wire.cancel_to_worker(ROUTE, 12), [*ROUTE, WX1, b"\x08", b"12", b""]),
    "X1 worker's HEARTBEAT": (wire.heartbeat(ROUTE, WX1), [*ROUTE, WX1, b"\x05"]),
    "X1 DISCONNECT": (wire.disconnect(ROUTE, WX1), [*ROUTE, WX1, b"\x06"]),
    "X1 DISCONNECT with a text": (wire.disconnect(ROUTE, WX1, b"why"), [*ROUTE, WX1, b"\x06", b"why"]),
}


@pytest.mark.parametrize(("message", "frames"), ENCODED.values(), ids=ENCODED)
def test_what_is_sent_is_the_specified_layout(message, frames):
    assert message == frames


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def nested(depth):
    """Options in which an object, and lists, are `depth` deep."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


GOOD_OPTIONS = {  # what is sent; the ttl in seconds, wait, and for a handler the headers and the attempt
    "nothing": (b"", None, True, {}, 1),
    "empty": (b"{}", None, True, {}, 1),
    "white space": (b' { "ttl" : 20 } ', 0.02, True, {}, 1),
    "no ttl": (b'{"ttl":null}', None, True, {}, 1),
    "ttl 0": (b'{"ttl":0}', 0, True, {}, 1),
    "ttl of minus nothing": (b'{"ttl":-0.0}', 0, True, {}, 1),
    "a float": (b'{"ttl":1500.5}', 1.5005, True, {}, 1),
    "a very small float": (b'{"ttl":1e-300}', 1e-303, True, {}, 1),
    "the longest ttl": (b'{"ttl":999999999999999}', 999999999999.999, True, {}, 1),
    "wait": (b'{"wait":true}', None, True, {}, 1),
    "do not wait": (b'{"wait":false}', None, False, {}, 1),
    "headers": ('{"headers":{"a":"1","ä":""}}'.encode(), None, True, {"a": "1", "ä": ""}, 1),
    "a lone surrogate": (b'{"headers":{"a":"\\ud800"}}', None, True, {"a": "\ud800"}, 1),
    "attempt": (b'{"attempt":3}', None, True, {}, 3),
    "attempt in text": (b'{"attempt":"3"}', None, True, {}, 1),
    "unknown keys": (b'{"key":[1,{"x":null}],"ttl":1}', 0.001, True, {}, 1),
    "duplicate keys": (b'{"ttl":1,"ttl":2000,"wait":false,"wait":true}', 2, True, {}, 1),
    "as deep as can be": (nested(MAX_NESTING), None, True, {}, 1),
    "many beside each other": (b'{"a":[' + b"{}," * 500 + b"[]]}", None, True, {}, 1),
    "a large integer": (b'{"n":' + b"9" * 4300 + b"}", None, True, {}, 1),
}


@pytest.mark.parametrize(("raw", "ttl", "wait", "headers", "attempt"), GOOD_OPTIONS.values(), ids=GOOD_OPTIONS)
def test_options_are_empty_or_an_object(raw, ttl, wait, headers, attempt):  # X1
    options = wire.parse_options(raw)
    assert options is not None
    assert (options.raw, options.ttl, options.wait) == (raw, None if ttl is None else pytest.approx(ttl), wait)
    assert options.only_ttl == (ttl is not None and options.values().keys() == {"ttl"})
    assert not options.ttl_apart
    assert options.values() == (json.loads(raw) if raw else {})
    request = Request([b"x"], service="s", client=b"c", options=options)
    assert (request.headers, request.attempt, request.options) == (headers, attempt, options.values())
    assert wire.parse_options(raw) == options


BAD_OPTIONS = {
    "no JSON": b"ttl=5",
    "half of it": b'{"ttl":5',
    "more than it": b'{"ttl":5}}',
    "no UTF-8": b'{"a":"\xff"}',
    "another encoding": '{"ttl":5}'.encode("utf-16"),
    "a byte order mark": '\ufeff{"ttl":5}'.encode(),
    "control character": b'{"a":"\n"}',
    "one quote": b"{'ttl':5}",
    "a list": b"[]",
    "a number": b"5",
    "text": b'"ttl"',
    "null": b"null",
    "ttl true": b'{"ttl":true}',
    "ttl false": b'{"ttl":false}',
    "ttl in text": b'{"ttl":"5"}',
    "ttl a list": b'{"ttl":[5]}',
    "ttl below 0": b'{"ttl":-1}',
    "ttl a little below 0": b'{"ttl":-1e-9}',
    "ttl infinite": b'{"ttl":Infinity}',
    "ttl minus infinite": b'{"ttl":-Infinity}',
    "ttl too large for a float": b'{"ttl":1e999}',
    "ttl no number": b'{"ttl":NaN}',
    "ttl of ages": b'{"ttl":1000000000000000}',
    "ttl of more than a float takes": b'{"ttl":' + b"9" * 400 + b"}",
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
    "too deep": nested(MAX_NESTING + 1),
    "much too deep": nested(500),
    "too deep for the parser": nested(30_000),
}


@pytest.mark.parametrize("raw", BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_other_options_are_malformed(raw):  # X1
    assert wire.parse_options(raw) is None
    assert from_peer(*REQUESTED, raw[:1500], b"x").reason is Reason.BAD_OPTIONS
    assert from_broker(WX1, b"\x02", b"c", b"", raw, b"x") == Invalid(Reason.BAD_OPTIONS)


def test_the_options_of_a_client_have_a_limit():  # X1
    def sent(raw):
        return wire.decode_peer([b"id", *REQUESTED, raw, b"x"], max_message=1 << 20, max_frames=10)

    raw = b'{"a":"' + b"x" * (MAX_OPTIONS - 8) + b'"}'
    assert len(raw) == MAX_OPTIONS
    assert sent(raw).options.raw == raw
    assert sent(raw + b" ") == Invalid(Reason.BAD_OPTIONS, (b"id", b""), 1, b"echo")


def test_what_a_request_over_a_link_has_passed_is_apart_from_its_options():  # C44
    raw = b'{"via":["a","b"],"attempts":2,"user":"shop","admin":true,"on_behalf":"x","key":1}'
    assert wire.passed(raw) == wire.Passed(("a", "b"), 2, "shop", b'{"key":1}')
    assert wire.passed(b'{"via":["a"]}') == wire.Passed(("a",), 0, None, b"")


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
    "a long one": b'{"via":[],"key":"' + b"x" * 300 + b'"}',
}


@pytest.mark.parametrize("raw", BAD_WAYS.values(), ids=BAD_WAYS)
def test_what_another_broker_says_of_a_requests_way_may_be_malformed(raw):  # C44
    assert wire.passed(raw) is None


LONGER = {"text": '"' + "ü" * 32_000 + '"', "numbers": "[" + ",".join(["1e15"] * 13_000) + "]"}


@pytest.mark.parametrize("values", LONGER.values(), ids=LONGER)
def test_options_that_the_broker_writes_longer_reach_the_worker(values):  # X1
    given = wire.parse_options(b'{"a":' + values.encode() + b"}")
    assert len(given.raw) <= MAX_OPTIONS
    raw = wire.options_with(given, 1000, 2)
    assert len(raw) > MAX_OPTIONS
    work = wire.decode_broker(wire.request_to_worker((), WX1, b"c", [b"x"], raw))
    assert work.options.values() == {**given.values(), "ttl": 1000, "attempt": 2}


def test_options_are_written():  # X1
    assert wire.encode_options({}) == b""
    assert wire.encode_options({"ttl": 1500, "wait": False, "headers": {"a": "ä"}, "key": [None, 1.5]}) == (
        b'{"ttl":1500,"wait":false,"headers":{"a":"\\u00e4"},"key":[null,1.5]}'
    )


ENDLESS: list[object] = []
for _ in range(100_000):
    ENDLESS = [ENDLESS]
UNSENDABLE = {  # and the beginning of what is said about it
    "bytes": ({"a": b"x"}, "options cannot be sent as JSON: Object of type bytes"),
    "no number": ({"a": math.nan}, "options cannot be sent as JSON: Out of range float"),
    "ttl infinite": ({"ttl": math.inf}, "options cannot be sent as JSON: Out of range float"),
    "too deep for JSON": ({"a": ENDLESS}, "options cannot be sent as JSON: maximum recursion depth"),
    "ttl below 0": ({"ttl": -1}, "options b'{\"ttl\":-1}' are invalid: ttl must be a number of milliseconds, "),
    "ttl true": ({"ttl": True}, "options b'{\"ttl\":true}' are invalid: ttl must be"),
    "wait 1": ({"wait": 1}, "options b'{\"wait\":1}' are invalid: ttl must be"),
    "header 1": ({"headers": {"a": 1}}, 'options b\'{"headers":{"a":1}}\' are invalid: ttl must be'),
    "too deep": ({"a": json.loads("[" * 64 + "]" * 64)}, 'options b\'{"a":[[['),
    "too long": ({"a": "x" * MAX_OPTIONS}, 'options b\'{"a":"xxx'),
}


@pytest.mark.parametrize(("values", "text"), UNSENDABLE.values(), ids=UNSENDABLE)
def test_options_that_cannot_be_sent_are_told_to_whoever_tries(values, text):  # X1
    with pytest.raises(SettingError) as error:
        wire.encode_options(values)
    assert str(error.value).startswith(text)
    assert len(str(error.value)) < 500


HANDED_OVER = {  # options, what is left of the ttl in milliseconds, the attempt; and what the worker gets
    "nothing to tell": (b"", None, 1, b""),
    "an attempt": (b"", None, 2, b'{"attempt":2}'),
    "a ttl": (b"", 1500, 1, b'{"ttl":1500}'),
    "less ttl": (b'{"ttl":5000,"key":1}', 1500, 1, b'{"ttl":1500,"key":1}'),
    "less of nothing but a ttl": (b'{ "ttl": 5000 }', 11, 1, b'{"ttl":11}'),
    "a ttl that was beside them": (b'{"key":1}', 11, 1, b'{"key":1,"ttl":11}'),
    "ttl and attempt": (b'{"ttl":5000,"wait":false}', 2000, 3, b'{"ttl":2000,"wait":false,"attempt":3}'),
    "nothing but ttl and attempt": (b'{"ttl":5000}', 2000, 2, b'{"ttl":2000,"attempt":2}'),
    "a client's attempt": (b'{"attempt":7}', None, 2, b'{"attempt":2}'),
    "without ttl": (b'{ "headers": {"a": "\\u00e4"} }', None, 2, b'{"headers":{"a":"\\u00e4"},"attempt":2}'),
}


@pytest.mark.parametrize(("raw", "ttl", "attempt", "options"), HANDED_OVER.values(), ids=HANDED_OVER)
def test_options_tell_what_is_left(raw, ttl, attempt, options):  # X1
    given = wire.parse_options(raw)
    assert wire.options_with(given, ttl, attempt) == options
    assert wire.parse_options(raw) == given  # they may be shared


WITHOUT_TTL = {
    "nothing": (wire.NO_OPTIONS, b""),
    "no ttl": (wire.parse_options(b'{ "key":1 }'), b'{ "key":1 }'),
    "a ttl": (wire.parse_options(b'{"ttl":5}'), b""),
    "a ttl and more": (wire.parse_options(b'{"ttl":5,"key":1}'), b'{"key":1}'),
    "a ttl in a record": (Options(b"", 5.0, True, True, True), b""),
    "a ttl in a record, beside options": (Options(b'{ "key":1 }', 5.0, ttl_apart=True), b'{ "key":1 }'),
}


@pytest.mark.parametrize(("given", "options"), WITHOUT_TTL.values(), ids=WITHOUT_TTL)
def test_options_in_a_record_have_no_ttl(given, options):  # X1
    assert wire.options_without_ttl(given) == options


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


def test_a_failure_is_three_readable_frames():
    assert wire.error_body(500, "it broke") == [b"zmdp.error", b"500", b"it broke"]


def test_a_failure_of_unencodable_text_is_still_told():
    assert wire.error_body(500, "a\ud800b") == [b"zmdp.error", b"500", b"a?b"]


def test_a_failure_of_broken_text_is_still_read():
    assert wire.parse_error([b"zmdp.error", b"500", b"a\xffb"]) == (500, "a\N{REPLACEMENT CHARACTER}b")


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
        assert wire.valid_service(b"service-%d" % number)
        assert len(names._known_names) <= names.MAX_KNOWN_NAMES
    assert not wire.valid_service(b"\n")
