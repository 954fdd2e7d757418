"""Flux messages: the bytes of genuine programs both ways, each rule of RFC 3 and CMB1, and any bytes at all."""

from dataclasses import FrozenInstanceError, replace

import fuzz_flux
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmdp.interop.flux.wire import messages
from zmdp.interop.flux.wire.messages import (
    CMB1,
    ENODATA,
    ENOSYS,
    MATCHTAG_NONE,
    MAX_ROUTES,
    NODEID_ANY,
    NODEID_UPSTREAM,
    RFC3,
    USERID_UNKNOWN,
    Control,
    Event,
    FluxRequest,
    Invalid,
    Keepalive,
    Response,
    decode,
    encode,
)

VECTORS = {
    "request": (
        [b"", b"echo.say", b'{"x":1}\0', bytes.fromhex("8e01010bffffffff00000000ffffffff00000001")],
        FluxRequest("echo.say", b'{"x":1}\0', matchtag=1),
    ),
    "response": (
        [b"", b"echo.say", b'{"x":1}\0', bytes.fromhex("8e01020b000003e8000000010000000000000001")],
        Response("echo.say", b'{"x":1}\0', matchtag=1, userid=1000, rolemask=1),
    ),
    "error": (
        [b"", b"nope.x", bytes.fromhex("8e010209000003e8000000010000002600000001")],
        Response("nope.x", matchtag=1, errnum=ENOSYS, userid=1000, rolemask=1),
    ),
    "end of a stream": (
        [b"", b"echo.count", bytes.fromhex("8e010249000003e8000000010000003d00000002")],
        Response("echo.count", matchtag=2, errnum=ENODATA, userid=1000, rolemask=1, streaming=True),
    ),
    "request to the parent": (
        [b"", b"broker.ping", b"{}\0", bytes.fromhex("8e01011bffffffff000000000000000000000001")],
        FluxRequest("broker.ping", b"{}\0", matchtag=1, nodeid=0, upstream=True),
    ),
    "event of a client": (
        [b"", b"zm.x", b'{"n":1}\0', bytes.fromhex("8e01040bffffffff000000000000000000000000")],
        Event("zm.x", b'{"n":1}\0', routes=()),
    ),
    "private event": (
        [b"", b"zm.x", bytes.fromhex("8e010429ffffffff000000000000000000000000")],
        Event("zm.x", routes=(), private=True),
    ),
    "framed": (
        [b"", b"attr.get", b'{"name":"rank"}\0', bytes.fromhex("8e01010bffffffff00000000ffffffff00000001")],
        FluxRequest("attr.get", b'{"name":"rank"}\0', matchtag=1),
    ),
}
"""What genuine programs send, as parts, and what it is."""
GENUINE = pytest.mark.parametrize(("parts", "message"), VECTORS.values(), ids=VECTORS.keys())


def header(kind, flags, a=0, b=0, magic=0x8E, version=1):
    words = (USERID_UNKNOWN, 0, a, b)
    return bytes([magic, version, kind, flags]) + b"".join(word.to_bytes(4, "big") for word in words)


@GENUINE
def test_a_genuine_message_is_decoded(parts, message):
    assert decode(parts) == message
    assert decode(parts, CMB1) == message


@GENUINE
def test_a_genuine_message_is_encoded_byte_by_byte(parts, message):
    assert encode(message) == parts


@GENUINE
def test_a_truncated_header_is_invalid(parts, message):
    for size in range(20):
        assert decode([*parts[:-1], parts[-1][:size]]) == Invalid("the header does not have 20 bytes")
    assert decode([*parts[:-1], parts[-1] + b"\0"]) == Invalid("the header does not have 20 bytes")


# ── every field has its place ────────────────────────────────────────────────────────────────────────────────────────


