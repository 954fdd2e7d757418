"""Fuzz the Flux codec: any bytes decode to what the grammar says, or to a reason, and nothing raises."""

import struct
from random import Random

from zmdp.interop.flux.wire import framing, messages
from zmdp.interop.flux.wire.messages import (
    CMB1,
    RFC3,
    Control,
    Event,
    FluxRequest,
    Invalid,
    Keepalive,
    Response,
)

INTERESTING = [0, 1, 2, 5, 38, 61, 254, 255, 256, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF]
TOPICS = ["echo.say", "echo.say", "attr.get", "x", ".", "a..b", "größe.x", "a b", "x" * 254, "x" * 255, "x" * 1024]
PAYLOADS = [None, None, b"", b"\0", b'{"x":1}\0', b"\xff" * 20, bytes(254), bytes(255), bytes(300)]
ROUTES = [b"a", b"0123-4567", b"\xff\xfe", b"x" * 255]
PARTS = [b"", b"", b"a", b"\0", b"a\0b", b"\xff", b"x" * 255, b"x" * 256, b"x" * 1024, b"x" * 1025, bytes(20)]
MAX_MESSAGE = 4000
MEANINGFUL = {1: 0xDF, 2: 0xDB, 4: 0xAB, 8: 0x80}
"""The flags that decoding keeps, by type of message."""


# ── what a peer may send ─────────────────────────────────────────────────────────────────────────────────────────────


def integer(random: Random) -> int:
    return random.choice(INTERESTING) if random.random() < 0.5 else random.getrandbits(32)


def flag(random: Random) -> bool:
    return random.random() < 0.3


def value_of(random: Random) -> messages.Message:
    """Return a message of any type; valid in one dialect at least, except for a few topics, nodeids and routes."""
    kind = random.randrange(8)
    sender = {"userid": integer(random), "rolemask": integer(random)}
    if kind == 0:
        return Control(integer(random), integer(random), **sender, user1=flag(random))
    if kind == 1:
        return Keepalive(integer(random), integer(random), **sender)
    topic, payload = random.choice(TOPICS), random.choice(PAYLOADS)
    if kind == 2:
        routes = random.choice([None, None, (), (b"a", b"b")])
        return Event(topic, payload, integer(random), routes, **sender, private=flag(random), user1=flag(random))
    depth = random.choice([0, 0, 0, 1, 2, 5, *([255, 256, 257] if random.random() < 0.02 else [])])
    routes = None if random.random() < 0.1 else tuple(random.choice(ROUTES) for _ in range(depth))
    flags = {"streaming": flag(random), "upstream": flag(random), "user1": flag(random)}
    if kind < 5:
        return Response(topic, payload, integer(random), integer(random), routes, **sender, **flags)
    noresponse = not flags["streaming"] and flag(random)
    return FluxRequest(
        topic, payload, integer(random), integer(random), routes, **sender, **flags, noresponse=noresponse
    )


def mutated(random: Random, data: bytes) -> bytes:
    """Return `data` with an error somewhere."""
    at = random.randrange(len(data) + 1)
    size = random.choice([1, 1, 2, 4])
    kind = random.randrange(6)
    if kind == 0:
        return data[:at]  # truncated
    if kind == 1:
        return data[:at] + data[at + size :]
    if kind == 2:
        return data[:at] + random.randbytes(size) + data[at:]
    if kind == 3 and at < len(data):
        return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
    if kind == 4:
        return data[:at] + (integer(random) % (1 << 8 * size)).to_bytes(size, "big") + data[at + size :]
    return data[:at] + random.randbytes(size) + data[at + size :]


def mutated_parts(random: Random, parts: list[bytes]) -> list[bytes]:
    """Return `parts` with an error somewhere, most often in the header."""
    parts = list(parts)
    at = random.randrange(len(parts))
    kind = random.randrange(5)
    if at == len(parts) - 1 and random.random() < 0.9:  # else most headers had a wrong size, and nothing else counted
        kind = 3
    if kind == 0:
        del parts[at]
    elif kind == 1:
        parts.insert(at, random.choice([*PARTS, parts[at]]))
    elif kind == 2:
        parts[at] = random.choice(PARTS)
    elif kind == 3 and len(parts[-1]) == 20:  # another type, or a flag
        header = bytearray(parts[-1])
        if random.random() < 0.3:
            header[2] = random.choice([1, 2, 4, 8, 0, 3, 16, 255])
        else:
            header[3] ^= 1 << random.randrange(8)
        parts[-1] = bytes(header)
    else:
        parts[at] = mutated(random, parts[at])
    return parts or [b""]


def pieces_of(random: Random, data: bytes) -> list[bytes]:
    """Return `data` divided as a socket may deliver it."""
    size = random.choice([1, 3, 7, 8, 9, 64, 1 << 20]) if len(data) < 2000 else random.choice([100, 1 << 20])
    return [data[at : at + size] for at in range(0, len(data), size)]


