"""C6 to C10 and a worker's part of C13: what a worker says, seen by a broker made by hand."""

import threading

from support.processes import TIMEOUT_SECONDS

from zmdp.workers import Worker

BEAT = 0.05
"""The heartbeat interval here, in seconds."""


def counting(request):
    yield b"1"
    yield [b"2", b"more"]
    return b"end"


def test_a_worker_sends_ready_once_then_heartbeats(router):  # C6, C7
    with Worker("echo", list, broker=router.endpoint, protocol="0.2", heartbeat=BEAT, liveness=1000):
        sender, *frames = router.recv()
        assert frames == [b"MDPW02", b"\x01", b"echo"]
        assert [router.recv() for _ in range(3)] == [[sender, b"MDPW02", b"\x05"]] * 3  # C13


def test_each_of_several_connections_is_a_worker_of_its_own(router):  # C6
    with Worker("echo", list, broker=router.endpoint, protocol="0.2", concurrency=3):
        assert len({router.command()[0] for _ in range(3)}) == 3


def test_a_function_sends_one_final(router):  # C8
    with Worker("echo", list, broker=router.endpoint, protocol="0.2"):
        sender, *_ = router.command()
        router.send(sender, b"MDPW02", b"\x02", b"\x00client", b"", b"a", b"b")
        assert router.command() == [sender, b"MDPW02", b"\x04", b"\x00client", b"", b"a", b"b"]


def test_a_generator_sends_partials_then_one_final(router):  # C8
    with Worker("count", counting, broker=router.endpoint, protocol="0.2"):
        sender, *_ = router.command()
        router.send(sender, b"MDPW02", b"\x02", b"c", b"", b"x")
        assert [router.command()[1:] for _ in range(3)] == [
            [b"MDPW02", b"\x03", b"c", b"", b"1"],
            [b"MDPW02", b"\x03", b"c", b"", b"2", b"more"],
            [b"MDPW02", b"\x04", b"c", b"", b"end"],
        ]


def test_on_disconnect_it_registers_again_on_a_new_connection(router):  # C9
    with Worker("echo", list, broker=router.endpoint, protocol="0.2"):
        first, *_ = router.command()
        router.send(first, b"MDPW02", b"\x05")
        router.send(first, b"MDPW02", b"\x06")
        second, *frames = router.command()
        assert (second != first, frames) == (True, [b"MDPW02", b"\x01", b"echo"])


def test_it_ends_with_disconnect(router):  # C10
    with Worker("echo", list, broker=router.endpoint, protocol="0.2"):
        sender, *_ = router.command()
    assert router.command() == [sender, b"MDPW02", b"\x06"]


def test_it_heartbeats_while_its_handler_runs(router):  # C13
    go_on = threading.Event()

    def slow(request):
        assert go_on.wait(TIMEOUT_SECONDS)
        return b"done"

    with Worker("slow", slow, broker=router.endpoint, protocol="0.2", heartbeat=BEAT, liveness=1000):
        sender, *_ = router.command()
        router.send(sender, b"MDPW02", b"\x02", b"c", b"", b"x")
        assert [router.recv() for _ in range(5)] == [[sender, b"MDPW02", b"\x05"]] * 5
        go_on.set()
        assert router.command()[1:] == [b"MDPW02", b"\x04", b"c", b"", b"done"]
