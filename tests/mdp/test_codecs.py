"""Values to frames and back."""

import math
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results import package

from zmdp.mdp import codecs
from zmdp.mdp.codecs import Coder
from zmdp.mdp.errors import CodecError, SettingError, ZmdpError
from zmdp.mdp.program.extras import install_command

plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    plain | texts, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=20
)


def check_package(name):
    """Skip the test of a codec whose package could not be installed."""
    if name == "arrow":
        package("pyarrow")


@pytest.mark.parametrize("name", ["json", "msgpack"])
@given(value=values)
def test_encoding_and_decoding_round_trips(name, value):
    coder = Coder(name)
    frames = coder.encode(value)
    assert len(frames) == 1
    assert coder.decode(frames) == value


@pytest.mark.parametrize("name", ["json", "msgpack", "arrow"])
@given(frame=st.binary())
def test_decoding_arbitrary_bytes_raises_only_codec_errors(frame, name):
    check_package(name)
    try:
        Coder(name).decode([frame])
    except CodecError as error:
        assert str(error).startswith(f"the body cannot be read as {name}: ")  # noqa: PT017 - most raise, some do not


def test_json_is_compact_and_utf_8():
    assert Coder("json").encode({"größe": [1, 2]}) == ['{"größe":[1,2]}'.encode()]


def test_what_json_makes_of_values_that_it_lacks():
    assert Coder("json").encode([b"bytes", {1}, (2,), math.nan]) == [b'["Ynl0ZXM=",[1],[2],null]']


def test_msgpack_preserves_bytes():
    assert Coder("msgpack").decode(Coder("msgpack").encode({"a": b"\xff"})) == {"a": b"\xff"}


def test_arrow():
    pa = package("pyarrow")
    coder = Coder("arrow")
    table = pa.table({"n": [1, 2, None], "text": ["a", None, "ä"]})
    assert coder.decode(coder.encode(table)) == table
    assert coder.decode(coder.encode(table.to_batches()[0])) == table
    assert coder.decode(coder.encode({"n": [1]})) == pa.table({"n": [1]})
    assert coder.decode(coder.encode(table.slice(0, 0))).schema == table.schema
    assert coder.encode(None) == [b""]  # as a stream of tables ends
    assert coder.decode([b""]) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("json", object()),
        ("json", "\ud800"),
        ("msgpack", {1, 2}),
        ("msgpack", 2**64),
        ("arrow", 3),
        ("arrow", {"a": [1], "b": [1, 2]}),
    ],
)
def test_values_that_cannot_be_encoded(name, value):
    check_package(name)
    with pytest.raises(CodecError, match=rf"cannot be sent as {name}: \w+: ") as caught:
        Coder(name).encode(value)
    assert isinstance(caught.value, ValueError | ZmdpError)
    assert caught.value.__cause__ is not None


def test_the_error_for_a_large_value_is_not_large():
    with pytest.raises(CodecError) as caught:
        Coder("json").encode(["x" * 100_000, object()])
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["json", "msgpack", "arrow"])
@pytest.mark.parametrize("frames", [[], [b"1", b"2"], [b"\xc1"]], ids=str)
def test_bytes_that_cannot_be_decoded(name, frames):
    check_package(name)
    with pytest.raises(CodecError, match=f"the body cannot be read as {name}"):
        Coder(name).decode(frames)


def test_json_that_is_too_deep():
    with pytest.raises(CodecError):
        Coder("json").decode([b"[" * 100_000])


class Own:
    """A codec of one's own."""

    def __init__(self, frames):
        self.frames = frames

    def encode(self, value):
        return self.frames

    def decode(self, frames):
        return frames


@pytest.mark.parametrize(
    ("made", "frames"),
    [([b"x", bytearray(b"y")], [b"x", b"y"]), ((memoryview(b"x"),), [b"x"]), ([], [b""])],
)
def test_a_custom_codec(made, frames):
    coder = Coder(Own(made))
    assert coder.name == "Own"
    assert coder.encode("value") == frames
    assert coder.decode([b"x"]) == [b"x"]


@pytest.mark.parametrize("made", [b"bytes", "text", None, ["text"], {b"x"}, 3])
def test_a_codec_must_return_frames(made):
    with pytest.raises(CodecError, match=r"Own.encode\(\) returned .*: expected a list of bytes"):
        Coder(Own(made)).encode("value")


@pytest.mark.parametrize("codec", ["pickle", "", None, 3, object(), b"json"])
def test_an_invalid_codec_is_rejected(codec):
    with pytest.raises(SettingError, match="it must be one of json, msgpack, arrow, or an object with encode"):
        Coder(codec)


@pytest.mark.parametrize(("name", "module"), [("msgpack", "msgpack"), ("arrow", "pyarrow")])
def test_a_package_that_is_not_installed(monkeypatch, name, module):
    monkeypatch.setattr(codecs, "_made", {})
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingError, match=re.escape(f"codec '{name}' needs a package: {install_command(name)}")):
        Coder(name)
