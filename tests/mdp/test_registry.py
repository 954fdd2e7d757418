"""Fair queues and the books of the registry."""

import pytest

from zmdp.mdp.registry import (
    DELIMITED,
    REMEMBERED,
    REQUEST_OVERHEAD,
    Client,
    FairQueue,
    Registry,
    Request,
    Service,
    Worker,
    envelope_of,
)
from zmdp.mdp.wire import C02, CX1, W02, Options

CLIENTS = {}
"""Those of the test that runs: where there is no registry, something must tell that they are the same."""


@pytest.fixture(autouse=True)
def clients():
    CLIENTS.clear()
    CLIENTS.update((name, Client(name)) for name in (b"c", b"d", b"e", b"hog"))


def request(client=b"c", body=b"x", service=None, envelope=()):
    return Request(CLIENTS[client], envelope, C02, service or Service(b"echo"), [body])


def bodies(requests):
    return b"".join(each.body[0] for each in requests)


def taken(queue):
    """The bodies of all that wait, in the order in which turns come."""
    order = b""
    while (each := queue.peek()) is not None:
        queue.next_turn()
        queue.remove(each)
        order += each.body[0]
    return order


def registry_with(*workers, service=b"echo"):
    """A registry, and busy workers of one service in it."""
    registry = Registry()
    made = [Worker((identity,), W02, registry.service(service), 0) for identity in workers]
    for worker in made:
        registry.add_worker(worker)
    return registry, *made


# ── FairQueue ────────────────────────────────────────────────────────────────────────────────────────────────────────


def queue_of(waiting):
    """A queue to which each (client, body) was added in that order."""
    queue = FairQueue()
    for client, body in waiting:
        queue.append(request(client, body))
    return queue


def test_an_empty_queue_has_no_next():
    queue = FairQueue()
    assert queue.peek() is None
    assert queue.size == 0
    queue.next_turn()
    assert queue.size == 0


def test_clients_take_turns():  # C20
    queue = queue_of([(b"c", b"1"), (b"c", b"2"), (b"c", b"3"), (b"d", b"x"), (b"e", b"y"), (b"d", b"z")])
    assert taken(queue) == b"1xy2z3"


def test_a_long_line_does_not_delay_another_client():  # C20
    queue = queue_of([(b"hog", b"h")] * 10_000 + [(b"c", b"!")])
    assert taken(queue)[:3] == b"h!h"


def test_what_came_back_goes_first():  # C17
    queue = queue_of([(b"c", b"2"), (b"d", b"x")])
    queue.prepend(request(b"d", b"w"))
    queue.prepend(request(b"e", b"!"))
    assert taken(queue) == b"!w2x"


def test_peek_takes_nothing():
    queue = queue_of([(b"c", b"1")])
    assert queue.peek() is queue.peek()
    assert queue.size == 1


def test_whoever_leaves_the_queue_does_not_change_the_turns():
    queue = FairQueue()
    gone = request(b"c", b"1")
    queue.append(gone)
    queue.append(request(b"d", b"x"))
    queue.append(request(b"c", b"2"))
    queue.remove(gone)
    assert queue.size == 2
    assert bodies(CLIENTS[b"c"].waiting[queue].requests) == b"2"
    assert taken(queue) == b"2x"
    assert queue not in CLIENTS[b"c"].waiting


# ── Registry ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_service_is_made_once():
    registry = Registry()
    assert registry.service(b"echo") is registry.service(b"echo")
    assert list(registry.services) == [b"echo"]


def test_a_service_with_nothing_left_is_forgotten():
    registry, worker = registry_with(b"w")
    service = worker.service
    registry.forget_if_empty(service)
    assert registry.services == {b"echo": service}

    waiting = request(service=service)
    registry.enqueue(waiting)
    registry.remove_worker(worker)
    registry.forget_if_empty(service)
    assert registry.services == {b"echo": service}

    registry.dequeue(waiting)
    registry.forget_if_empty(service)
    assert registry.services == {}
    registry.forget_if_empty(service)
    assert registry.services == {}


def test_an_idle_worker_leaves_without_a_request():
    registry, worker = registry_with(b"w")
    registry.rest(worker)
    assert list(worker.service.idle) == [worker]
    assert registry.remove_worker(worker) is None
    assert (registry.workers, worker.service.workers, list(worker.service.idle)) == ({}, {}, [])


def test_a_busy_worker_leaves_its_request():
    registry, worker = registry_with(b"w")
    held = request(service=worker.service)
    registry.begin(worker, held)
    assert (worker.request, registry.running, registry.running_for(b"c")) == (held, 1, [held])
    assert registry.remove_worker(worker) is held
    assert (worker.request, registry.running, registry.running_for(b"c")) == (None, 0, [])


def test_what_workers_do_for_a_client_is_known():
    registry, first, second = registry_with(b"w1", b"w2")
    one, two = request(service=first.service), request(service=first.service)
    registry.begin(first, one)
    registry.begin(second, two)
    assert registry.running_for(b"c") == [one, two]
    assert registry.running_for(b"d") == []
    registry.end(first, one)
    assert registry.running_for(b"c") == [two]
    assert registry.running == 1


