"""The books of the registry: what is counted and found at every transition of a request."""

import pytest

from zmdp.mdp.broker.directory import Directory
from zmdp.mdp.broker.records import (
    CLIENT_OVERHEAD,
    FRAME_OVERHEAD,
    REQUEST_OVERHEAD,
    Client,
    Collected,
    Request,
    Service,
    Worker,
    key_of,
)
from zmdp.mdp.broker.registry import REMEMBERED, Registry
from zmdp.mdp.broker.roles import Role
from zmdp.mdp.wire import C01, C02, CX1, NO_OPTIONS, W02, WX1, Options

NO_WAIT = Options(wait=False)
NOW = 1.0
EVERYONE = Role()
CHARGED = REQUEST_OVERHEAD + FRAME_OVERHEAD
CLIENT = CLIENT_OVERHEAD


def request(registry, client=b"c", body=b"x", service=b"echo", **more):
    """A request that has been accepted: queued, unless there is credit for it."""
    made = Request(
        registry.directory.client((client,), EVERYONE), C02, registry.directory.service(service), [body], **more
    )
    registry.accept(made, NOW)
    return made


def numbered(registry, number=1, client=b"c", options=NO_OPTIONS):
    made = Request(
        registry.directory.client((client,), EVERYONE),
        CX1,
        registry.directory.service(b"echo"),
        [b"x"],
        number=number,
        options=options,
    )
    registry.accept(made, NOW)
    return made


def registry_with(*routes, credit=1):
    """A registry, and workers of echo."""
    registry = Registry(Directory())
    made = [
        Worker(route, WX1, registry.directory.service(b"echo"), EVERYONE, credit=credit, id=n, now=0)
        for n, route in enumerate(routes, 1)
    ]
    for worker in made:
        registry.directory.add_worker(worker)
    return registry, *made


def assign(registry, request, worker, address=1):
    """Dispatch a request that has been accepted."""
    if request in request.service.arrived:
        request.service.arrived.remove(request)
    return registry.assign(request, worker, address, 0, 0.0, doubtful=False)


# ── peers ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("route", "key"),
    [
        ((b"c",), b"c"),
        ((b"c", b""), b"c"),
        ((b"p", b"c", b""), (b"p", b"c")),
        ((b"p", b"q", b"c", b""), (b"p", b"q", b"c")),
    ],
)
def test_a_peer_is_known_by_its_addresses(route, key):
    assert key_of(route) == key


@pytest.mark.parametrize(("key", "path"), [(b"c", (b"c",)), ((b"p", b"c"), (b"p", b"c"))])
def test_the_path_to_a_client(key, path):
    assert Client(key, EVERYONE).path == path


@pytest.mark.parametrize(
    ("key", "header", "delimited", "route"),
    [
        (b"c", C02, False, (b"c",)),
        (b"c", C01, True, (b"c", b"")),
        ((b"p", b"c"), C02, True, (b"p", b"c", b"")),
    ],
)
def test_a_request_knows_its_route_again(key, header, delimited, route):  # C22
    made = Request(Client(key, EVERYONE), header, Service(b"echo"), [b"x"], delimited=delimited)
    assert made.route == route


def test_a_worker_is_named_for_people():
    worker = Worker((b"secret",), W02, Service(b"echo"), EVERYONE, credit=1, id=5, now=0)
    assert str(worker) == "5"
    worker.host = "box"
    assert str(worker) == "5 (on box)"
    worker.name, worker.pid = "resize", 17
    assert str(worker) == "5 (resize, on box, pid 17)"


def test_peers_behind_a_proxy_are_found():  # C36
    registry, first, second, own = registry_with((b"p", b"1", b""), (b"p", b"2", b""), (b"p",))
    one, two = (
        Request(registry.directory.client(route, EVERYONE), C02, own.service, [b"x"])
        for route in ((b"p", b"1", b""), (b"p", b""))
    )
    for each in (one, two):
        registry.accept(each, NOW)
    assert registry.directory.workers_at(b"p") == [own, first, second]
    assert registry.directory.clients_at(b"p") == [two.client, one.client]
    assert registry.directory.workers_at(b"?") == registry.directory.clients_at(b"?") == []
    registry.remove_worker(first)
    assert registry.directory.workers_at(b"p") == [own, second]
    assert registry.directory.clients_at(b"p") == [two.client, one.client]
    registry.drop(one, NOW)
    registry.remove_worker(second)
    assert registry.directory.proxies == {}


# ── services ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_service_is_made_once():
    registry = Registry(Directory())
    request(registry)
    assert registry.directory.service(b"echo") is registry.directory.service(b"echo")
    assert list(registry.directory.services) == [b"echo"]