def test_the_defaults_are_those_of_a_new_message():
    assert encode(FluxRequest("a")) == [b"", b"a", header(1, 0x09, NODEID_ANY, MATCHTAG_NONE)]
    assert encode(Response("a")) == [b"", b"a", header(2, 0x09)]
    assert encode(Event("a")) == [b"a", header(4, 0x01)]
    assert encode(Control()) == encode(Keepalive()) == [header(8, 0x00)]


@pytest.mark.parametrize(
    ("kind", "change", "flag"),
    [
        (FluxRequest, {"payload": b""}, 0x02),
        (FluxRequest, {"noresponse": True}, 0x04),
        (FluxRequest, {"upstream": True}, 0x10),
        (FluxRequest, {"streaming": True}, 0x40),
        (FluxRequest, {"user1": True}, 0x80),
        (Response, {"payload": b""}, 0x02),
        (Response, {"upstream": True}, 0x10),
        (Response, {"streaming": True}, 0x40),
        (Response, {"user1": True}, 0x80),
        (Event, {"payload": b""}, 0x02),
        (Event, {"routes": ()}, 0x08),
        (Event, {"private": True}, 0x20),
        (Event, {"user1": True}, 0x80),
        (Control, {"user1": True}, 0x80),
    ],
)
def test_each_flag_has_its_bit(kind, change, flag):
    plain = kind() if kind is Control else kind("a")
    assert encode(replace(plain, **change))[-1][3] ^ encode(plain)[-1][3] == flag


def test_each_integer_has_its_place():
    credentials = {"userid": 0x01020304, "rolemask": 0x05060708}
    both = bytes.fromhex("01020304 05060708 090a0b0c 0d0e0f10")
    first, second = 0x090A0B0C, 0x0D0E0F10
    assert encode(FluxRequest("a", matchtag=second, nodeid=first, **credentials))[-1][4:] == both
    assert encode(Response("a", matchtag=second, errnum=first, **credentials))[-1][4:] == both
    assert encode(Event("a", sequence=first, **credentials))[-1][4:] == both[:12] + bytes(4)
    assert encode(Control(first, second, **credentials))[-1][4:] == both
    assert encode(Keepalive(first, second, **credentials))[-1][4:] == both


def test_routes_are_the_first_parts_top_of_the_stack_first():
    request = FluxRequest("a", b"", routes=(b"top", b"bottom"))
    assert encode(request)[:4] == [b"top", b"bottom", b"", b"a"]
    assert decode(encode(request)) == request


def test_no_payload_is_not_an_empty_payload():
    none, empty = [b"", b"a", header(1, 0x09)], [b"", b"a", b"", header(1, 0x0B)]
    assert decode(none).payload is None
    assert decode(empty).payload == b""
    assert (encode(decode(none)), encode(decode(empty))) == (none, empty)


def test_a_response_may_have_the_flags_of_its_request():
    assert decode([b"", b"a", header(2, 0xFD)]) == Response("a", upstream=True, streaming=True, user1=True)


def test_routes_of_events_are_accepted():
    """RFC 3 forbids them, but flux-core's events have them."""
    event = Event("a", b"", 7, (b"broker", b"module"))
    assert encode(event) == [b"broker", b"module", b"", b"a", b"", header(4, 0x0B, 7)]
    assert decode(encode(event)) == event


def test_messages_are_values():
    with pytest.raises(FrozenInstanceError):
        FluxRequest("a").topic = "b"
    assert not hasattr(FluxRequest("a"), "__dict__")
    assert len({FluxRequest("a"), FluxRequest("a"), Response("a")}) == 2


# ── the rules ────────────────────────────────────────────────────────────────────────────────────────────────────────

