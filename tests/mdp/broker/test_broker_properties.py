"""What holds for any bytes.  Any course of events is the simulator's matter (`tests/simulation`)."""

import logging

from hypothesis import given, settings
from hypothesis import strategies as st
from support import turns
from support import x1_messages as x1

from zmdp.mdp import wire
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits
from zmdp.mdp.wire import C01, C02, CX1, W01, W02, WX1, batch

QUIET = logging.Logger("quiet", logging.CRITICAL + 1)

# ── what the broker holds ────────────────────────────────────────────────────────────────────────────────────────────


def picture(broker):
    """What the broker holds, as one value to compare."""
    directory, registry = broker.directory, broker.registry
    return (
        {name: ([w.id for w in service.workers], service.waiting) for name, service in directory.services.items()},
        {key: (list(w.held), w.credit, w.leaving, w.last_seen, w.last_sent) for key, w in directory.workers.items()},
        {key: list(client.numbered) for key, client in directory.clients.items()},
        (registry.queued, registry.request_bytes, registry.running),
        (broker.stats.dropped.copy(), broker.stats.disconnected.copy(), broker.stats.lost.copy()),
        broker.deadline(),
    )


# ── any bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────

TOKENS = [
    b"", b"\x01", b"\x02", b"\x03", b"\x04", b"\x05", b"\x06", b"\x07", b"\x08", b"\x09", b"\x0a", b"\x0b",
    C01, C02, CX1, W01, W02, WX1, b"echo", b"sum", b"mmi.service", b"mmi.stats", b"mmi.workers", b"mmi.services",
    b"mmi.broker", b"c1", b"c2", b"c3", b"w1", b"w2", b"w3", b"\xff", b"x" * 256, b"1", b"2", b"3", b"017", b"500",
    b'{"wait":false}', b"{",
]  # fmt: skip
frame = st.sampled_from(TOKENS) | st.binary(max_size=8)
frames_of_any_kind = st.lists(frame, max_size=8) | st.lists(frame, max_size=24)
# From a ROUTER: its peers' identities are never empty.
peer = st.sampled_from([b"c1", b"c2", b"c3", b"w1", b"w2", b"w3"]) | st.binary(min_size=1, max_size=5)
message = st.builds(lambda identity, frames: [identity, *frames], peer, frames_of_any_kind)
envelope = st.sampled_from([[], [b""], [b"1", b""], [b"hop", b"1", b""]])
almost = st.builds(
    # a header where one belongs: what follows is right more often
    lambda identity, envelope, header, frames: [identity, *envelope, header, *frames],
    peer, envelope, st.sampled_from([C01, C02, CX1, W01, W02, WX1]), frames_of_any_kind,
)  # fmt: skip
short = st.sampled_from([b"", b"x", b"echo", b"mmi.stats", b"\n", b'{"wait":false}', b"["])
number = st.integers(0, 5) | st.just((1 << 64) - 1)
some_records = {
    CX1: st.tuples(
        st.just("request_to_broker"), number, st.sampled_from([0, 1, 5000]), short, short, st.lists(short, max_size=2)
    )
    | st.tuples(st.just("signal"), st.sampled_from([5, 6]), number),
    WX1: st.tuples(st.just("reply"), st.sampled_from([3, 4, 9]), number, st.lists(short, max_size=2))
    | st.tuples(
        st.just("error"), st.just(7), number, st.sampled_from([0, 500, 1000]), short, st.lists(short, max_size=2)
    )
    | st.tuples(st.just("signal"), st.sampled_from([6, 11, 12]), number)
    | st.tuples(st.just("ready"), st.sampled_from([0, 1, 3, 1 << 31]), short, short)
    | st.tuples(st.just("credit"), st.sampled_from([0, 1, 3, 1 << 31])),
}


@st.composite
def records(draw):
    """An X1 message, some of whose bytes may be wrong."""
    header = draw(st.sampled_from([CX1, WX1]))
    route = (draw(peer), *draw(st.sampled_from([(), (b"",), (b"1", b""), (b"hop", b"")])))
    packed = batch.Batch(route, header)
    for name, *arguments in draw(st.lists(some_records[header], max_size=5)):
        getattr(packed, name)(*arguments)
    (frames,) = packed.messages() or [[*route, header, wire.BATCH, b""]]
    frames += draw(st.lists(short, max_size=2))
    if frames[-1] and draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(frames[-1]) - 1))
        frames[-1] = frames[-1][:at] + draw(st.binary(max_size=2)) + frames[-1][at + 1 :]
    return frames