def test_a_service_is_not_known_before_it_has_a_worker_or_a_request():
    registry = Registry(Directory())
    service = registry.directory.service(b"echo")
    assert registry.directory.services == {}
    registry.refuse(Request(registry.directory.client((b"c",), EVERYONE), CX1, service, [b"x"], number=1))
    assert registry.directory.services == {}
    assert registry.ended_lately(Client(b"c", EVERYONE), 1)
    registry.directory.add_worker(Worker((b"w",), WX1, service, EVERYONE, credit=1, id=1, now=0))
    assert registry.directory.services == {b"echo": service}


def test_a_service_with_nothing_left_is_forgotten():
    registry, worker = registry_with((b"w",))
    service = worker.service

    def is_kept():
        registry.directory.settled(service)
        return registry.directory.services == {b"echo": service}

    assert is_kept()
    waiting = request(registry)
    assert service.arrived == [waiting]
    registry.remove_worker(worker)
    assert is_kept()
    registry.directory.touch(service)
    registry.drop(waiting, NOW)
    assert registry.directory.services == {b"echo": service}  # until it is settled
    assert not is_kept()
    assert not is_kept()


def test_every_transition_has_its_service_looked_at():
    registry, worker = registry_with((b"w",), credit=2)
    service = worker.service

    def is_touched():
        touched = registry.directory.take_unsettled()
        registry.directory.settled(service)
        return touched == [service]

    assert is_touched()
    assert not is_touched()
    made = request(registry)
    assert is_touched()
    attempt = assign(registry, made, worker)
    registry.release(attempt)
    assert is_touched()
    registry.enqueue(made, NOW, front=True)
    assert is_touched()
    registry.directory.set_credit(worker, 5)
    assert is_touched()
    registry.directory.leave(worker)
    assert is_touched()
    registry.remove_worker(worker)
    assert is_touched()


def test_a_leaving_worker_is_reported_when_it_has_finished():
    registry, worker = registry_with((b"w",), credit=2)
    first, second = (assign(registry, request(registry), worker, address) for address in (1, 2))
    registry.directory.leave(worker)
    registry.release(first)
    assert registry.finished == []
    registry.release(second)
    assert registry.finished == [worker]


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_idle_worker_leaves_nothing():
    registry, worker = registry_with((b"w",))
    assert (worker.service.available, worker.service.schedule.capacity) == (1, 1)
    assert registry.remove_worker(worker) == []
    assert (registry.directory.workers, worker.service.workers) == ({}, {})
    assert (worker.service.available, worker.service.schedule.capacity) == (0, 0)


def test_a_busy_worker_leaves_what_it_holds():
    registry, worker = registry_with((b"w",), credit=3)
    attempts = [assign(registry, request(registry), worker, address) for address in (5, 6)]
    assert (worker.load, registry.running, worker.service.running, worker.service.dispatched) == (2, 2, 2, 2)
    assert registry.remove_worker(worker) == attempts
    assert (worker.load, registry.running, worker.service.running) == (0, 0, 0)
    assert list(registry.directory.client((b"c",), EVERYONE).running) == []


def test_a_worker_that_is_leaving_counts_no_more():
    registry, worker = registry_with((b"w",), credit=3)
    registry.directory.leave(worker)
    assert (worker.service.available, worker.service.schedule.capacity) == (0, 0)
    assert registry.remove_worker(worker) == []
    assert worker.service.available == 0


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_course_of_a_request():
    registry, worker = registry_with((b"w",))
    made = request(registry)
    client, schedule = made.client, worker.service.schedule
    assert registry.directory.clients == {b"c": client}
    assert registry.take_arrived(worker.service) == [made]
    registry.enqueue(made, NOW)
    assert (registry.queued, schedule.waiting, made.attempt) == (1, 1, None)
    assert registry.expiries.next_due() is not None
    assert registry.take_next(worker.service, NOW) == (made, worker)
    assert (registry.queued, registry.request_bytes, registry.expiries.next_due()) == (0, CLIENT + CHARGED + 1, None)
    assert registry.take_next(worker.service, NOW) is None
    attempt = assign(registry, made, worker, 42)
    assert (worker.held, made.attempt, made.handed, schedule.capacity) == ({42: attempt}, attempt, 1, 0)
    assert list(client.running) == [made]
    registry.release(attempt)
    assert (worker.held, made.attempt, schedule.capacity) == ({}, None, 1)
    registry.drop(made, NOW)
    assert (registry.directory.clients, client.requests) == ({}, 0)


def test_a_request_that_is_finished_while_a_worker_holds_it_is_abandoned():
    registry, worker = registry_with((b"w",))
    made = numbered(registry)
    attempt = assign(registry, made, worker)
    attempt.collected = Collected()
    registry.drop(made, NOW)
    assert attempt.abandoned
    assert attempt.collected is None
    assert (registry.directory.clients, registry.running, worker.load) == ({}, 1, 1)
    registry.release(attempt)
    assert (registry.running, worker.load) == (0, 0)