BROKEN = [
    ("no header", []),
    ("the header does not have 20 bytes", [b""]),
    ("wrong magic byte in the header", [b"", b"a", header(1, 0x09, magic=0x8F)]),
    ("unknown version", [b"", b"a", header(1, 0x09, version=2)]),
    ("unknown type", [b"", b"a", header(0, 0x09)]),
    ("unknown type", [b"", b"a", header(3, 0x09)]),
    ("unknown type", [b"", b"a", header(5, 0x09)]),
    ("unknown type", [b"", b"a", header(16, 0x09)]),
    ("unknown type", [header(9, 0)]),
    ("no topic", [b"", header(1, 0x08)]),
    ("no topic", [b"", header(2, 0x08)]),
    ("no topic", [header(4, 0x00)]),
    ("empty topic", [b"", b"", header(1, 0x09)]),
    ("topic too long", [b"", b"a" * 1025, header(1, 0x09)]),
    ("missing route delimiter", [b"a", header(1, 0x09)]),
    ("missing route delimiter", [b"x", b"a", header(1, 0x09)]),
    ("missing route delimiter", [header(1, 0x09)]),
    ("missing parts", [b"", header(1, 0x09)]),
    ("missing parts", [b"", b"a", header(1, 0x0B)]),
    ("missing parts", [header(4, 0x01)]),
    ("surplus parts", [b"", b"a", b"b", header(1, 0x09)]),
    ("surplus parts", [b"", b"a", b"b", b"c", header(1, 0x0B)]),
    ("surplus parts", [b"", header(8, 0)]),
    ("too many routes", [*[b"r"] * (MAX_ROUTES + 1), b"", b"a", header(1, 0x09)]),
    ("route too long", [b"r" * 256, b"", b"a", header(1, 0x09)]),
    ("streaming request that wants no response", [b"", b"a", header(1, 0x4D)]),
    ("event whose unused field is not zero", [b"a", header(4, 0x01, 1, 1)]),
    ("control message with routes, topic or payload", [b"", header(8, 0x08)]),
    ("control message with routes, topic or payload", [b"a", header(8, 0x01)]),
    ("control message with routes, topic or payload", [b"a", header(8, 0x02)]),
]
RFC3_BROKEN = [
    ("no route delimiter", [b"a", header(1, 0x01)]),
    ("no route delimiter", [b"a", header(2, 0x01)]),
    ("NUL in the topic", [b"", b"a\0", header(1, 0x09)]),
    ("topic is not UTF-8", [b"", b"\xff", header(1, 0x09)]),
    ("NUL in a route", [b"r\0", b"", b"a", header(1, 0x09)]),
]
CMB1_BROKEN = [
    ("unknown flag", [b"", b"a", header(1, 0x89)]),
    ("reserved nodeid", [b"", b"a", header(1, 0x09, NODEID_UPSTREAM)]),
    *(
        ("topic with characters other than letters, digits and periods", [b"", topic, header(1, 0x09)])
        for topic in [b"a-b", b"a b", b"a\0", b"\xc3\xb6", b"a/b"]
    ),
]


@pytest.mark.parametrize(("reason", "parts"), BROKEN + RFC3_BROKEN)
def test_a_message_that_breaks_a_rule_of_rfc_3_is_invalid(reason, parts):
    assert decode(parts, RFC3) == Invalid(reason)


@pytest.mark.parametrize(("reason", "parts"), BROKEN + CMB1_BROKEN)
def test_a_message_that_breaks_a_rule_of_cmb1_is_invalid(reason, parts):
    assert decode(parts, CMB1) == Invalid(reason)


@pytest.mark.parametrize("parts", [parts for reason, parts in RFC3_BROKEN if reason == "no route delimiter"])
def test_cmb1_allows_requests_and_responses_without_a_route_delimiter(parts):
    message = decode(parts, CMB1)
    assert message.routes is None
    assert encode(message) == parts


@pytest.mark.parametrize("parts", [parts for _, parts in CMB1_BROKEN if b"a\0" not in parts])
def test_flux_core_speaks_more_than_cmb1(parts):
    assert encode(decode(parts, RFC3)) == parts


