"""What has come and has not been taken."""

import sys
import threading

import pytest

from zmdp.clients.inbox import MAX_UNREAD_BYTES, Inbox
from zmdp.clients.reply import Reply
from zmdp.mdp.errors import StreamInterrupted


@pytest.fixture
def _many_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_many_switches")
def test_what_was_taken_does_not_count_whichever_threads_come_and_take():
    inbox, parts = Inbox(), [Reply([b"x" * 1000], service="s", final=False)] * 100_000

    def come():
        for part in parts:
            inbox.add(part)

    coming = threading.Thread(target=come)
    coming.start()
    taken = 0
    while taken < len(parts):
        if inbox:
            inbox.take()
            taken += 1
    coming.join()
    largest = Reply([b"x" * (MAX_UNREAD_BYTES - 1000)], service="s", final=False)
    assert inbox.add(largest)
    assert inbox.take() is largest  # and not an error, because so much had come before


def test_more_than_may_wait_is_an_error_after_what_came_before():
    inbox = Inbox()
    part = Reply([b"x" * (MAX_UNREAD_BYTES // 2)], service="s", final=False)
    assert [inbox.add(part) for _ in range(3)] == [True, True, False]
    assert inbox.take() is part
    with pytest.raises(StreamInterrupted, match="arrives faster than it is read"):
        inbox.take()