def test_waiting_requests_are_counted_with_their_bytes():
    registry = Registry(Directory())
    waiting = request(registry, body=b"1234567", options=Options(b'{"wait":true}'))
    assert waiting.charge == len(b'1234567{"wait":true}') + CHARGED
    assert (registry.queued, registry.request_bytes) == (1, waiting.charge + CLIENT)
    registry.drop(waiting, NOW)
    assert (registry.queued, registry.request_bytes) == (0, 0)


def test_what_came_back_goes_first():  # C17
    registry = Registry(Directory())
    for client, body in ((b"c", b"1"), (b"c", b"2"), (b"d", b"x")):
        request(registry, client, body)
    returned = request(registry, b"d", b"!")
    returned.service.schedule.queue.remove(returned)
    registry.expiries.clear(returned)
    registry.enqueue(returned, NOW, front=True)
    queue = registry.directory.services[b"echo"].schedule.queue
    assert [queue.take().body for _ in range(4)] == [(b"!",), (b"1",), (b"x",), (b"2",)]


def test_suspects_are_counted():  # C17
    registry, worker = registry_with((b"w",), credit=2)
    suspect, other = request(registry), request(registry)
    registry.blame(suspect)
    for each in registry.take_arrived(worker.service):
        registry.enqueue(each, NOW)
    assert worker.service.schedule.suspects.size == 1
    assert registry.take_next(worker.service, NOW) == (suspect, worker)
    assert registry.take_next(worker.service, NOW) == (other, worker)
    first, second = assign(registry, suspect, worker, 1), assign(registry, other, worker, 2)
    assert worker.suspects == 1
    registry.release(second)
    assert worker.suspects == 1
    registry.release(first)
    assert worker.suspects == 0


def test_what_waits_for_a_client_is_found_in_all_queues():
    registry = Registry(Directory())
    one, two, three = request(registry), request(registry, service=b"sum"), request(registry)
    other = request(registry, b"d")
    client = one.client
    assert registry.waiting_for(client) == [one, three, two]
    registry.drop(one, NOW)
    assert registry.waiting_for(client) == [three, two]
    for each in (two, three):
        registry.drop(each, NOW)
    assert registry.waiting_for(client) == []
    assert registry.waiting_for(other.client) == [other]


def test_a_client_is_known_while_it_has_requests():
    registry = Registry(Directory())
    client = registry.directory.client((b"c", b""), EVERYONE)
    assert registry.directory.clients == {}
    assert registry.directory.client((b"c",), EVERYONE) is not client
    one, two = (Request(client, C02, registry.directory.service(b"echo"), [b"x"]) for _ in range(2))
    registry.accept(one, NOW)
    registry.accept(two, NOW)
    assert registry.directory.client((b"c", b""), EVERYONE) is registry.directory.client((b"c",), EVERYONE) is client
    registry.drop(one, NOW)
    assert registry.directory.clients == {b"c": client}
    registry.drop(two, NOW)
    assert registry.directory.clients == {}
    registry.accept(one, NOW)
    assert registry.directory.clients == {b"c": client}


def test_those_that_are_not_to_wait_are_known_as_long_as_they_do():
    registry = Registry(Directory())
    one, _, three = (
        numbered(registry, 1, options=NO_WAIT),
        numbered(registry, 2),
        numbered(registry, 3, options=NO_WAIT),
    )
    service = one.service
    assert list(service.no_wait) == [one, three]
    registry.drop(three, NOW)
    assert list(service.no_wait) == [one]
    worker = Worker((b"w",), WX1, service, EVERYONE, credit=1, id=1, now=0)
    registry.directory.add_worker(worker)
    assert registry.take_next(service, NOW) == (one, worker)
    assert service.no_wait == {}
    registry.enqueue(one, NOW, front=True)
    assert list(service.no_wait) == [one]


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_number_that_ended_is_free_and_remembered():
    registry = Registry(Directory())
    outstanding, other = numbered(registry), numbered(registry, 2, b"d")
    client = outstanding.client
    assert registry.numbered == [outstanding, other]
    assert client.numbered == {1: outstanding}
    assert not registry.ended_lately(client, 1)
    registry.drop(outstanding, NOW)
    assert registry.numbered == [other]
    assert registry.ended_lately(client, 1)
    assert registry.ended_lately(Client(b"c", EVERYONE), 1)
    assert not registry.ended_lately(client, 2)
    assert not registry.ended_lately(other.client, 1)


def test_at_least_so_many_numbers_are_remembered_and_at_most_twice_as_many():
    registry, client, service = Registry(Directory()), Client(b"c", EVERYONE), Service(b"echo")
    for number in range(5 * REMEMBERED):
        registry.refuse(Request(client, CX1, service, [b"x"], number=number))
        assert registry.ended_lately(client, max(0, number - REMEMBERED + 1))
        assert not registry.ended_lately(client, number - 2 * REMEMBERED)
