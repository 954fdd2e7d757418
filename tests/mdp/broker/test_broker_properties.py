"""What holds for any bytes.  Any course of events is the simulator's matter (`tests/simulation`)."""

import logging

from hypothesis import given, settings
from hypothesis import strategies as st
from support import turns
from support import x1_messages as x1

from zmdp.mdp import wire
from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.broker.records import NEVER
from zmdp.mdp.broker.scheduling import GROUP_BITS
from zmdp.mdp.limits import Limits
from zmdp.mdp.wire import C01, C02, CX1, W01, W02, WX1, batch

QUIET = logging.Logger("quiet", logging.CRITICAL + 1)

# ── what the broker holds ────────────────────────────────────────────────────────────────────────────────────────────


def queued(queue):
    """The requests in a fair queue, client by client as turns come."""
    return [request for each in queue._queues for request in each.requests]


def waiting_in(service):
    return queued(service.schedule.suspects) + queued(service.schedule.queue)


def picture(broker):
    """All that the broker holds, as one value to compare."""
    directory, registry = broker.directory, broker.registry
    return (
        {
            name: ([w.id for w in service.workers], list(map(id, waiting_in(service))), service.schedule.capacity)
            for name, service in directory.services.items()
        },
        {key: (list(w.held), w.credit, w.leaving, w.last_seen, w.last_sent) for key, w in directory.workers.items()},
        {key: list(client.numbered) for key, client in directory.clients.items()},
        (registry.queued, registry.request_bytes, registry.running),
        (broker.stats.dropped.copy(), broker.stats.disconnected.copy(), broker.stats.lost.copy()),
        (broker._workers._beats.next_due(), registry.expiries.next_due()),
    )


def check_books(broker):
    """Between two turns the registry agrees with itself, and keeps nothing that it need not keep."""
    directory, registry = broker.directory, broker.registry
    assert not broker.stats.internal_errors
    services, workers = directory.services.values(), directory.workers.values()
    waiting = [request for service in services for request in waiting_in(service)]
    attempts = [attempt for worker in workers for attempt in worker.held.values()]
    running = [attempt.request for attempt in attempts]
    outstanding = [*waiting, *(attempt.request for attempt in attempts if not attempt.abandoned)]

    # The turn is over.
    assert [
        *broker._shared.outgoing._messages,
        *broker._shared.outgoing._open,
        *registry.finished,
        *directory.unsettled,
    ] == []
    assert not any(service.arrived or service.unsettled for service in services)
    assert not any(peer.batch for peer in [*workers, *directory.clients.values()])

    # Requests: each has one place, and is counted there.
    assert registry.queued == len(waiting)
    requests = sum(request.charge for request in outstanding)
    assert registry.request_bytes == requests + sum(client.charge for client in directory.clients.values())
    assert registry.running == len(running) == sum(service.running for service in services)
    assert len({*waiting, *running}) == len(waiting) + len(running)
    assert all(request.attempt is None and request.queued for request in waiting)
    assert not any(request.queued for request in running)
    for worker in workers:
        for address, attempt in worker.held.items():
            assert (attempt.worker, attempt.address, attempt.request.attempt) == (worker, address, attempt)
            assert attempt.request.service is worker.service
    assert len({attempt.address for attempt in attempts}) == len(attempts)

    # Clients: known while they have a request.
    clients = {request.client for request in outstanding}
    assert directory.clients == {client.key: client for client in clients}
    for client in clients:
        mine = [request for request in outstanding if request.client is client]
        assert client.requests == len(mine)
        assert client.numbered == {request.number: request for request in mine if request.header == CX1}
        held = [request for request in mine if request.attempt is not None]
        assert sorted(client.running, key=id) == sorted(held, key=id)
        assert sorted(registry.waiting_for(client), key=id) == sorted((r for r in mine if r not in held), key=id)
        assert set(client.waiting) == {r.service.schedule.queue_of(r) for r in mine if r not in held}
    assert registry.numbered == [r for client in directory.clients.values() for r in client.numbered.values()]
    behind = {key for key in [*directory.clients, *directory.workers] if not isinstance(key, bytes)}
    assert {key for proxy in directory.proxies.values() for key in proxy.peers} == behind
    assert all(proxy.peers for proxy in directory.proxies.values())
    assert all(key[0] == identity for identity, proxy in directory.proxies.items() for key in proxy.peers)

    # Workers: within their credit when they were given the last, and no more than one suspect each.
    assert {worker for service in services for worker in service.workers} == set(workers)
    assert list(directory.workers) == [worker.key for worker in workers]
    for worker in workers:
        suspects = [attempt for attempt in worker.held.values() if attempt.request.attempts]
        assert worker.suspects == len(suspects) <= 1
        assert worker.held or not worker.leaving, "a worker that left was not answered"
        assert worker.load <= broker.limits.max_credit
    for service in services:
        check_schedule(service)
        assert service.workers or service.waiting, "a service with nothing left is kept"
        assert service.available == sum(not worker.leaving for worker in service.workers)
        assert set(service.no_wait) == {request for request in waiting_in(service) if not request.options.wait}
        assert service.available or not service.no_wait, "a request waits for nobody that was not to wait"

    # Timers: all that is due, and nothing else.
    assert all(worker.bucket for worker in workers)
    assert all(request.bucket for request in waiting)
    timed = {request for request in running if request.bucket}
    assert timed == {each.request for each in attempts if each.request.deadline < NEVER and not each.abandoned}
    assert (len(broker._workers._beats) > 0) == bool(workers)
    assert (len(broker.registry.expiries) > 0) == bool(waiting or timed)


