"""What holds for any bytes and for any command: decoding never fails, and what is encoded is decoded to the same."""

from hypothesis import given, settings
from hypothesis import strategies as st

from zmdp.mdp import wire
from zmdp.mdp.wire import C01, C02, CL1, CX1, NO_OPTIONS, W01, W02, WL1, WX1, batch

# ── any bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────

TOKENS = [
    b"", b"\x01", b"\x02", b"\x03", b"\x04", b"\x05", b"\x06", b"\x07", b"\x08", b"\x09", b"\x0a", b"\x0b",
    C01, C02, CL1, CX1, W01, W02, WL1, WX1, b"echo", b"\xff", b"x" * 256, b"1", b"017", b"500",
    b'{"wait":0}', b"{", b"\0\0\0\x09\x06" + bytes(8),
]  # fmt: skip
frame = st.sampled_from(TOKENS) | st.binary(max_size=8)
frames_of_any_kind = st.lists(frame, max_size=8) | st.lists(frame, max_size=24)


@settings(deadline=None, max_examples=300)
@given(frames_of_any_kind)
def test_any_bytes_are_decoded(frames):  # C15
    from_peer = wire.decode_peer(frames, max_message=1000, max_frames=20)
    assert isinstance(from_peer, wire.FromPeer | wire.Batched | wire.Invalid)
    assert isinstance(wire.decode_broker(frames), wire.FromBroker | wire.Batched | wire.Invalid)


@settings(deadline=None)
@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,0123456789.-+eE tru\\', max_size=40).map(str.encode))
def test_any_bytes_are_options_or_not(raw):  # X1
    options = wire.parse_options(raw)
    assert options is None or (options.raw == raw and isinstance(options.values(), dict))


# ── there and back ───────────────────────────────────────────────────────────────────────────────────────────────────

routing_id = st.binary(min_size=1, max_size=255)
hop = routing_id.filter(lambda frame: frame not in {*wire.DIALECTS, CL1, WL1})
envelope = st.just(()) | st.lists(hop, max_size=15).map(lambda hops: (*hops, b""))
name = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=60).map(str.encode)
body = st.lists(st.binary(max_size=20), min_size=1, max_size=4)
route = st.builds(lambda identity, hops: (identity, *hops), routing_id, envelope)
address = st.integers(0, (1 << 64) - 1) | routing_id.map(wire.id_of)
client_header, worker_header = st.sampled_from([C01, C02]), st.sampled_from([W01, W02])
PARTIAL, FINAL = wire.Kind.PARTIAL, wire.Kind.FINAL


def to_broker(frames):
    return wire.decode_peer(frames, max_message=1 << 20, max_frames=100)


@settings(deadline=None)
@given(route, client_header, name, body, st.booleans())
def test_what_clients_say_and_are_told_reads_as_it_was_meant(route, header, service, body, final):  # C2, C3, C22, C24
    said = wire.Request(route, header, service, body)
    assert to_broker(wire.request_to_broker(route, header, service, body)) == said
    told = wire.Reply(route[1:], header, final or header == C01, None, body, service)
    assert wire.decode_broker(wire.reply_to_client(told.route, header, told.final, service, body)) == told


@settings(deadline=None)
@given(route, worker_header, name, address, body)
def test_what_workers_say_and_are_told_reads_as_it_was_meant(route, header, service, address, body):  # C7, C22, C24
    assert to_broker(wire.ready(route, header, service)) == wire.Ready(route, header, service)
    for kind in [FINAL] if header == W01 else [PARTIAL, FINAL]:
        reply = wire.Reply(route, header, kind is FINAL, address, body)
        assert to_broker(wire.reply_to_broker(route, header, kind, address, body)) == reply
    work = wire.Request(route[1:], header, b"", body, NO_OPTIONS, address)
    assert wire.decode_broker(wire.request_to_worker(route[1:], header, address, body)) == work


text = st.text(max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(text, values, max_size=3),
    max_leaves=8,
)
headers = st.dictionaries(text, text, max_size=3)
known_options = st.fixed_dictionaries(
    {}, optional={"wait": st.booleans(), "headers": headers, "broker": text.filter(str.isprintable)}
)
other_options = st.dictionaries(
    text.filter(lambda key: key not in {"wait", "headers", "broker", "on_behalf"}), json_values, max_size=3
)


@settings(deadline=None)
@given(other_options, known_options)
def test_options_read_as_they_were_meant(others, known):  # X1
    values = {**others, **known}
    parsed = wire.parse_options(wire.encode_options(values))
    assert (parsed.values(), parsed.wait, parsed.broker) == (values, known.get("wait", True), known.get("broker"))


@settings(deadline=None)
@given(route, worker_header)
def test_heartbeat_and_disconnect_read_as_they_were_meant(route, header):  # C7, C22, C24
    for encode, command in ((wire.heartbeat, wire.Heartbeat), (wire.disconnect, wire.Disconnect)):
        assert to_broker(encode(route, header)) == command(route, header)
        assert wire.decode_broker(encode(route[1:], header)) == command(route[1:], header)


@settings(deadline=None)
@given(route, st.sampled_from([CX1, WX1, CL1, WL1]), st.binary(max_size=20))
def test_heartbeat_and_disconnect_of_x1_read_as_they_were_meant(route, header, text):  # C22, C44
    at = len(route)
    assert to_broker(wire.heartbeat(route, header)) == wire.Batched(route, header, at, True)
    message = wire.disconnect(route[1:], header, text)
    assert wire.decode_broker(message) == wire.Batched(route[1:], header, at - 1, False)
    decode, spoken = (batch.to_client, CX1) if header == CX1 else (batch.to_worker, WX1)
    assert decode(message, at - 1) == [wire.Disconnect((), spoken, text)]
