"""Frames ↔ commands: every layout of CONFORMANCE.md, every way to get it wrong."""

import pytest

from zmdp.mdp import wire
from zmdp.mdp.errors import SettingError
from zmdp.mdp.wire import C01, C02, W01, W02, Invalid, Reason

MAX_MESSAGE = 2000
MAX_FRAMES = 30
LONG = b"x" * 256


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
    "0.1 HEARTBEAT": ([b"", W01, b"\x04"], wire.Heartbeat((b"id", b""), W01)),
    "0.1 DISCONNECT": ([b"", W01, b"\x05"], wire.Disconnect((b"id", b""), W01)),
    "opaque address": ([W02, b"\x04", b"\0" * 255, b"", b"x"], wire.Reply((b"id",), W02, True, b"\0" * 255, [b"x"])),
}


@pytest.mark.parametrize(("frames", "command"), FROM_PEER.values(), ids=FROM_PEER)
def test_what_a_peer_sent_is_decoded(frames, command):
    assert from_peer(*frames) == command


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
    "REPLY with two addresses": ([b"", W01, b"\x03", b"c", b"d", b"", b"x"], Reason.NO_DELIMITER),
    # C23: an address has 1 to 255 bytes
    "FINAL, empty address": ([W02, b"\x04", b"", b"", b"x"], Reason.BAD_ADDRESS),
    "FINAL, address too long": ([W02, b"\x04", LONG, b"", b"x"], Reason.BAD_ADDRESS),
    # C19, C2, C7: body+
    "0.2 REQUEST without body": ([C02, b"\x01", b"echo"], Reason.NO_BODY),
    "0.1 REQUEST without body": ([b"", C01, b"echo"], Reason.NO_BODY),
    "FINAL without body": ([W02, b"\x04", b"c", b""], Reason.NO_BODY),
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
}


@pytest.mark.parametrize(("frames", "reason"), NOT_FROM_PEER.values(), ids=NOT_FROM_PEER)
def test_what_is_no_command_has_a_reason(frames, reason):  # C15
    assert from_peer(*frames) == Invalid(reason)


def test_no_frames_at_all():
    assert wire.decode_peer([], max_message=1, max_frames=1) == Invalid(Reason.TOO_FEW_FRAMES)
    assert wire.decode_broker([]) == Invalid(Reason.TOO_FEW_FRAMES)


def test_a_message_may_have_max_frames():
    body = [b""] * (MAX_FRAMES - 4)
    assert from_peer(C02, b"\x01", b"echo", *body) == wire.Request((b"id",), C02, b"echo", body)
    assert from_peer(C02, b"\x01", b"echo", *body, b"") == Invalid(Reason.TOO_MANY_FRAMES)


def test_a_message_may_have_max_bytes():
    body = b"x" * (MAX_MESSAGE - len(b"id" + C02 + b"\x01" + b"echo"))
    assert from_peer(C02, b"\x01", b"echo", body) == wire.Request((b"id",), C02, b"echo", [body])
    assert from_peer(C02, b"\x01", b"echo", body, b"x") == Invalid(Reason.TOO_LARGE)


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
    assert from_broker(*envelope, C02, b"\x03", b"echo", b"x") == wire.Answer(
        tuple(envelope), C02, True, b"echo", [b"x"]
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
    "0.2 PARTIAL": ([C02, b"\x02", b"echo", b"x"], wire.Answer((), C02, False, b"echo", [b"x"])),  # C3
    "0.2 FINAL": ([C02, b"\x03", b"echo", b"x", b""], wire.Answer((), C02, True, b"echo", [b"x", b""])),
    "0.1 reply": ([b"", C01, b"echo", b"x"], wire.Answer((b"",), C01, True, b"echo", [b"x"])),  # C24
    "0.2 REQUEST": ([W02, b"\x02", b"c", b"", b"x"], wire.Work((), W02, b"c", [b"x"])),  # C7
    "0.2 HEARTBEAT": ([W02, b"\x05"], wire.Heartbeat((), W02)),
    "0.2 DISCONNECT": ([W02, b"\x06"], wire.Disconnect((), W02)),
    "0.1 REQUEST": ([b"", W01, b"\x02", b"c", b"", b"x"], wire.Work((b"",), W01, b"c", [b"x"])),  # C24
    "0.1 HEARTBEAT": ([b"", W01, b"\x04"], wire.Heartbeat((b"",), W01)),
    "0.1 DISCONNECT": ([b"", W01, b"\x05"], wire.Disconnect((b"",), W01)),
}


