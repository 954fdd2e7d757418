"""Waking a thread that polls."""

import select

from zmdp.mdp.transport.wake import Wake


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