def test_waiting_requests_are_counted_with_their_bytes():
    registry = Registry()
    waiting = Request(Client(b"id"), (b"hop", b""), C02, registry.service(b"echo"), [b"12345", b"67"])
    assert waiting.charge() == len(b"idhop1234567") + REQUEST_OVERHEAD
    registry.enqueue(waiting)
    assert (registry.queued, registry.queued_bytes) == (1, waiting.size)
    registry.dequeue(waiting)
    assert (registry.queued, registry.queued_bytes) == (0, 0)


def test_the_next_request_is_taken_in_turn():  # C17, C20
    registry = Registry()
    service = registry.service(b"echo")
    for client, body in ((b"c", b"1"), (b"c", b"2"), (b"d", b"x")):
        registry.enqueue(request(client, body, service))
    registry.enqueue(request(b"d", b"!", service), front=True)
    assert bodies(registry.next_request(service) for _ in range(4)) == b"!1x2"
    assert registry.next_request(service) is None
    assert (registry.queued, registry.queued_bytes) == (0, 0)


def test_what_waits_for_a_client_is_found_in_all_services():
    registry = Registry()
    echo, sum_ = registry.service(b"echo"), registry.service(b"sum")
    one, two, three, other = request(service=echo), request(service=sum_), request(service=echo), request(b"d")
    for each in (one, two, three):
        registry.enqueue(each)
    registry.service(other.service.name)
    registry.enqueue(other)
    assert registry.waiting_for(b"c") == [one, three, two]
    registry.dequeue(one)
    assert registry.waiting_for(b"c") == [three, two]
    registry.dequeue(three)
    assert registry.waiting_for(b"c") == [two]
    registry.dequeue(two)
    assert registry.waiting_for(b"c") == []
    assert registry.waiting_for(b"d") == [other]


def test_a_client_is_known_while_it_has_requests():
    registry, worker = registry_with(b"w")
    client = registry.client(b"c")
    assert registry.clients == {}
    one, two = (Request(client, (), C02, worker.service, [b"x"]) for _ in range(2))
    registry.begin(worker, one)
    registry.enqueue(two)
    assert registry.client(b"c") is client
    registry.end(worker, one)
    assert registry.clients == {b"c": client}
    assert registry.next_request(worker.service) is two
    assert registry.clients == {}
    registry.begin(worker, two)  # as one that is handed on
    assert registry.client(b"c") is client


# ── X1 ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_options_count_among_the_bytes_of_a_request():
    options = Options(b'{"wait":false}')
    request = Request(Client(b"id"), b"1", CX1, Service(b"echo"), [b"x"], options=options)
    assert request.charge() == len(b'id1x{"wait":false}') + REQUEST_OVERHEAD


def unwilling(service, body=b"x", client=b"c"):
    """A request that is not to wait when there is no worker."""
    return Request(CLIENTS[client], body, CX1, service, [body], options=Options(wait=False))


def test_those_that_are_not_to_wait_are_known_as_long_as_they_do():
    registry = Registry()
    service = registry.service(b"echo")
    one, two, three = unwilling(service, b"1"), request(body=b"2", service=service), unwilling(service, b"3")
    for each in (one, two, three):
        registry.enqueue(each)
    assert list(service.unwilling) == [one, three]
    registry.dequeue(three)
    assert list(service.unwilling) == [one]
    assert registry.next_request(service) is one
    assert service.unwilling == {}
    registry.enqueue(one, front=True)
    assert list(service.unwilling) == [one]


@pytest.mark.parametrize(
    ("route", "envelope"),
    [
        ((b"c",), ()),
        ((b"c", b""), DELIMITED),
        ((b"c", b"1", b""), b"1"),
        ((b"c", b"1"), (b"1",)),
        ((b"c", b"1", b"x"), (b"1", b"x")),
        ((b"c", b"hop", b"1", b""), (b"hop", b"1", b"")),
    ],
)
def test_a_request_knows_its_route_again(route, envelope):
    assert envelope_of(route) == envelope
    assert request(envelope=envelope_of(route)).route == route


def test_what_many_have_in_front_is_one_copy():
    assert envelope_of((b"c", b"")) is envelope_of((b"d", b""))


def test_a_number_that_ended_is_free_and_remembered():
    registry = Registry()
    route = (b"c", b"1", b"")
    outstanding = unwilling(registry.service(b"echo"), b"1")
    registry.enqueue(outstanding)
    outstanding.client.numbered[b"1"] = outstanding
    assert registry.numbered == {route: outstanding}
    assert registry.numbered_as(route) is outstanding
    assert registry.numbered_as((b"c", b"2", b"")) is registry.numbered_as((b"nobody", b"1", b"")) is None
    assert not registry.ended_lately(route)
    registry.end_number(outstanding)
    assert registry.numbered == {}
    assert registry.ended_lately(route)
    assert not registry.ended_lately((b"d", b"1", b""))


def test_at_least_so_many_numbers_are_remembered_and_at_most_twice_as_many():
    registry = Registry()
    for number in range(5 * REMEMBERED):
        registry.remember((b"c", b"%d" % number, b""))
        oldest = max(0, number - REMEMBERED + 1)
        assert registry.ended_lately((b"c", b"%d" % oldest, b""))
        assert not registry.ended_lately((b"c", b"%d" % (number - 2 * REMEMBERED), b""))