@pytest.mark.parametrize(("frames", "command"), FROM_BROKER.values(), ids=FROM_BROKER)
def test_what_a_broker_sent_is_decoded(frames, command):
    assert from_broker(*frames) == command


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
}


@pytest.mark.parametrize(("frames", "reason"), NOT_FROM_BROKER.values(), ids=NOT_FROM_BROKER)
def test_what_a_broker_cannot_mean_has_a_reason(frames, reason):  # C15
    assert from_broker(*frames) == Invalid(reason)


# ── encoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────

ROUTE = (b"id", b"hop", b"")
ENCODED = {
    "0.2 REQUEST": (wire.request((), C02, b"echo", [b"x"]), [C02, b"\x01", b"echo", b"x"]),  # C1, C2
    "0.1 REQUEST": (wire.request((b"",), C01, b"echo", [b"x"]), [b"", C01, b"echo", b"x"]),  # C24
    "0.2 PARTIAL": (wire.answer(ROUTE, C02, False, b"echo", [b"x"]), [*ROUTE, C02, b"\x02", b"echo", b"x"]),  # C3
    "0.2 FINAL": (wire.answer(ROUTE, C02, True, b"echo", [b"x"]), [*ROUTE, C02, b"\x03", b"echo", b"x"]),
    "0.1 reply": (wire.answer(ROUTE, C01, True, b"echo", [b"x"]), [*ROUTE, C01, b"echo", b"x"]),
    "0.2 READY": (wire.ready((), W02, b"echo"), [W02, b"\x01", b"echo"]),  # C7
    "0.1 READY": (wire.ready((b"",), W01, b"echo"), [b"", W01, b"\x01", b"echo"]),
    "0.2 work": (wire.work(ROUTE, W02, b"c", [b"x"]), [*ROUTE, W02, b"\x02", b"c", b"", b"x"]),
    "0.1 work": (wire.work(ROUTE, W01, b"c", [b"x"]), [*ROUTE, W01, b"\x02", b"c", b"", b"x"]),
    "0.2 worker's PARTIAL": (
        wire.reply((), W02, wire.Kind.PARTIAL, b"c", (b"x",)),
        [W02, b"\x03", b"c", b"", b"x"],
    ),
    "0.2 worker's FINAL": (wire.reply((), W02, wire.Kind.FINAL, b"c", (b"x",)), [W02, b"\x04", b"c", b"", b"x"]),
    "0.1 worker's REPLY": (wire.reply((), W01, wire.Kind.FINAL, b"c", (b"x",)), [W01, b"\x03", b"c", b"", b"x"]),
    "0.2 HEARTBEAT": (wire.heartbeat(ROUTE, W02), [*ROUTE, W02, b"\x05"]),
    "0.1 HEARTBEAT": (wire.heartbeat(ROUTE, W01), [*ROUTE, W01, b"\x04"]),
    "0.2 DISCONNECT": (wire.disconnect(ROUTE, W02), [*ROUTE, W02, b"\x06"]),
    "0.1 DISCONNECT": (wire.disconnect(ROUTE, W01), [*ROUTE, W01, b"\x05"]),
}


@pytest.mark.parametrize(("message", "frames"), ENCODED.values(), ids=ENCODED)
def test_what_is_sent_is_the_specified_layout(message, frames):
    assert message == frames


@pytest.mark.parametrize("header", [W01, W02])
@pytest.mark.parametrize("route", [(b"id",), ROUTE])
def test_work_is_told_from_other_commands_to_a_worker(route, header):
    assert wire.is_work(wire.work(route, header, b"c", [b"x"]), route, header)
    assert not wire.is_work(wire.heartbeat(route, header), route, header)
    assert not wire.is_work(wire.disconnect(route, header), route, header)


@pytest.mark.parametrize(
    "message",
    [
        wire.answer((b"id",), C02, False, b"echo", [b"x"]),
        wire.answer((b"id",), C01, True, b"\x02", [b"x"]),
        wire.answer((b"id", b"other", b""), C02, False, b"echo", [b"x"]),
        wire.work((b"id", b"other", b""), W02, b"c", [b"x"]),
        [b"id"],
    ],
    ids=["PARTIAL", "0.1 reply", "PARTIAL behind another envelope", "work behind another envelope", "identity only"],
)
@pytest.mark.parametrize("route", [(b"id",), ROUTE])
def test_work_is_told_from_what_goes_to_a_client_of_the_same_connection(message, route):
    assert not wire.is_work(message, route, W02)


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
    assert str(error.value) == f"{name!r} is no service name: it takes 1 to 255 bytes of printable text"


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