# ── what must come of it, read from the grammar ──────────────────────────────────────────────────────────────────────


def is_message(parts: list[bytes], dialect: str) -> bool:
    """Return whether RFC 3, or CMB1, and the limits of the codec allow a message of these parts."""
    header = parts[-1] if parts else b""
    if len(header) != 20 or header[:2] != b"\x8e\x01" or header[2] not in {1, 2, 4, 8}:
        return False
    kind, flags = header[2], header[3]
    if dialect == CMB1 and flags & 0x80:
        return False
    if kind == 8:
        return flags & 0x0B == 0 and len(parts) == 1
    rest = parts[:-1]
    if flags & 8:
        if b"" not in rest:
            return False
        at = rest.index(b"")
        routes, rest = rest[:at], rest[at + 1 :]
        if len(routes) > 256 or any(len(route) > 255 or (dialect == RFC3 and 0 in route) for route in routes):
            return False
    if len(rest) != 1 + bool(flags & 2) or not flags & 1 or not 1 <= len(rest[0]) <= 1024:
        return False
    topic = rest[0].decode(errors="replace")
    if dialect == CMB1 and not (topic.isascii() and f"{topic}0".replace(".", "").isalnum()):
        return False
    if "\0" in topic or topic.encode() != rest[0]:
        return False
    if dialect == RFC3 and kind != 4 and not flags & 8:
        return False
    if kind == 1:
        return flags & 0x44 != 0x44 and not (dialect == CMB1 and header[12:16] == b"\xff\xff\xff\xfe")
    return kind == 2 or header[16:] == bytes(4)


def messages_in(data: bytes, max_parts: int) -> tuple[list[list[bytes]], bool]:
    """Return the messages at the beginning of a stream, and whether it continues with something else."""
    found: list[list[bytes]] = []
    while data:
        if not any(data[:4] == magic[: len(data)] for magic in (b"\xff\xee\0\x12", b"\x12\0\xee\xff")):
            return found, True
        if len(data) < 8:
            break
        length = struct.unpack(">I", data[4:8])[0]
        if not 1 <= length <= MAX_MESSAGE:
            return found, True
        if len(data) < 8 + length:
            break
        inside, data = data[8 : 8 + length], data[8 + length :]
        parts = []
        while inside:
            size, inside = inside[0], inside[1:]
            if size == 255:
                if len(inside) < 4:
                    return found, True
                size, inside = struct.unpack(">I", inside[:4])[0], inside[4:]
            if len(inside) < size or len(parts) == max_parts:
                return found, True
            parts.append(inside[:size])
            inside = inside[size:]
        found.append(parts)
    return found, False


def without_ignored_flags(parts: list[bytes]) -> list[bytes]:
    header = parts[-1]
    return [*parts[:-1], header[:3] + bytes([header[3] & MEANINGFUL[header[2]]]) + header[4:]]


def check_parts(parts: list[bytes]) -> list[messages.Message | Invalid]:
    """Return what `parts` are in each dialect.  Raises `AssertionError` if a rule is broken."""
    decoded = []
    for dialect in (RFC3, CMB1):
        message = messages.decode(parts, dialect)
        assert isinstance(message, Invalid) != is_message(parts, dialect), (dialect, parts, message)
        if not isinstance(message, Invalid):
            again = messages.encode(message)
            assert again == without_ignored_flags(parts), (dialect, parts, message)
            assert messages.decode(again, dialect) == message, (dialect, parts, message)
        decoded.append(message)
    return decoded


def check_stream(pieces: list[bytes], max_parts: int) -> list[list[bytes]]:
    """Return the messages in a stream.  Raises `AssertionError` if they are not those that the framing says."""
    decoder = framing.Decoder(MAX_MESSAGE, max_parts)
    found, invalid = [], False
    for piece in pieces:
        decoder.feed(piece)
        while isinstance(parts := decoder.next(), list):
            found.append(parts)
        invalid = parts is not None
        assert decoder.next() == parts
    assert (found, invalid) == messages_in(b"".join(pieces), max_parts), pieces
    arrived = sum(map(len, pieces))
    assert decoder.buffered <= arrived
    return found


def fuzz(seed: int) -> list[messages.Message | Invalid]:
    """Decode the messages of `seed`, mutated as parts and as a stream, and return the results."""
    random = Random(seed)
    parts = messages.encode(value_of(random))
    for _ in range(random.choice([0, 1, 1, 2, 5])):
        parts = mutated_parts(random, parts)
    decoded = check_parts(parts)
    stream = framing.encode(parts, random.choice(["big", "little"]))
    stream *= random.choice([1, 1, 3]) if len(stream) < 500 else 1
    if random.random() < 0.7:
        stream = mutated(random, stream)
    for parts in check_stream(pieces_of(random, stream), random.choice([3, 260])):
        decoded += check_parts(parts)
    return decoded
