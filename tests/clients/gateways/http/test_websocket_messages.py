import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmdp.clients.gateways.http.websocket_messages import (
    Ask,
    CancelAsk,
    Form,
    MessageError,
    decode,
    encode,
    encode_error,
)


def said(**content):
    return decode(json.dumps(content, separators=(",", ":"), ensure_ascii=False))


def binary(rest=b"", **content):
    return decode(json.dumps(content).encode() + b"\n" + rest)


@pytest.mark.parametrize(
    ("body", "frames", "form"),
    [
        ({}, [b""], Form.TEXT),
        ({"body": "hallo ä"}, ["hallo ä".encode()], Form.TEXT),
        ({"body": "a", "more": ["b", ""]}, [b"a", b"b", b""], Form.TEXT),
        ({"body": [1, 2]}, [b"[1,2]"], Form.JSON),
        ({"body": None}, [b"null"], Form.JSON),
        ({"body": 0.5}, [b"0.5"], Form.JSON),
        ({"body": "a", "json": True}, [b'"a"'], Form.JSON),
        ({"json": True}, [b"null"], Form.JSON),
        ({"body": {"ä": 1}, "more": ["b"]}, ['{"ä":1}'.encode(), b'"b"'], Form.JSON),
    ],
)
def test_the_body_of_a_text_message(body, frames, form):
    assert said(id=1, service="s", **body) == Ask(1, "s", frames, form)


@pytest.mark.parametrize(
    ("content", "rest", "frames"),
    [
        ({}, b"\xff\n\x00", [b"\xff\n\x00"]),
        ({}, b"", [b""]),
        ({"body": [1, 0, 2]}, b"abc", [b"a", b"", b"bc"]),
    ],
)
def test_the_body_of_a_binary_message(content, rest, frames):
    assert binary(rest, id="x", service="s", **content) == Ask("x", "s", frames, Form.BINARY)


def test_everything_that_a_request_may_say():
    found = said(
        id="a", service="s", body="b", stream=True, timeout=2.5, wait=True, headers={"h": "v"}, options={"o": [1]}
    )
    assert found == Ask("a", "s", [b"b"], Form.TEXT, True, 2.5, True, {"h": "v"}, {"o": [1]})


def test_a_cancel():
    assert said(id=7, cancel=True) == CancelAsk(7)
    assert binary(id=7, cancel=True) == CancelAsk(7)


@pytest.mark.parametrize(
    ("message", "id_", "why"),
    [
        (b"", None, "must be a JSON object"),
        (b"[]", None, r"\$: expected object, got array"),
        (b'{"id":1,"service":"s","body":NaN}', 1, "must be a JSON object"),
        (b"[" * 100_000, None, r"\$: expected object"),
        (b'{"id":' + b"9" * 5000 + b"}", None, r"\$.id: integer value out of range"),
        (b"{}", None, r"\$: object missing required field id"),
        (b'{"id":null}', None, r"\$.id: expected int | str"),
        (b'{"id":true,"service":"s"}', None, r"\$.id: expected int | str"),
        (b'{"id":1.5,"service":"s"}', None, r"\$.id: expected int | str"),
        (b'{"id":9007199254740992,"service":"s"}', None, r"\$.id: expected int <= 9007199254740991"),
        (b'{"id":"%s","service":"s"}' % (b"x" * 101), None, r"\$.id: expected str of length <= 100"),
        (b'{"id":1}', 1, r"\$: object missing required field service"),
        (b'{"id":1,"service":["s"]}', 1, r"\$.service: expected str, got array"),
        (b'{"id":1,"service":"s","frames":[]}', 1, r"\$: object contains unknown field frames"),
        (b'{"id":1,"service":"s","timeout":0}', 1, r"\$.timeout: expected float > 0"),
        (b'{"id":1,"service":"s","timeout":true}', 1, r"\$.timeout: expected float"),
        (b'{"id":1,"service":"s","timeout":1e999}', 1, r"\$.timeout: number out of range"),
        (b'{"id":1,"service":"s","stream":1}', 1, r"\$.stream: expected bool"),
        (b'{"id":1,"service":"s","wait":"yes"}', 1, r"\$.wait: expected bool"),
        (b'{"id":1,"service":"s","headers":{"a":1}}', 1, r"\$.headers.*: expected str, got int"),
        (b'{"id":1,"service":"s","options":[]}', 1, r"\$.options: expected object"),
        (b'{"id":1,"service":"s","more":"x"}', 1, r"\$.more: expected array"),
        (b'{"id":1,"service":"s","json":0}', 1, r"\$.json: expected bool"),
        (b'{"id":1,"service":"s","body":1,"json":false}', 1, r"\$.body: expected str if"),
        (b'{"id":1,"service":"s","body":"\\ud800"}', 1, "valid Unicode"),
        (b'{"id":1,"service":"s","body":["\\ud800"]}', 1, "valid Unicode"),
        (b'{"id":1,"service":"s","body":[1e999]}', 1, "finite numbers"),
        (b'{"id":1,"cancel":false}', 1, r"\$.cancel: must be true"),
        (b'{"id":1,"cancel":true,"service":"s"}', 1, r"\$: object contains unknown field service"),
    ],
)  # fmt: skip
def test_an_invalid_text_message(message, id_, why):
    with pytest.raises(MessageError, match=why) as caught:
        decode(message.decode())
    assert caught.value.id == id_


