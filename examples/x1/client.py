"""Call the service `shout` in X1 (docs/reference/x1.md).  Needs pyzmq, not zmdp."""

import itertools
import json
import struct
import sys
import time
from contextlib import suppress

import zmq

BROKER = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5555"
INTERVAL, LIVENESS = 1.0, 5  # as in the worker
REQUEST, PARTIAL, FINAL, ERROR = 1, 2, 3, 4
ATTACHED = 0xFFFFFFFF


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


class Client:
    """Sends any number of requests over one connection, and replaces it if the broker is silent."""

    def __init__(self):
        self.context, self.numbers = zmq.Context(), itertools.count(1)
        self.outstanding, self.streamed = {}, set()
        self.connect()

    def connect(self):
        self.broker = self.context.socket(zmq.DEALER)
        self.broker.linger = self.broker.sndtimeo = 0
        self.broker.reconnect_ivl = -1  # libzmq would reconnect silently and lose the requests
        self.broker.connect(BROKER)
        self.heard = time.monotonic()
        if self.outstanding:
            self.send(*self.outstanding.values())

    def send(self, *records):  # without records, a HEARTBEAT
        with suppress(zmq.Again):  # the connection has ended; the silence will show it
            self.broker.send_multipart([b"", b"MDPCX1", *([b"\x09", b"".join(records)] if records else [])])

    def request(self, service, *body, ttl=0, **options):
        number = next(self.numbers)
        raw = json.dumps(options).encode() if options else b""
        fields = struct.pack(">IB", ttl, len(service)) + service + struct.pack(">H", len(raw)) + raw
        fields += struct.pack(">H", len(body)) + b"".join(struct.pack(">I", len(each)) + each for each in body)
        self.outstanding[number] = struct.pack(">IBQ", 9 + len(fields), REQUEST, number) + fields
        self.send(self.outstanding[number])

    def replies(self):
        """Yield number, command and frames of each reply, until all requests have ended."""
        while self.outstanding:
            if self.broker.poll(INTERVAL * 1000):
                (_, _, *frames), self.heard = self.broker.recv_multipart(), time.monotonic()
                attachments = iter(frames[2:])
                for command, number, fields in records(frames[1] if frames else b""):
                    if number in self.outstanding:
                        yield number, command, self.read(command, number, fields, attachments)
            elif time.monotonic() < self.heard + INTERVAL * LIVENESS:
                self.send()
            else:
                self.broker.close()
                for number in self.streamed & self.outstanding.keys():  # cannot be repeated
                    del self.outstanding[number]
                    yield number, ERROR, [b"502", b"the stream was interrupted"]
                self.connect()

    def read(self, command, number, fields, attachments):
        self.streamed.add(number)
        if command != PARTIAL:
            del self.outstanding[number]
        if command != ERROR:
            return read_body(fields, 0, attachments)
        code, _, named = struct.unpack_from(">HHB", fields)
        (size,), at = struct.unpack_from(">H", fields, 5 + named), 7 + named
        return [b"%d" % code, fields[at : at + size], *read_body(fields, at + size, attachments)]


client = Client()
client.request(b"shout", b"hello", b"world", ttl=30000)
client.request(b"shout", b"")
client.request(b"whisper", b"hello", wait=False)
for number, command, frames in client.replies():
    print(number, "ERROR" if command == ERROR else "reply", *frames)
