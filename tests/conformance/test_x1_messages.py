"""X1's messages, packed by hand: their bytes in all four directions, attachments, and how much one may hold."""

import struct
from collections import deque

import pytest
from support.peers import Bench, body_of, ready_of, record, records_of, request_of, take_body

CLIENT = [b"", b"MDPCX1", b"\x09"]
WORKER = [b"", b"MDPWX1", b"\x09"]


# ── the bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_layouts_of_x1(bench: Bench) -> None:
    client, worker = bench.peer(), bench.peer()
    # READY: size 9+4+1+4+2+2, command 1, id 0, credit 2, service, options
    worker.send(*WORKER, b"\0\0\0\x16\x01\0\0\0\0\0\0\0\0\0\0\0\x02\x04echo\0\x02{}")
    worker.sync()
    # REQUEST: size 9+4+1+4+2+7+2+4+5+4, command 1, number, ttl 0, service, options, two frames
    client.send(
        *CLIENT,
        b"\0\0\0\x2a" b"\x01" b"\0\0\0\0\0\0\0\x07" b"\0\0\0\0" b"\x04echo" b'\0\x07{"a":1}'
        b"\0\x02" b"\0\0\0\x05hello" b"\0\0\0\0",
    )  # fmt: skip
    message = worker.recv()
    address = message[3][5:13]
    # REQUEST to a worker: size 9+4+1+2+7+2+4+5+4, command 2, address, ttl 0, attempt 1, options, two frames
    assert message == [
        *WORKER,
        b"\0\0\0\x26" b"\x02" + address + b"\0\0\0\0" b"\x01" b'\0\x07{"a":1}'
        b"\0\x02" b"\0\0\0\x05hello" b"\0\0\0\0",
    ]  # fmt: skip
    # PARTIAL and FINAL, from the worker with commands 3 and 4, to the client with 2 and 3
    worker.send(*WORKER, b"\0\0\0\x13\x03" + address + b"\0\x01\0\0\0\x04half")
    assert client.recv() == [*CLIENT, b"\0\0\0\x13\x02\0\0\0\0\0\0\0\x07\0\x01\0\0\0\x04half"]
    worker.send(*WORKER, b"\0\0\0\x14\x04" + address + b"\0\x01\0\0\0\x05world")
    assert client.recv() == [*CLIENT, b"\0\0\0\x14\x03\0\0\0\0\0\0\0\x07\0\x01\0\0\0\x05world"]
    # ERROR: a code, the workers that were lost, a reason of the broker, a text, and a body that is the detail, if there
    # is one; here 422, from a worker with command 7
    client.send(*CLIENT, request_of(8, b"echo", b"again"))
    address = worker.recv()[3][5:13]
    worker.send(*WORKER, b"\0\0\0\x19\x07" + address + b"\x01\xa6\0\0\0\0\x07no good\0\0")
    assert client.recv() == [*CLIENT, b"\0\0\0\x19\x04\0\0\0\0\0\0\0\x08\x01\xa6\0\0\0\0\x07no good\0\0"]
    # CANCEL: nothing but the id, from a client with command 5, to a worker with 8
    client.send(*CLIENT, request_of(9, b"echo", b"once more"))
    address = worker.recv()[3][5:13]
    client.send(*CLIENT, b"\0\0\0\x09\x05\0\0\0\0\0\0\0\x09")
    assert client.recv() == [
        *CLIENT, b"\0\0\0\x24" b"\x04" b"\0\0\0\0\0\0\0\x09" b"\x01\xf3" b"\0\0" b"\x09cancelled"
        b"\0\x09cancelled" b"\0\0"
    ]  # fmt: skip
    assert worker.recv() == [*WORKER, b"\0\0\0\x09\x08" + address]
    # CREDIT and RELEASE, with commands 0A and 0B
    worker.send(*WORKER, b"\0\0\0\x0d\x0a\0\0\0\0\0\0\0\0\0\0\0\0")
    worker.send(*WORKER, b"\0\0\0\x09\x0b" + address)
    worker.nothing()
    # HEARTBEAT: nothing but the header
    client.send(b"", b"MDPCX1")
    assert client.recv() == [b"", b"MDPCX1"]
    worker.send(b"", b"MDPWX1")
    # LIMITS: command 6, id 0, and from the broker the most bytes and frames of a body
    client.send(*CLIENT, b"\0\0\0\x09\x06\0\0\0\0\0\0\0\0")
    assert client.recv() == [
        *CLIENT, b"\0\0\0\x15" b"\x06" b"\0\0\0\0\0\0\0\0" b"\0\0\0\0\x04\0\0\0" b"\0\0\x04\0"
    ]  # fmt: skip
    # DISCONNECT: command 6, id 0, and a text, which may be empty
    worker.send(*WORKER, b"\0\0\0\x10\x06\0\0\0\0\0\0\0\0goodbye")
    assert worker.recv() == [*WORKER, b"\0\0\0\x09\x06\0\0\0\0\0\0\0\0"]
    worker.nothing()
    assert bench.stats()["invalid"] == {}


