"""Waking a thread that polls."""

import os
import select

import pytest

from zmdp.mdp.transport.polling import Wake


@pytest.fixture(params=["eventfd", "sockets"], autouse=True)
def kind(request, monkeypatch):
    if request.param == "sockets":
        monkeypatch.delattr(os, "eventfd", raising=False)


def test_a_poll_is_interrupted_once_however_often_it_was_woken():
    wake = Wake()
    poller = select.poll()
    poller.register(wake.descriptor, select.POLLIN)
    assert poller.poll(0) == []
    for _ in range(3):
        wake.wake()
    assert poller.poll() == [(wake.descriptor, select.POLLIN)]
    wake.clear()
    assert poller.poll(0) == []
    wake.clear()
    wake.close()


def test_waking_does_not_block_or_raise_when_nobody_polls():
    wake = Wake()
    for _ in range(100_000):
        wake.wake()
    wake.close()
    wake.wake()
    wake.clear()


def test_once_closed_it_touches_no_file_that_has_got_its_descriptor():
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    wake = Wake()
    wake.close()
    os.dup2(writing, wake.descriptor)
    try:
        wake.wake()
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
    finally:
        for each in (reading, writing, wake.descriptor):
            os.close(each)
