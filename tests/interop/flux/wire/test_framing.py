"""The framing of Flux messages on a UNIX socket: genuine bytes, any division of them, and lengths that lie."""

import tracemalloc
from struct import pack

import fuzz_flux
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmdp.interop.flux.wire.framing import BIG, HOST_ORDER, LITTLE, PREFIX_SIZE, Decoder, encode
from zmdp.interop.flux.wire.messages import Invalid

HEADER = "14 8e01010bffffffff00000000ffffffff00000001"
REQUEST = [b"", b"attr.get", b'{"name":"rank"}\0', bytes.fromhex(HEADER)[1:]]
VECTORS = {
    "request": f"00 086563686f2e736179 087b2278223a317d00 {HEADER}",
    "response": "00 086563686f2e736179 087b2278223a317d00 148e01020b000003e8000000010000000000000001",
    "error": "00 066e6f70652e78 148e010209000003e8000000010000002600000001",
    "event of a client": "00 047a6d2e78 087b226e223a317d00 148e01040bffffffff000000000000000000000000",
    "end of a stream": "00 0a6563686f2e636f756e74 148e010249000003e8000000010000003d00000002",
}
"""What genuine programs send, without the magic and the length."""
FRAMED = bytes.fromhex(f"1200eeff 00000030 00 08617474722e676574 107b226e616d65223a2272616e6b227d00 {HEADER}")
SIZES = [0, 1, 254, 255, 256, 65536]


def stream_of(vector, order=LITTLE):
    body = bytes.fromhex(vector)
    return {LITTLE: b"\x12\0\xee\xff", BIG: b"\xff\xee\0\x12"}[order] + len(body).to_bytes(4, "big") + body


def read(*pieces, **limits):
    """Return what a decoder returns that is fed these pieces, until it returns None or something invalid."""
    decoder, found = Decoder(**limits), []
    for piece in pieces:
        decoder.feed(piece)
        while (parts := decoder.next()) is not None:
            found.append(parts)
            if isinstance(parts, Invalid):
                break
    return found


def singly(data):
    return [data[at : at + 1] for at in range(len(data))]


def framed(body, magic=b"\x12\0\xee\xff", length=None):
    return magic + (len(body) if length is None else length).to_bytes(4, "big") + body


# ── genuine bytes ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_genuine_framed_message_is_read_and_written_byte_by_byte():
    assert len(FRAMED) - PREFIX_SIZE == 0x30
    assert read(FRAMED) == [REQUEST]
    assert encode(REQUEST, LITTLE) == FRAMED
    assert encode(REQUEST, BIG) == b"\xff\xee\0\x12" + FRAMED[4:]


@pytest.mark.parametrize("order", [LITTLE, BIG])
@pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS.keys())
def test_genuine_parts_are_read_and_written_byte_by_byte(vector, order):
    stream = stream_of(vector, order)
    (parts,) = read(stream)
    assert encode(parts, order) == stream


@pytest.mark.parametrize("order", [LITTLE, BIG])
def test_the_order_of_the_magic_is_remembered(order):
    decoder = Decoder()
    assert decoder.order == HOST_ORDER
    decoder.feed(encode(REQUEST, order))
    assert decoder.next() == REQUEST
    assert decoder.order == order


# ── any division ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", SIZES)
def test_the_size_of_a_part_takes_four_more_bytes_from_255_on(size):
    stream = encode([bytes(size)], LITTLE)
    assert len(stream) == PREFIX_SIZE + (1 if size < 255 else 5) + size
    assert read(stream) == [[bytes(size)]]


def test_the_long_form_of_a_small_size_is_read_too():
    assert read(framed(b"\xff\0\0\0\x01a")) == [[b"a"]]


@given(st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=4), max_size=5), st.lists(st.integers(1, 400)))
def test_any_messages_survive_any_division(messages, sizes):
    stream, pieces = b"".join(map(encode, messages)), []
    for size in sizes:
        pieces.append(stream[:size])
        stream = stream[size:]
    assert read(*pieces, stream) == messages


def test_messages_may_be_taken_later_than_they_are_fed():
    decoder = Decoder()
    stream = encode([b"a"]) + encode([b"b", b"c"])
    for piece in singly(stream * 3):
        decoder.feed(piece)
    for _ in range(2):
        assert decoder.next() == [b"a"]
        decoder.feed(stream)
        assert decoder.next() == [b"b", b"c"]
    assert [decoder.next() for _ in range(7)] == [[b"a"], [b"b", b"c"]] * 3 + [None]


def test_parts_are_bytes_however_they_arrived():
    stream = encode([b"a", b"b"])
    for pieces in ([stream], [stream[:5], stream[5:]], singly(stream)):
        (parts,) = read(*pieces)
        assert [type(part) for part in parts] == [bytes, bytes]