def test_x1_works_without_the_empty_frame(bench: Bench) -> None:
    # which only proxies need
    client, worker = bench.peer(), bench.peer()
    worker.send(b"MDPWX1", b"\x09", ready_of(b"echo", 1))
    worker.sync()
    client.send(b"MDPCX1", b"\x09", request_of(1, b"echo", b"hello"))
    message = worker.recv()
    assert message[:2] == [b"MDPWX1", b"\x09"]
    ((_, address, _),) = records_of(message, 0)
    worker.send(b"MDPWX1", b"\x09", record(4, address, body_of(b"world")))
    assert client.recv() == [b"MDPCX1", b"\x09", record(3, 1, body_of(b"world"))]


def test_each_record_is_a_command_of_its_own(bench: Bench) -> None:
    client, worker = bench.x1_client(), bench.x1_worker(b"echo", credit=3)
    client.say(
        request_of(1, b"echo", b"one"),
        request_of(2, b"nobody", b"two", options=b'{"wait":false}'),
        request_of(3, b"echo", b"three"),
        record(5, 3),
        request_of(4, b"mmi.service", b"echo"),
        request_of(5, b"echo", b"five", ttl=60_000),
    )
    client.error(b"404", number=2)
    client.error(b"499", number=3)  # it never went to the worker
    client.final(b"mmi.service", b"200", number=4)
    first = worker.work(b"one")
    last, ttl, attempt, options, body = worker.told()
    assert (0 < ttl <= 60_000, attempt, options, body) == (True, 1, b"", [b"five"])
    worker.say(
        record(3, int(first), body_of(b"begun")),
        record(10, 0, struct.pack(">I", 1)),
        record(11, int(last)),
        record(4, int(first), body_of(b"done")),
    )
    client.partial(b"echo", b"begun", number=1)
    client.final(b"echo", b"done", number=1)
    assert worker.told()[4] == [b"five"]
    worker.nothing()
    client.nothing()


# ── large frames ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [8191, 8192, 8193, 65_535, 65_536, 1_000_000])
def test_large_frames_are_attachments(bench: Bench, size: int) -> None:
    client, worker = bench.peer(), bench.peer()
    worker.send(*WORKER, ready_of(b"echo", 1))
    worker.sync()
    large, other = b"x" * size, b"y" * (size + 1)
    client.send(*CLIENT, request_of(1, b"echo", b"small", None, b"", None), large, other)
    message = worker.recv()
    attached = [large] if size >= 8192 else []
    attached += [other] if size + 1 >= 8192 else []
    assert message[4:] == attached
    ((command, address, rest),) = records_of(message, 1)
    assert command == 2
    assert take_body(rest[7:], deque(attached)) == [b"small", large, b"", other]
    # a small frame may be attached as well, and a large one be in the record
    worker.send(*WORKER, record(4, address, body_of(None, large, None)), b"small", b"")
    message = client.recv()
    assert message[:3] == CLIENT
    assert message[4:] == ([large] if size >= 8192 else [])
    assert message[3] == record(3, 1, body_of(b"small", None if size >= 8192 else large, b""))


# ── how much the broker says in one message ──────────────────────────────────────────────────────────────────────────
