"""Whole columns of bodies are packed and unpacked as titanic/api/submission.py does with single ones."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from zmdp.titanic.api.submission import pack
from zmdp.titanic.contrib.arrow.packing import UUID_BYTES, binary, hexadecimal, pack_bodies, unpack_bodies

FRAMES = pa.list_(pa.binary())
bodies = st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=3), max_size=8)


def stored(values):
    return pa.array([None if frames is None else pack(frames) for frames in values], pa.binary())


@given(bodies, st.integers(0, 3))
def test_lists_of_frames(values, start):
    packed = pack_bodies(pa.array(values, FRAMES).slice(start))
    assert packed.to_pylist() == [pack(frames) for frames in values[start:]]
    assert unpack_bodies(packed, FRAMES).to_pylist() == values[start:]
    assert unpack_bodies(stored(values).slice(start), FRAMES).to_pylist() == values[start:]


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(0, 3))
def test_single_frames(values, start):
    packed = pack_bodies(pa.array(values, pa.binary()).slice(start))
    assert packed.to_pylist() == [pack([frame]) for frame in values[start:]]
    assert unpack_bodies(packed, pa.binary()).to_pylist() == values[start:]


@given(st.lists(st.one_of(st.none(), st.lists(st.binary(max_size=20), max_size=2)), max_size=8), st.integers(0, 3))
def test_replies_may_be_missing_or_have_no_frames(values, start):
    replies = stored(values).slice(start)
    values = values[start:]
    firsts = [frames[0] if frames else None for frames in values]
    assert unpack_bodies(replies, FRAMES).to_pylist() == values
    assert unpack_bodies(replies, pa.binary()).to_pylist() == firsts
    texts = [None if first is None else first.decode(errors="replace") for first in firsts]
    assert unpack_bodies(replies, pa.string()).to_pylist() == texts


@given(st.lists(st.text(max_size=20), max_size=8))
def test_text(values):
    packed = pack_bodies(pa.array(values, pa.string()))
    assert packed.to_pylist() == [pack([text.encode()]) for text in values]
    assert unpack_bodies(packed, pa.string()).to_pylist() == values


def test_hexadecimal_digits():
    data = bytes(range(3 * UUID_BYTES))
    assert hexadecimal(binary(data, UUID_BYTES).slice(1), UUID_BYTES).to_pylist() == [
        data[16:32].hex(),
        data[32:].hex(),
    ]
