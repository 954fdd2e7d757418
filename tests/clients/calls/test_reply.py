"""The inbox: what has arrived and has not been taken, and its limit."""

import sys
import threading

import pytest

from zmdp.clients.calls.reply import MAX_UNREAD_BYTES, Inbox, Reply
from zmdp.mdp.errors import StreamInterrupted


@pytest.fixture
def _many_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_many_switches")
def test_only_unread_bytes_count_whichever_threads_add_and_take():
    inbox, parts = Inbox(), [Reply([b"x" * 1000], service="s", final=False)] * 100_000

    room = threading.Semaphore(10_000)  # parts that may be unread: a tenth of the limit, however busy the machine is

    def come():
        for part in parts:
            room.acquire()
            inbox.add(part)

    coming = threading.Thread(target=come)
    coming.start()
    taken = 0
    while taken < len(parts):
        if inbox:
            inbox.take()
            room.release()
            taken += 1
    coming.join()
    largest = Reply([b"x" * (MAX_UNREAD_BYTES - 1000)], service="s", final=False)
    assert inbox.add(largest)
    assert inbox.take() is largest  # and not an error, because so much had come before


def test_an_overflow_is_an_error_after_the_parts_before_it():
    inbox = Inbox()
    part = Reply([b"x" * (MAX_UNREAD_BYTES // 2)], service="s", final=False)
    assert [inbox.add(part) for _ in range(3)] == [True, True, False]
    assert inbox.take() is part
    with pytest.raises(StreamInterrupted, match="arrives faster than it is read"):
        inbox.take()