@pytest.mark.parametrize("body", ["[" * 200_000 + "]" * 200_000, '{"a":' * 200_000 + "1" + "}" * 200_000])
def test_a_body_that_is_nested_too_deeply(body):
    """How deep a message may be for the first or only for the second look into it depends on the version of Python."""
    with pytest.raises(MessageError, match="not be nested deeply"):
        decode(f'{{"id":1,"service":"s","body":{body}}}')


def test_the_depth_of_options():
    options = {"a": 1}
    for _ in range(19):
        options = {"a": [], "b": options}
    assert said(id=1, service="s", options=options).options == options
    with pytest.raises(MessageError, match="20 levels"):
        said(id=1, service="s", options={"a": options})


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"", "one line"),
        (b"\xff\n", "a message must be a JSON object"),
        (b'{"id":1,"service":"s"}', "one line"),
        (b'{"id":1,"service":"s","body":[1]}\nab', "sizes of the frames, which are 2 bytes"),
        (b'{"id":1,"service":"s","body":[3,-1]}\nab', "sizes of the frames"),
        (b'{"id":1,"service":"s","body":[]}\n', "sizes of the frames"),
        (b'{"id":1,"service":"s","body":[true]}\na', "sizes of the frames"),
        (b'{"id":1,"service":"s","body":"a"}\na', "sizes of the frames"),
        (b'{"id":1,"service":"s","more":[]}\na', "more is for text messages"),
        (b'{"id":1,"service":"s","json":true}\na', "json is for text messages"),
        (b'{"id":"' + b"x" * (1 << 20) + b'"}\n', "one line"),
    ],
)
def test_an_invalid_binary_message(message, why):
    with pytest.raises(MessageError, match=why):
        decode(message)


@pytest.mark.parametrize(
    ("frames", "form", "message"),
    [
        ([b"a\nb"], Form.TEXT, b'{"id":1,"final":"a\\nb"}'),
        ([b"1"], Form.TEXT, b'{"id":1,"final":"1"}'),
        ([b"a", "ä".encode()], Form.TEXT, '{"id":1,"final":"a","more":["ä"]}'.encode()),
        ([b'{"a": 1}'], Form.JSON, b'{"id":1,"final":{"a": 1}}'),
        ([b"not JSON"], Form.JSON, b'{"id":1,"final":"not JSON"}'),
        ([b"NaN"], Form.JSON, b'{"id":1,"final":"NaN"}'),
        ([b"[" * 100_000], Form.JSON, b'{"id":1,"final":"%s"}' % (b"[" * 100_000)),
        ([b"1", b"[2]"], Form.JSON, b'{"id":1,"final":1,"more":[[2]]}'),
    ],
)
def test_a_reply_as_a_text_message(frames, form, message):
    assert encode(1, "final", frames, form) == message.decode()
    json.loads(message)


@pytest.mark.parametrize("form", Form)
def test_a_reply_that_is_not_text(form):
    assert encode("x", "partial", [b"a\n", b"\xff"], form) == b'{"id":"x","partial":[2,1]}\na\n\xff'


def test_a_reply_to_a_binary_request_is_binary():
    assert encode(1, "final", [b"text"], Form.BINARY) == b'{"id":1,"final":[4]}\ntext'


def test_an_error():
    assert json.loads(encode_error(None, {"status": 400})) == {"id": None, "error": {"status": 400}}


@given(st.binary() | st.text())
def test_no_message_raises_anything_but_a_message_error(message):
    with contextlib.suppress(MessageError):
        decode(message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(JSON)
def test_a_json_value_survives_the_round_trip(value):
    ask = said(id=1, service="s", body=value, json=True)
    message = encode(1, "final", ask.body, ask.form)
    assert isinstance(message, str)
    assert json.loads(message) == {"id": 1, "final": value}


@given(st.lists(st.binary(), min_size=1))
def test_frames_survive_the_round_trip_in_binary_messages(frames):
    message = encode(1, "body", frames, Form.BINARY)
    line, _, rest = message.partition(b"\n")
    content = {**json.loads(line), "service": "s"}
    assert binary(rest, **content) == Ask(1, "s", frames, Form.BINARY)
