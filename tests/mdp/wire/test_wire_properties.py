"""What holds for any bytes and for any command: decoding never fails, and what is encoded is decoded to the same."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from zmdp.mdp import wire
from zmdp.mdp.wire import C01, C02, CL1, CX1, NO_OPTIONS, W01, W02, WL1, WX1

# ── any bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────

TOKENS = [
    b"", b"\x01", b"\x02", b"\x03", b"\x04", b"\x05", b"\x06", b"\x07", b"\x08", b"\x09", b"\x0a", b"\x0b",
    C01, C02, CL1, CX1, W01, W02, WL1, WX1, b"echo", b"\xff", b"x" * 256, b"1", b"017", b"500",
    b'{"ttl":0}', b'{"credit":3}', b"{",
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
    if options is not None:
        again = wire.parse_options(wire.options_with(options, 1500, 2))
        assert (again.ttl, again.wait) == (1.5, options.wait)
        assert again.values() == {**options.values(), "ttl": 1500, "attempt": 2}
        without = wire.parse_options(wire.options_without_ttl(options))
        assert (without.ttl, without.wait) == (None, options.wait)


# ── there and back ───────────────────────────────────────────────────────────────────────────────────────────────────

routing_id = st.binary(min_size=1, max_size=255)
hop = routing_id.filter(lambda frame: frame not in {*wire.DIALECTS, CL1, WL1})
envelope = st.just(()) | st.lists(hop, max_size=15).map(lambda hops: (*hops, b""))
name = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=60).map(str.encode)
body = st.lists(st.binary(max_size=20), min_size=1, max_size=4)
route = st.builds(lambda identity, hops: (identity, *hops), routing_id, envelope)
address = st.integers(0, (1 << 64) - 1) | routing_id.map(wire.id_of)
client_header, worker_header = st.sampled_from([C01, C02]), st.sampled_from([W01, W02, WX1])
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


number = st.integers(0, (1 << 64) - 1) | hop.map(wire.id_of)
before_number = st.lists(hop, max_size=14).map(tuple)
text, detail = st.text(max_size=20), st.lists(st.binary(max_size=20), max_size=1)
code = st.integers(0, 999)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(text, values, max_size=3),
    max_leaves=8,
)
options = st.builds(
    lambda more, known: wire.encode_options({**more, **known}),
    st.dictionaries(text.filter(lambda key: key not in {"ttl", "wait", "headers"}), json_values, max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "ttl": st.none() | st.integers(0, 10**14) | st.floats(0, 1e14),
            "wait": st.booleans(),
            "headers": st.dictionaries(text, text, max_size=3),
        },
    ),
)


@settings(deadline=None)
@given(
    identity=routing_id,
    hops=before_number,
    number=number,
    service=name,
    body=body,
    options=options,
    final=st.booleans(),
)
def test_what_x1_clients_say_reads_as_it_was_meant(*, identity, hops, number, service, body, options, final):
    envelope = (*hops, *wire.envelope_of(number))
    route, asked = (identity, *hops, b""), (identity, *envelope)
    parsed = wire.parse_options(options)
    assert parsed.raw == options
    assert parsed.values() == (json.loads(options) if options else {})
    said = wire.Request(route, CX1, service, body, parsed, number)
    assert to_broker(wire.request_to_broker(asked, CX1, service, body, options)) == said
    assert to_broker(wire.cancel_to_broker(asked, service)) == wire.Cancel(route, CX1, number, service)
    for each in (asked, (identity, b""), (identity,)):
        assert to_broker(wire.heartbeat(each, CX1)) == wire.Heartbeat(each, CX1)
        assert wire.decode_broker(wire.heartbeat(each[1:], CX1)) == wire.Heartbeat(each[1:], CX1)
    told = wire.Reply(envelope, CX1, final, number, body, service)
    assert wire.decode_broker(wire.reply_to_client(envelope, CX1, told.final, service, body)) == told


@settings(deadline=None)
@given(identity=routing_id, number=number, service=name, address=address, code=code, text=text, detail=detail)
def test_an_error_reads_as_it_was_meant(*, identity, number, service, address, code, text, detail):
    told, envelope = text.encode(), wire.envelope_of(number)
    assert wire.decode_broker(wire.error_to_client(envelope, service, code, told, detail)) == wire.Error(
        envelope, CX1, number, code, told, detail, service
    )
    said = wire.Error((identity,), WX1, address, code, told, detail)
    assert to_broker(wire.error_to_broker((identity,), address, code, told, detail)) == said


@settings(deadline=None)
@given(route, address, body, options)
def test_what_x1_workers_are_told_reads_as_it_was_meant(route, address, body, options):
    told = wire.Request(route[1:], WX1, b"", body, wire.parse_options(options), address)
    assert wire.decode_broker(wire.request_to_worker(route[1:], WX1, address, body, options)) == told
    assert wire.decode_broker(wire.cancel_to_worker(route[1:], address)) == wire.Cancel(route[1:], WX1, address)


@settings(deadline=None)
@given(route, address, st.integers(0, 10**20 - 1))
def test_credit_and_release_read_as_they_were_meant(route, address, credit):
    assert to_broker(wire.credit(route, credit)) == wire.Credit(route, WX1, credit)
    assert to_broker(wire.release(route, address)) == wire.Release(route, WX1, address)


@settings(deadline=None)
@given(route, worker_header)
def test_heartbeat_and_disconnect_read_as_they_were_meant(route, header):  # C7, C22, C24
    for encode, command in ((wire.heartbeat, wire.Heartbeat), (wire.disconnect, wire.Disconnect)):
        assert to_broker(encode(route, header)) == command(route, header)
        assert wire.decode_broker(encode(route[1:], header)) == command(route[1:], header)
