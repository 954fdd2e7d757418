import msgspec
import pytest

from zmdp.clients import CodecError, Reply
from zmdp.clients.json_values import body_for, encoded, json_of, readable
from zmdp.mdp.services import About
from zmdp.mdp.services.json_schemas import RAW

FRAMES = About()
JSON = About(codec="json", request={"type": "integer"}, reply={})
TEXT = About(codec="json", request={"type": "string"}, reply={})
PACKED = About(codec="msgpack", request={}, reply={})
PACKED_TEXT = About(codec="msgpack", request={"type": "string"}, reply={})
BYTES = About(codec="msgpack", request=RAW, part=RAW)
packed = msgspec.msgpack.encode


@pytest.mark.parametrize(
    ("about", "typed", "sent"),
    [
        (FRAMES, [b"hello"], [b"hello"]),
        (FRAMES, [b"1", b"2"], [b"1", b"2"]),
        (JSON, [b"5"], [b"5"]),
        (JSON, [b"hello"], [b"hello"]),
        (JSON, [b"1", b"2"], [b"1", b"2"]),
        (TEXT, [b"hello"], [b'"hello"']),
        (TEXT, [b'"hello"'], [b'"hello"']),
        (TEXT, [b"5"], [b'"5"']),
        (TEXT, [b""], [b""]),
        (TEXT, [b"\xff"], [b"\xff"]),
        (PACKED, [b'{"a": [1.5, null]}'], [packed({"a": [1.5, None]})]),
        (PACKED, [packed({"a": 1})], [packed({"a": 1})]),
        (PACKED_TEXT, ["größe".encode()], [packed("größe")]),
        (BYTES, [b"5"], [b"5"]),
    ],
)
def test_what_somebody_types_is_sent_as_the_service_wants_it(about, typed, sent):
    assert body_for(about, typed) == sent


@pytest.mark.parametrize("typed", [b"hello", b"x", b'{"a": x}'])
def test_a_text_that_is_not_json_is_not_taken_for_msgpack(typed):
    with pytest.raises(CodecError, match="the body cannot be read as json"):
        body_for(PACKED, [typed])


def test_who_says_that_it_is_json_must_send_json():
    assert encoded(JSON, b"{") == [b"{"], "the service itself says so"
    for wrong in (b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(CodecError, match="the body cannot be read as json"):
            encoded(PACKED, wrong)
    assert encoded(PACKED, b"%d" % (2**64 - 1)) == [packed(2**64 - 1)]
    with pytest.raises(CodecError, match="the body cannot be sent as msgpack"):
        encoded(PACKED, b"[%d]" % (2**64))


@pytest.mark.parametrize(
    ("about", "frames", "value"),
    [
        (FRAMES, [b"5"], None),
        (JSON, [b"5"], b"5"),
        (JSON, [b""], b"null"),
        (JSON, [b"1", b"2"], None),
        (PACKED, [packed({"a": b"\x00"})], b'{"a":"AA=="}'),
        (PACKED, [packed({1: 2})], b'{"1":2}'),
        (PACKED, [packed({(1, 2): 3})], None),
        (PACKED, [b"\xc1"], None),
        (PACKED, [b""], b"null"),
        (BYTES, [b"5"], None),
    ],
)
def test_values_of_replies_are_shown_as_json(about, frames, value):
    assert json_of(about, frames) == value


def test_parts_of_a_reply_are_shown_one_by_one():
    reply = Reply([packed([1]), b"\xc1"], service="x", final=True)
    shown = readable(PACKED, reply)
    assert (shown, shown.service, shown.final) == ([b"[1]", b"\xc1"], "x", True)
    assert readable(JSON, reply) is reply
