"""How much of a message has arrived."""

import pytest
from websockets.frames import Frame, Opcode

from zmdp.mdp.http.frames import FRAGMENT_BYTES, MAX_CONTROL, MAX_FRAGMENTS, FrameCounter


def frame(data=b"", opcode=Opcode.TEXT, fin=True):
    return Frame(opcode, data, fin).serialize(mask=True)


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536])
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_a_message_in_any_pieces(size, step):
    counter = FrameCounter()
    data = frame(b"x" * size, fin=False) + frame(b"between", Opcode.PING) + frame(b"y" * size, Opcode.CONT)
    for at in range(0, len(data), step):
        assert counter.feed(data[at : at + step])
    assert (counter.unfinished, counter.held) == (0, 2 * (size + FRAGMENT_BYTES))
    counter.take()
    assert counter.held == 0


def test_an_unfinished_message():
    counter = FrameCounter()
    counter.feed(frame(b"first") + frame(b"x" * 100)[:-40])
    assert counter.unfinished == 60 + FRAGMENT_BYTES
    counter.take()
    assert counter.held == counter.unfinished


def test_too_many_frames():
    assert FrameCounter().feed(frame() * 10 * MAX_FRAGMENTS)
    assert not FrameCounter().feed(frame(fin=False) + frame(b"x", Opcode.CONT, fin=False) * MAX_FRAGMENTS + b"x")
    counter = FrameCounter()
    assert all(counter.feed(frame(b"", Opcode.PING)) for _ in range(2 * MAX_CONTROL))
    assert not counter.feed(frame(b"", Opcode.PING) * (MAX_CONTROL + 2))