def check_schedule(service):
    """Every worker with free credit is where it is looked for, and no request waits that one of them could take."""

    def place(worker):  # C21
        return not worker.warm, -worker.pooled if worker.warm else worker.pooled

    schedule = service.schedule
    assert all(request.attempts for request in queued(schedule.suspects))
    assert not any(request.attempts for request in queued(schedule.queue))
    for queue in (schedule.suspects, schedule.queue):
        parts = list(queue._queues)
        assert queue.size == sum(len(each.requests) for each in parts)
        assert all(each.requests.first is not None for each in parts)
        assert all(each.client.waiting[queue] is each for each in parts)
        assert len({each.client for each in parts}) == len(parts)
    pools = {schedule._without_suspect: [], schedule._with_suspect: []}
    capacity = 0
    for worker in service.workers:
        free = 0 if worker.leaving else max(0, worker.credit - worker.load)
        capacity += free
        assert worker.free == free
        pool = (schedule._with_suspect if worker.suspects else schedule._without_suspect) if free else None
        assert worker.pool is pool
        if pool is not None:
            assert worker.pooled_load == worker.load
            pools[pool].append(worker)
    assert schedule.capacity == capacity
    for pool, members in pools.items():
        assert pool.size == len(members)
        lines = {load: list(line) for load, line in enumerate(pool._lists) if line.first is not None}
        found = sum(mask << (group << GROUP_BITS) for group, mask in enumerate(pool._loads))
        assert found == sum(1 << load for load in lines)
        assert pool._groups == sum(1 << group for group, mask in enumerate(pool._loads) if mask)
        assert {worker: load for load, line in lines.items() for worker in line} == {w: w.load for w in members}
        assert all(line == sorted(line, key=place) for line in lines.values())
    assert not (schedule.queue.size and capacity), "a worker has credit while a request waits"
    clean = pools[schedule._without_suspect]
    assert not (schedule.suspects.size and clean), "a worker has credit while a suspect waits"


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
        check_books(broker)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(message | almost | records(), max_size=8), max_size=4))
def test_any_bytes_are_survived_in_turns_of_many_messages(rounds):  # C15, C43
    broker = busy_broker()
    for now, messages in enumerate(rounds):
        for frames in messages:
            broker.receive(frames, now)
        for each in [*broker.take_messages(), *turns.tick(broker, now)]:
            assert not any(isinstance(told, wire.Invalid) for told in commands_of(each))
        check_books(broker)
    for identity in (b"w1", b"w2", b"w3", b"c1", b"c2", b"c3"):
        turns.gone(broker, identity, now=9)
        check_books(broker)
    turns.close(broker, now=9)
    check_books(broker)
    assert broker.directory.workers == {}


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
    check_books(broker)
