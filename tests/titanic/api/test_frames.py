"""Packing the frames of a body into one value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmdp.titanic.api.frames import pack, unpack

bodies = st.lists(st.binary(max_size=300), max_size=20)


@given(bodies)
def test_unpack_reverses_pack(frames):
    assert unpack(pack(frames)) == frames


@given(bodies, bodies)
def test_different_frames_are_packed_differently(one, other):
    assert (pack(one) == pack(other)) == (one == other)


@pytest.mark.parametrize(
    ("frames", "packed"),
    [
        ([], b""),
        ([b""], b"\0\0\0\0"),
        ([b"ab", b"", b"c"], b"\0\0\0\x02ab\0\0\0\0\0\0\0\x01c"),
        ([bytes(0x010203)], b"\x00\x01\x02\x03" + bytes(0x010203)),
    ],
    ids=["none", "one that is empty", "several", "a large one"],
)
def test_the_stored_format(frames, packed):
    assert pack(frames) == packed
    assert unpack(packed) == frames


@given(bodies.filter(bool), st.data())
def test_unpack_rejects_truncated_values(frames, data):
    packed = pack(frames)
    whole = {len(pack(frames[:number])) for number in range(len(frames))}
    at = data.draw(st.integers(0, len(packed) - 1).filter(lambda at: at not in whole))
    with pytest.raises(ValueError, match="truncated"):
        unpack(packed[:at])


@given(st.binary(max_size=60))
def test_unpack_returns_frames_or_raises(packed):
    try:
        frames = unpack(packed)
    except ValueError:
        return
    assert pack(frames) == packed
