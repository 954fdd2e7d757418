"""A Flux client over a UNIX socket, written from RFC 3 and not with the gateway's codec."""

import json
import socket
import struct
from dataclasses import dataclass

from support.processes import TIMEOUT_SECONDS

MAGIC = 0xFFEE0012
ANY = 0xFFFFFFFF
REQUEST, RESPONSE, EVENT, CONTROL = 1, 2, 4, 8
TOPIC, PAYLOAD, NORESPONSE, ROUTE, UPSTREAM, PRIVATE, STREAMING = 1, 2, 4, 8, 16, 32, 64
HEADER = struct.Struct(">BBBBIIII")


@dataclass(frozen=True)
class Message:
    """A message: `a` and `b` are the last two fields of its header."""

    type: int
    topic: bytes | None = None
    payload: bytes | None = None
    flags: int = 0
    """Besides those of topic, payload and route."""
    a: int = 0
    b: int = 0
    userid: int = ANY
    rolemask: int = 0
    routes: tuple[bytes, ...] | None = ()

    @property
    def json(self):
        """The payload, which must be JSON with a NUL at its end."""
        assert self.payload is not None
        assert self.payload.endswith(b"\0"), self
        return json.loads(self.payload[:-1])

    @property
    def text(self):
        """The payload, which must be a text with a NUL at its end, or be missing."""
        assert self.payload is None or self.payload.endswith(b"\0"), self
        return "" if self.payload is None else self.payload[:-1].decode()


def packed(value):
    """JSON as a payload; bytes and None as they are."""
    return value if value is None or isinstance(value, bytes) else json.dumps(value).encode() + b"\0"


def encode(message, order="<"):
    """The bytes of a message on the socket."""
    flags, parts = message.flags, []
    if message.routes is not None:
        flags |= ROUTE
        parts += [*message.routes, b""]
    if message.topic is not None:
        flags |= TOPIC
        parts.append(message.topic)
    if message.payload is not None:
        flags |= PAYLOAD
        parts.append(message.payload)
    parts.append(HEADER.pack(0x8E, 1, message.type, flags, message.userid, message.rolemask, message.a, message.b))
    body = b"".join(
        (bytes([len(part)]) if len(part) < 255 else b"\xff" + struct.pack(">I", len(part))) + part for part in parts
    )
    return struct.pack(f"{order}I", MAGIC) + struct.pack(">I", len(body)) + body


def decode(body):
    """The message in the bytes after the prefix."""
    parts = []
    while body:
        size, at = body[0], 1
        if size == 255:
            size, at = struct.unpack_from(">I", body, 1)[0], 5
        parts.append(body[at : at + size])
        assert len(parts[-1]) == size
        body = body[at + size :]
    magic, version, kind, flags, userid, rolemask, a, b = HEADER.unpack(parts.pop())
    assert (magic, version) == (0x8E, 1)
    routes = None
    if flags & ROUTE:
        end = parts.index(b"")
        routes, parts = tuple(parts[:end]), parts[end + 1 :]
    topic = parts.pop(0) if flags & TOPIC else None
    payload = parts.pop(0) if flags & PAYLOAD else None
    assert not parts
    return Message(kind, topic, payload, flags & ~(TOPIC | PAYLOAD | ROUTE), a, b, userid, rolemask, routes)


class FluxClient:
    """A connection to a gateway.  It takes every message in the order in which it arrives."""

    def __init__(self, path, order="<"):
        self.order = order
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(TIMEOUT_SECONDS)
        self.socket.connect(str(path))
        self.errno = self.read(1)[0]
        self._tag = 0

    def __enter__(self):
        assert self.errno == 0
        return self

    def __exit__(self, *_):
        self.socket.close()

    def read(self, count):
        """So many bytes; fails at the end of the stream."""
        data = bytearray()
        while len(data) < count:
            piece = self.socket.recv(count - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def ends(self):
        """Wait until the gateway closes the connection; return whether it has sent nothing before."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def send(self, message):
        self.socket.sendall(encode(message, self.order))

    def receive(self):
        """The next message."""
        magic, length = self.read(4), self.read(4)
        assert struct.unpack(f"{self.order}I", magic)[0] == MAGIC
        return decode(self.read(struct.unpack(">I", length)[0]))

    def request(self, topic, payload=None, *, nodeid=ANY, tag=None, flags=0, routes=()):
        """Send a request; return its matchtag."""
        if tag is None:
            self._tag = tag = self._tag + 1
        self.send(Message(REQUEST, topic.encode(), packed(payload), flags, nodeid, tag, routes=routes))
        return tag

    def rpc(self, topic, payload=None, **settings):
        """Send a request; return its response."""
        tag = self.request(topic, payload, **settings)
        response = self.receive()
        assert (response.type, response.topic, response.b) == (RESPONSE, topic.encode(), tag)
        return response

    def stream(self, topic, payload=None, **settings):
        """Send a streaming request; return all its responses, the last of which has an errno."""
        tag = self.request(topic, payload, flags=STREAMING, **settings)
        responses = []
        while not responses or not responses[-1].a:
            responses.append(self.receive())
            assert (responses[-1].topic, responses[-1].b) == (topic.encode(), tag)
            assert responses[-1].flags & STREAMING
        return responses

    def respond(self, request, payload=None, errnum=0):
        """Respond to a request that this client, as a service, has received."""
        flags = request.flags & STREAMING
        self.send(
            Message(RESPONSE, request.topic, packed(payload), flags, errnum, request.b, routes=request.routes)
        )  # fmt: skip
