"""Pirates' frames, which have no header (`wire.pirate`)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmdp.mdp import wire
from zmdp.mdp.wire import CPP, WPP, Invalid, Reason

TOKENS = [b"", b"\x01", b"\x02", b"\x03", b"7", b"07", b"x" * 256, b"y" * 10_000, wire.C02, wire.WX1, b"\xff"]
frame = st.sampled_from(TOKENS) | st.binary(max_size=8)
routing_id = st.binary(min_size=1, max_size=255)
body = st.lists(st.binary(max_size=20), min_size=1, max_size=4)
address = st.integers(0, (1 << 64) - 1) | st.binary(min_size=2, max_size=255).map(wire.id_of)


def decoded(*frames, service=b"echo", max_message=50_000, max_frames=20, workers=False):
    return wire.decode_pirate([b"peer", *frames], service, max_message, max_frames, workers=workers)


@settings(deadline=None, max_examples=300)
@given(st.lists(frame, max_size=8) | st.lists(frame, max_size=24), st.booleans())
def test_any_bytes_are_decoded(frames, shared):  # C15
    given_ = [memoryview(each) if shared and len(each) >= wire.SHARED else each for each in frames]
    found = decoded(*given_)
    assert isinstance(found, wire.FromPeer | Invalid)
    assert found == decoded(*frames)
    if isinstance(found, wire.Request | wire.Reply):
        assert found.route[0] == b"peer"
        assert frames[-len(found.body) :] == found.body


def test_the_commands():
    assert decoded(b"\x01") == wire.Ready((b"peer",), WPP, b"echo")
    assert decoded(b"\x02") == wire.Heartbeat((b"peer",), WPP)
    assert decoded(b"", b"x", b"") == wire.Request((b"peer", b""), CPP, b"echo", [b"x", b""])
    assert decoded(b"17", b"", b"x", b"") == wire.Reply((b"peer",), WPP, True, 17, [b"x", b""])


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], Reason.TOO_FEW_FRAMES),
        ([b""], Reason.NO_BODY),
        ([b"\x03"], Reason.UNKNOWN_COMMAND),
        ([memoryview(bytes(10_000))], Reason.UNKNOWN_COMMAND),
        ([b"1", b"x", b"y"], Reason.NO_DELIMITER),
        ([b"1", b""], Reason.NO_BODY),
        ([b"x" * 256, b"", b"x"], Reason.BAD_ADDRESS),
    ],
)
def test_invalid_messages(frames, reason):  # C15
    assert decoded(*frames) == Invalid(reason)


@pytest.mark.parametrize(
    ("frames", "limits", "reason"),
    [
        ([b"x" * 100], {"max_message": 99}, Reason.TOO_LARGE),
        ([b"", b"x" * 100], {"max_message": 99}, Reason.TOO_LARGE),
        ([b"", b"x", b"x"], {"max_frames": 3}, Reason.TOO_MANY_FRAMES),
        ([b"x" * 256, b"", b"x"], {"max_frames": 3}, Reason.TOO_MANY_FRAMES),
    ],
)
def test_messages_over_a_limit(frames, limits, reason):  # C15
    assert decoded(*frames, **limits) == Invalid(reason, over_limit=True)


def test_a_reply_over_a_limit_names_its_request():  # C15
    oversized = wire.Oversized((b"peer",), WPP, Reason.TOO_LARGE, wire.FINAL, 17)
    assert decoded(b"17", b"", memoryview(bytes(10_000)), max_message=1000) == oversized
    assert decoded(b"17", b"", b"x", max_frames=3) == oversized._replace(reason=Reason.TOO_MANY_FRAMES)


def test_the_broker_reads_only_short_bodies_itself():
    large = memoryview(bytes(10_000))
    assert decoded(b"", large, service=b"mmi.service").body == [wire.OVERLONG]
    assert decoded(b"", large).body == [large]


@settings(deadline=None)
@given(routing_id, body, body, address)
def test_what_is_encoded(identity, given_, other, address):
    route = (identity,)
    assert wire.reply_to_client((identity, b""), CPP, True, b"echo", given_) == [identity, b"", *given_]
    told = wire.request_to_worker(route, WPP, address, given_)
    assert told == [identity, wire.frame_of(address), b"", *given_]
    # The worker sends back the address, with its own frames.
    reply = wire.decode_pirate([identity, *told[1:3], *other], b"echo", 50_000, 20)
    assert reply == wire.Reply(route, WPP, True, address, other)
    assert wire.heartbeat(route, WPP) == [identity, b"\x02"]
    assert wire.disconnect(route, WPP, b"why") == []


def test_the_headers_are_no_bytes_that_peers_can_send():
    """No message is taken for one with such a header."""
    for header in (CPP, WPP):
        assert isinstance(wire.decode_peer([b"peer", header, b"\x01", b"echo", b"x"], 1000, 20), Invalid)
        assert isinstance(wire.decode_broker([header, b"\x02", b"1", b"", b"x"]), Invalid)


def test_simple_pirates_are_workers_that_look_like_clients():
    route, wsp = (b"peer", b""), wire.WSP
    for said in (b"\x01", b"READY"):
        assert decoded(b"", said, workers=True) == wire.Ready(route, wsp, b"echo")
    assert decoded(b"", b"7", b"", b"body", workers=True) == wire.Reply(route, wsp, True, 7, [b"body"], b"echo")
    assert decoded(b"", b"\x02", workers=True) == Invalid(Reason.UNKNOWN_COMMAND)
    assert decoded(b"", workers=True) == Invalid(Reason.TOO_FEW_FRAMES)
    assert decoded(b"\x01", workers=True) == wire.Ready((b"peer",), WPP, b"echo")
    assert wire.heartbeat(route, wsp) == []
