"""Payloads of Flux messages: JSON objects and strings, with one NUL at the end."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmdp.interop.flux.wire.payloads import (
    MAX_DEPTH,
    json_payload,
    parse_json,
    parse_string,
    string_payload,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def nested(depth, opening=b'{"a":', innermost=b"1", closing=b"}"):
    return opening * depth + innermost + closing * depth + b"\0"


def test_json_is_compact_and_ends_with_nul():
    assert json_payload({"x": 1, "y": [True, None]}) == b'{"x":1,"y":[true,null]}\0'
    assert parse_json(b' {"x": 1}\n\0') == {"x": 1}


@given(st.dictionaries(st.text(), VALUES))
def test_any_object_survives_a_round_trip(value):
    assert parse_json(json_payload(value)) == value


@pytest.mark.parametrize(
    "payload",
    [
        None,
        b"",
        b"\0",
        b"{}",  # no NUL
        b"{}x",
        b"{}\0\0",
        b"{}x\0",
        b"\0{}\0",
        b"[]\0",
        b"1\0",
        b"null\0",
        b'"x"\0',
        b'{"x":}\0',
        b'{"x":NaN}\0',
        b'{"x":-Infinity}\0',
        b'{"x":1e999}\0',
        b'{"x":' + b"9" * 5000 + b"}\0",
        b'{"x":"\xff"}\0',
        b'{"x":"\\ud800"}\0',
        b'{"\\udfff":1}\0',
        b'{"x":"a\0b"}\0',
        b"{\0}\0",
        "{}".encode("utf-16") + b"\0",
        b"\xef\xbb\xbf{}\0",
        nested(MAX_DEPTH + 1),
        nested(100_000),
        nested(MAX_DEPTH, b'{"a":', b"[]"),
        b'{"a":' + nested(100_000, b"[", b"", b"]")[:-1] + b"}\0",
    ],
)
def test_a_payload_that_is_no_json_object_is_none(payload):
    assert parse_json(payload) is None


def test_surrogates_in_pairs_are_characters():
    assert parse_json(b'{"x":"\\ud83d\\ude00"}\0') == {"x": "\U0001f600"}


def test_a_large_flat_object_is_not_deep():
    value = {"x": [{} for _ in range(MAX_DEPTH * 2)], "y": "[" * MAX_DEPTH * 2}
    assert parse_json(json_payload(value)) == value


def test_what_was_parsed_can_be_encoded_wherever_the_call_stands():
    payload = nested(MAX_DEPTH)
    value = parse_json(payload)

    def far_down(calls):
        return json_payload(value) if calls == 0 else far_down(calls - 1)

    assert far_down(sys.getrecursionlimit() // 2) == payload


@given(st.binary(max_size=50) | st.text('{}[]":,\\ud80truefalsn1.e\0 ', max_size=30).map(str.encode))
def test_any_bytes_are_an_object_or_none(payload):
    value = parse_json(payload + b"\0")
    if value is not None:
        assert parse_json(json_payload(value)) == value


@pytest.mark.parametrize("value", [{"x": float("nan")}, {"x": float("inf")}, {"x": b""}])
def test_what_json_cannot_represent_raises(value):
    with pytest.raises((ValueError, TypeError)):
        json_payload(value)


def test_strings_end_with_nul():
    assert string_payload("größe") == "größe".encode() + b"\0"
    assert parse_string(string_payload("größe")) == "größe"
    assert parse_string(string_payload("")) == ""
    assert string_payload("\ud800") == b"?\0"


@pytest.mark.parametrize("payload", [None, b"", b"x", b"x\0y", b"x\0\0", b"\xff\0"])
def test_a_payload_that_is_no_string_is_none(payload):
    assert parse_string(payload) is None