# ── lengths that lie ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("reason", "stream"),
    [
        ("wrong magic", b"GET / HTTP/1.1\r\n"),
        ("wrong magic", b"\x13"),
        ("wrong magic", b"\x12\0\xee\x12"),
        ("wrong magic", b"\xff\xee\0\xff\0\0\0\x01\0"),
        ("wrong magic", b"\xee\xff\x12\0\0\0\0\x01\0"),
        ("message without parts", framed(b"")),
        ("message too long", framed(b"", length=0xFFFFFFFF)),
        ("message too long", framed(b"", length=101)),
        ("part longer than its message", framed(b"\x01")),
        ("part longer than its message", framed(b"\0\x05abcd")),
        ("part longer than its message", framed(b"\xfe" + bytes(90))),
        ("part longer than its message", framed(b"\xff\0\0\x01\0" + bytes(90))),
        ("part longer than its message", framed(b"\xff\xff\xff\xff\xff")),
        ("message ends within the size of a part", framed(b"\xff")),
        ("message ends within the size of a part", framed(b"\0\xff\0\0\0")),
        ("too many parts", framed(b"\0" * 6)),
        # the length of the message ends it within a part
        ("part longer than its message", framed(FRAMED[8:], length=0x2F)),
    ],
)
def test_what_is_not_a_message_ends_the_stream(reason, stream):
    for pieces in ([stream], singly(stream)):
        assert read(*pieces, max_message=100, max_parts=5)[-1] == Invalid(reason)
    before = framed(b"\x01a")
    assert read(before + stream, max_message=100, max_parts=5) == [[b"a"], Invalid(reason)]


def test_a_message_that_claims_more_than_it_has_ends_the_stream_with_the_next():
    claims_more = framed(FRAMED[8:], length=0x31)
    assert read(claims_more) == []
    assert read(claims_more + FRAMED) == [Invalid("part longer than its message")]


def test_a_truncated_message_in_front_of_another_is_read_as_the_framing_says():
    for size in range(len(FRAMED)):
        fuzz_flux.check_stream([FRAMED[:size] + FRAMED], 260)


def test_limits_include_what_is_just_allowed():
    assert read(framed(b"\0" * 5), max_message=5, max_parts=5) == [[b""] * 5]
    assert read(framed(b"\0" * 5), max_message=4, max_parts=5) == [Invalid("message too long")]
    assert read(framed(b"\0" * 5), max_message=5, max_parts=4) == [Invalid("too many parts")]


# ── costs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def memory_of(work):
    """Return how much memory `work` takes at most, and what it returns."""
    tracemalloc.start()
    try:
        result = work()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def test_an_announced_message_takes_no_memory_before_it_arrives():
    def announce():
        decoder = Decoder()
        decoder.feed(b"\x12\0\xee\xff" + pack(">I", 64 << 20) + b"\xff" + pack(">I", 63 << 20))
        decoder.feed(bytes(1000))
        assert decoder.next() is None
        return decoder

    most, decoder = memory_of(announce)
    assert decoder.buffered == 1013
    assert most < 10_000


def test_a_partial_message_takes_about_what_has_arrived():
    pieces = [bytes(65536)] * 32  # of one object: only the decoder's memory is counted

    def feed():
        decoder = Decoder()
        decoder.feed(b"\x12\0\xee\xff" + pack(">I", 64 << 20))
        for piece in pieces:
            decoder.feed(piece)
            assert decoder.next() is None
        return decoder

    most, decoder = memory_of(feed)
    assert decoder.buffered == 8 + 32 * 65536
    assert most < 3 * decoder.buffered  # twice while the buffer grows


def test_messages_that_were_returned_are_forgotten():
    decoder = Decoder()
    large = encode([bytes(1 << 20)])

    def feed():
        decoder.feed(large[:-1])
        decoder.feed(large[-1:] + b"\x12")
        assert len(decoder.next()[0]) == 1 << 20
        assert decoder.next() is None

    tracemalloc.start()
    feed()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 10_000
    assert decoder.buffered == 1


def test_messages_that_were_returned_are_forgotten_while_others_wait():
    message = encode([bytes(10_000)])

    def lag():
        decoder = Decoder()
        decoder.feed(message)
        for _ in range(200):
            decoder.feed(message)
            decoder.next()
        return decoder

    most, decoder = memory_of(lag)
    assert decoder.buffered == len(message)
    assert most < 10 * len(message)


class CountedBytes(bytes):
    """Bytes that count how many of them are copied out of by slices."""

    copied = 0

    def __getitem__(self, key):
        if isinstance(key, slice):
            CountedBytes.copied += len(range(*key.indices(len(self))))
        return super().__getitem__(key)


def test_many_messages_in_one_feed_are_copied_once():
    stream = encode([b"a" * 20, b"b" * 20]) * 1000
    CountedBytes.copied = 0
    assert len(read(CountedBytes(stream))) == 1000
    assert CountedBytes.copied <= len(stream)
