"""Offer the service `shout` in X1 (docs/reference/x1.md).  Needs pyzmq, not zmdp."""

import signal
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import zmq

BROKER, SERVICE, CREDIT = (*sys.argv[1:], "tcp://127.0.0.1:5555")[0], b"shout", 4
INTERVAL, LIVENESS = 1.0, 5  # seconds between heartbeats; silent intervals until a peer is dead
READY, REQUEST, FINAL, DISCONNECT, ERROR = 1, 2, 4, 6, 7
ATTACHED = 0xFFFFFFFF


def handle(body):
    if body == [b""]:
        raise ValueError("nothing to shout")
    return [frame.upper() for frame in body]


def pack_body(frames):
    return struct.pack(">H", len(frames)) + b"".join(struct.pack(">I", len(each)) + each for each in frames)


def read_body(data, at, attachments):
    (count,), at, frames = struct.unpack_from(">H", data, at), at + 2, []
    for _ in range(count):
        (size,), at = struct.unpack_from(">I", data, at), at + 4
        frames.append(next(attachments) if size == ATTACHED else data[at : at + size])
        at += 0 if size == ATTACHED else size
    return frames


def records(data):
    """Yield command, id and fields of each record."""
    at = 0
    while at < len(data):
        size, command, number = struct.unpack_from(">IBQ", data, at)
        yield command, number, data[at + 13 : at + 4 + size]
        at += 4 + size


def work(context, address, body):  # in a thread of the pool
    try:
        command, fields = FINAL, pack_body(handle(body))
    except Exception as error:
        text = f"{type(error).__name__}: {error}".encode()
        command, fields = ERROR, struct.pack(f">HHBH{len(text)}sH", 500, 0, 0, len(text), text, 0)
    with context.socket(zmq.PUSH) as results:
        results.connect("inproc://results")
        results.send_multipart([b"%d" % command, b"%d" % address, fields])


def serve(context, pool, results, stopping):
    """Serve over one connection, until the broker ends it or falls silent."""
    broker = context.socket(zmq.DEALER)
    broker.linger = 0
    broker.connect(BROKER)

    def send(command=None, number=0, fields=b""):  # without a command, a HEARTBEAT
        record = [] if command is None else [b"\x09", struct.pack(">IBQ", 9 + len(fields), command, number) + fields]
        broker.send_multipart([b"", b"MDPWX1", *record])
        return time.monotonic()

    heard = sent = send(READY, 0, struct.pack(f">IB{len(SERVICE)}sH", CREDIT, len(SERVICE), SERVICE, 0))
    held, leaving = set(), False
    while time.monotonic() < heard + INTERVAL * LIVENESS:
        if stopping and not leaving:
            leaving, sent = True, send(DISCONNECT)  # no more requests
        elif time.monotonic() >= sent + INTERVAL:
            sent = send()
        readable, _, _ = zmq.select([broker, results], [], [], INTERVAL)
        if results in readable:
            command, address, fields = results.recv_multipart()
            if int(address) in held:  # else it belongs to an earlier connection
                held.remove(int(address))
                sent = send(int(command), int(address), fields)
        if broker in readable:
            (_, _, *frames), heard = broker.recv_multipart(), time.monotonic()
            attachments = iter(frames[2:])
            for command, address, fields in records(frames[1] if frames else b""):
                if command == DISCONNECT:
                    broker.close()
                    return
                if command == REQUEST:
                    (options,) = struct.unpack_from(">H", fields, 5)
                    held.add(address)
                    pool.submit(work, context, address, read_body(fields, 7 + options, attachments))
    broker.close()


context, pool, stopping = zmq.Context(), ThreadPoolExecutor(CREDIT), []
results = context.socket(zmq.PULL)
results.bind("inproc://results")
signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
while not stopping:
    serve(context, pool, results, stopping)