def test_type_8_is_control_in_rfc_3_and_keepalive_in_cmb1():
    parts = [header(8, 0x00, 1, 2)]
    assert decode(parts, RFC3) == Control(1, 2)
    assert decode(parts, CMB1) == Keepalive(1, 2)


def test_limits_include_what_is_just_allowed():
    parts = [*[b"r" * 255] * MAX_ROUTES, b"", b"a" * 1024, b"", header(1, 0x0B)]
    assert len(parts) == messages.MAX_PARTS
    assert encode(decode(parts)) == parts


@pytest.mark.parametrize("topic", ["", "a\0", "a" * 1025, "ö" * 513, "\ud800"])
def test_a_topic_that_could_not_be_decoded_is_not_valid(topic):
    assert not messages.valid_topic(topic)


def test_a_valid_topic_depends_on_the_dialect():
    assert messages.valid_topic("größe.a-b")
    assert not messages.valid_topic("größe.a-b", CMB1)
    assert messages.valid_topic("a.b2", CMB1)


# ── any message, any bytes ───────────────────────────────────────────────────────────────────────────────────────────

U32 = st.integers(0, 0xFFFFFFFF)
ROUTES = st.lists(st.binary(min_size=1, max_size=255).filter(lambda route: 0 not in route), max_size=5).map(tuple)
SENDER = {"userid": U32, "rolemask": U32}
BODY = {"payload": st.none() | st.binary(max_size=300), "user1": st.booleans()}
TOPICS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=256)
CMB1_TOPICS = st.text("abzABZ019.", min_size=1)


def routed(topics, routes, **more):
    """Return any requests and responses with these topics and routes."""
    common = {
        "topic": topics,
        "routes": routes,
        "matchtag": U32,
        "upstream": st.booleans(),
        "streaming": st.booleans(),
        **SENDER,
        **BODY,
        **more,
    }
    ranks = st.just(NODEID_ANY) | st.integers(0, NODEID_UPSTREAM - 1)
    requests = st.builds(FluxRequest, nodeid=ranks, noresponse=st.booleans(), **common)
    possible = requests.filter(lambda request: not (request.noresponse and request.streaming))
    return possible | st.builds(Response, errnum=U32, **common)


def events(topics, routes, **more):
    return st.builds(Event, topic=topics, routes=routes, sequence=U32, private=st.booleans(), **SENDER, **BODY | more)


NO_USER1 = {"user1": st.just(False)}
RFC3_MESSAGES = (
    routed(TOPICS, ROUTES)
    | events(TOPICS, st.none() | ROUTES)
    | st.builds(Control, type=U32, status=U32, user1=st.booleans(), **SENDER)
)
CMB1_MESSAGES = (
    routed(CMB1_TOPICS, st.none() | ROUTES, **NO_USER1)
    | events(CMB1_TOPICS, st.none() | ROUTES, **NO_USER1)
    | st.builds(Keepalive, errnum=U32, status=U32, **SENDER)
)


@given(RFC3_MESSAGES)
def test_any_message_of_rfc_3_survives_a_round_trip(message):
    assert decode(encode(message), RFC3) == message


@given(CMB1_MESSAGES)
def test_any_message_of_cmb1_survives_a_round_trip(message):
    assert decode(encode(message), CMB1) == message


@given(st.lists(st.binary(max_size=30) | st.integers(0, 255).map(lambda flags: header(1, flags)), max_size=6))
def test_any_parts_are_a_message_or_have_a_reason(parts):
    fuzz_flux.check_parts(parts)


def test_mutated_messages_are_what_the_grammar_says():
    found = {
        one.reason if isinstance(one, Invalid) else type(one) for seed in range(5000) for one in fuzz_flux.fuzz(seed)
    }
    reasons = {reason for reason, _ in BROKEN + RFC3_BROKEN + CMB1_BROKEN}
    assert found - {"too many routes"} == reasons - {"no header", "too many routes"} | {
        FluxRequest, Response, Event, Control, Keepalive,
    }  # fmt: skip