LIMITS = Limits(max_message=1000, max_frames=20, max_queue=3, max_services=4, max_workers=4, max_credit=5)


def busy_broker():
    """A broker with workers of each dialect that hold requests, and requests that wait."""
    broker = Broker(LIMITS, now=0, logger=QUIET, first_address=1)
    for each in (
        x1.ready(b"w3", credit=2),
        x1.request(1, client=b"c3", ttl=5000),
        x1.request(2, client=b"c3", service=b"nobody"),
        [b"w1", W02, b"\x01", b"echo"],
        [b"w2", b"", W01, b"\x01", b"sum"],
        [b"c1", C02, b"\x01", b"echo", b"x"],
        [b"c2", b"", C01, b"echo", b"y"],
    ):
        turns.receive(broker, each, now=0)
    return broker


def commands_of(message):
    """What the broker sent in `message`."""
    read = wire.decode_broker(message[1:])
    if not isinstance(read, wire.Batched) or read.bare:
        return [read]
    return (batch.to_client if read.header == CX1 else batch.to_worker)(message, read.at + 1)


@settings(deadline=None, max_examples=200)
@given(st.lists(message | almost | records(), max_size=8))
def test_any_bytes_are_survived_and_the_invalid_ones_change_nothing(messages):  # C15, C43
    broker = busy_broker()
    for frames in messages:
        before, invalid = picture(broker), broker.stats.invalid.total()
        command = wire.decode_peer(list(frames), max_message=1000, max_frames=20)
        sent = turns.receive(broker, frames, now=0)
        if isinstance(command, wire.Invalid):
            assert sent == []
            assert picture(broker) == before
            assert broker.stats.invalid.total() == invalid + 1
        for each in sent:
            assert not any(isinstance(told, wire.Invalid) for told in commands_of(each))
        assert not broker.stats.internal_errors


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(message | almost | records(), max_size=8), max_size=4))
def test_any_bytes_are_survived_in_turns_of_many_messages(rounds):  # C15, C43
    broker = busy_broker()
    for now, messages in enumerate(rounds):
        for frames in messages:
            broker.receive(frames, now)
        for each in [*broker.take_messages(), *turns.tick(broker, now)]:
            assert not any(isinstance(told, wire.Invalid) for told in commands_of(each))
        assert not broker.stats.internal_errors
    for identity in (b"w1", b"w2", b"w3", b"c1", b"c2", b"c3"):
        turns.give_up(broker, identity, now=9)
        assert not broker.stats.internal_errors
    turns.close(broker, now=9)
    assert not broker.stats.internal_errors
    directory, registry = broker.directory, broker.registry
    assert (directory.workers, directory.clients, directory.services, directory.proxies) == ({}, {}, {}, {})
    assert (registry.queued, registry.running, registry.request_bytes) == (0, 0, 0)


# ── all workers of a machine at once ─────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None, max_examples=200)
@given(
    workers=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([True, False, False])), min_size=1, max_size=5),
    waiting=st.sampled_from([0, 0, 0, 1, 3]),
    later=st.floats(3.06, 100),
)
def test_when_workers_die_together_no_request_is_lost_or_given_to_the_dead(workers, waiting, later):  # C13, C17
    broker = Broker(Limits(heartbeat=1, liveness=3, expiry=1000), now=0, logger=QUIET, first_address=1)
    for number in range(len(workers)):
        turns.receive(broker, x1.ready(b"w%d" % number, credit=3), now=0)
    for number in range(3 * len(workers) + waiting):
        turns.receive(broker, [b"c%d" % number, C02, b"\x01", b"echo", b"x"], now=0)
    for number, (kept, _) in enumerate(workers):
        held = list(broker.directory.workers[b"w%d" % number].held)
        for address in held[kept:]:
            turns.receive(broker, x1.final(address, b"w%d" % number), now=0)
    alive = {b"w%d" % number for number, (_, lives) in enumerate(workers) if lives}
    for worker in sorted(alive):
        turns.receive(broker, x1.heartbeat(worker), now=later - 1)
    unfinished = broker.registry.queued + broker.registry.running
    sent = turns.tick(broker, later)
    assert {message[0] for message in sent} <= alive
    assert set(broker.directory.workers) == alive
    assert broker.registry.queued + broker.registry.running == unfinished
    assert broker.stats.dropped == {}
    assert not broker.stats.internal_errors
