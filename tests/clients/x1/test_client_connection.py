"""An X1 client's connection, stepped by hand against a ROUTER, and how few messages its dialogs send."""

import asyncio
import errno
import select
import time
from itertools import count

import pytest
import zmq
from support.processes import TIMEOUT_MS, TIMEOUT_SECONDS, eventually
from support.x1_broker import replies, requests
from support.x1_client import DISCONNECT, HEARTBEAT

from zmdp.clients import AsyncClient
from zmdp.clients.x1.client_connection import MAX_BYTES, MAX_UNREAD, MAX_UNREAD_LARGE, ClientConnection
from zmdp.clients.x1.session import ClientSession
from zmdp.mdp.errors import RequestTimeout
from zmdp.mdp.transport.multipart import receive

ECHO = b"echo"


@pytest.fixture
def router(context):
    with context.socket(zmq.ROUTER) as router:
        router.linger = 10_000
        router.rcvtimeo = TIMEOUT_MS
        router.bind("tcp://127.0.0.1:*")
        yield router


def deliver(events):
    for call, outcome in events:
        call.receiver.append(outcome)


@pytest.fixture
def connection(router, context):
    made = ClientConnection(ClientSession([router.last_endpoint.decode()]), context, deliver)
    yield made
    made.drop()


def ask(connection, outcomes):
    connection.session.request(ECHO, [b"body"], time.monotonic(), receiver=outcomes)


def take(router):
    """The requests in the next message."""
    return requests(router.recv_multipart())


def answer(router, *bodies):
    """Reply to the requests in the next message, with one message per reply."""
    for asked, body in zip(take(router), bodies, strict=True):
        router.send_multipart(replies((asked, [body])))


def step_until(connection, condition):
    def stepped():
        connection.step(time.monotonic())
        return condition()

    eventually(stepped)


def test_replies_that_arrived_before_the_end_are_delivered(router, connection):
    connection.step(time.monotonic())  # from then on the monitor's descriptor tells
    outcomes = []
    ask(connection, outcomes)
    connection.step(time.monotonic())
    answer(router, b"reply")
    descriptor = zmq.Poller()
    descriptor.register(connection.descriptors()[1], zmq.POLLIN)
    router.close()
    assert descriptor.poll(TIMEOUT_MS)
    connection.monitor_reported = True
    connection.step(time.monotonic())
    assert outcomes == [[b"reply"]]
    step_until(connection, lambda: connection.session.lost)


def test_more_replies_before_the_end_than_a_step_receives(router, connection, monkeypatch):
    monkeypatch.setattr("zmdp.clients.x1.client_connection.MAX_MESSAGES", 3)
    outcomes = []
    for _ in range(10):
        ask(connection, outcomes)
    connection.step(time.monotonic())
    for number, asked in enumerate(take(router)[:8]):
        router.send_multipart(replies((asked, [b"%d" % number])))
    router.close()
    while len(outcomes) < 8:
        connection.monitor_reported = True
        connection.step(time.monotonic())
    assert outcomes == [[b"%d" % number] for number in range(8)]
    connection.monitor_reported = True
    step_until(connection, lambda: connection.session.lost)


def test_replies_are_delivered_before_many_more_are_received(router, connection, monkeypatch):
    monkeypatch.setattr("zmdp.clients.x1.client_connection.MAX_EVENTS", 3)
    outcomes = []
    for _ in range(100):
        ask(connection, outcomes)
    connection.step(time.monotonic())
    for number, asked in enumerate(take(router)[:100]):
        router.send_multipart(replies((asked, [b"%d" % number])))
    while len(outcomes) < 100:
        before = len(outcomes)
        connection.step(time.monotonic())
        assert len(outcomes) - before <= 3
    assert outcomes == [[b"%d" % number] for number in range(100)]


def test_libzmq_reads_less_ahead_once_large_replies_come(router, connection):
    outcomes = []
    for _ in range(4):
        ask(connection, outcomes)
    socket = connection._current.socket
    connection.step(time.monotonic())
    asked = take(router)
    router.send_multipart(replies((asked[0], [b"small"])))
    step_until(connection, lambda: outcomes)
    assert socket.get(zmq.RCVHWM) == MAX_UNREAD
    for each in asked[1:]:
        router.send_multipart(replies((each, [bytes(MAX_BYTES)])))
    step_until(connection, lambda: len(outcomes) == 4)
    assert socket.get(zmq.RCVHWM) == MAX_UNREAD_LARGE


def test_replies_that_arrived_while_the_process_was_held_up_are_not_late(router, connection, monkeypatch):
    monkeypatch.setattr("zmdp.clients.x1.client_connection.MAX_EVENTS", 3)
    outcomes = []
    for _ in range(100):
        connection.session.request(ECHO, [b"body"], time.monotonic(), timeout=60.0, receiver=outcomes)
    connection.step(time.monotonic())
    for number, asked in enumerate(take(router)[:100]):
        router.send_multipart(replies((asked, [b"%d" % number])))
    left = iter(range(100))

    def receive(socket):
        """Return what has arrived: by now, all replies have."""
        return None if next(left, None) is None else socket.recv_multipart()

    monkeypatch.setattr("zmdp.clients.x1.client_connection.receive", receive)
    while len(outcomes) < 100:
        connection.step(time.monotonic() + 120.0)
    assert outcomes == [[b"%d" % number] for number in range(100)]


def test_replies_that_reach_the_socket_after_the_process_was_held_up_are_not_late(router, connection):
    outcomes = []
    for _ in range(3):
        connection.session.request(ECHO, [b"body"], time.monotonic(), timeout=60.0, receiver=outcomes)
    connection.step(time.monotonic())
    asked, later = take(router), time.monotonic() + 120.0

    def answered(number):
        connection.step(later)
        return len(outcomes) >= number

    for number, each in enumerate(asked, 1):  # libzmq reads ahead only so many: the next come when these are taken
        router.send_multipart(replies((each, [b"reply"])))
        eventually(lambda: answered(number))  # noqa: B023 - called in this turn
        assert outcomes == [[b"reply"]] * number


@pytest.fixture
def inproc(router, context):
    """A connection at which messages have arrived as soon as they are sent."""
    router.bind("inproc://router")
    made = ClientConnection(ClientSession(["inproc://router"]), context, deliver)
    yield made
    made.drop()


def test_due_work_is_done_while_messages_keep_arriving(router, inproc, monkeypatch):
    connection = inproc
    monkeypatch.setattr("zmdp.clients.x1.client_connection.MAX_EVENTS", 3)
    outcomes = []
    now = time.monotonic()
    stream = connection.session.request(ECHO, [b"body"], now, stream=True, receiver=[])
    connection.session.request(ECHO, [b"body"], now, timeout=60.0, receiver=outcomes)
    connection.step(now)
    asked = take(router)[0]
    assert not stream.ended
    for number in range(30):
        router.send_multipart(replies((asked, [b"%d" % number]), final=False))
    for seconds in (120.0, 120.0, 120.0, 122.0, 122.0, 122.0):  # at first, it was held up
        connection.step(now + seconds)
    assert [type(each) for each in outcomes] == [RequestTimeout]


@pytest.mark.pure_only  # compiled code does not look up its own methods
def test_the_monitor_is_asked_only_when_it_is_new_or_has_reported(router, connection, monkeypatch):
    del router
    asked = count()
    ended = connection._ended
    monkeypatch.setattr(connection, "_ended", lambda here: next(asked) * 0 or ended(here))
    outcomes = []
    for _ in range(10):
        ask(connection, outcomes)
        connection.step(time.monotonic())
    assert next(asked) == 1
    connection.monitor_reported = True
    connection.step(time.monotonic())
    assert next(asked) == 3


def test_after_the_last_reply_nothing_more_is_received(router, connection, monkeypatch):
    looks = count()
    monkeypatch.setattr(
        "zmdp.clients.x1.client_connection.receive",
        lambda socket: (message := receive(socket)) and (next(looks), message)[1],
    )
    outcomes = []
    ask(connection, outcomes)
    connection.step(time.monotonic())
    answer(router, b"reply")
    step_until(connection, lambda: outcomes)
    assert next(looks) == 1
    assert not connection.session.outstanding


def test_outcomes_are_delivered_together(router, context):
    deliveries = []
    connection = ClientConnection(ClientSession([router.last_endpoint.decode()]), context, deliveries.append)
    for _ in range(10):
        ask(connection, None)
    connection.step(time.monotonic())
    router.send_multipart(replies(*((asked, [b"reply"]) for asked in take(router))))
    step_until(connection, lambda: deliveries)
    (delivered,) = deliveries
    assert [(call.number, outcome) for call, outcome in delivered] == [(n, [b"reply"]) for n in range(1, 11)]
    connection.drop()


def test_requests_of_one_turn_of_the_loop_are_one_message(router):
    """The first request is sent at once, because nothing else is outstanding; then all others are sent together."""

    async def scenario():
        async with AsyncClient(router.last_endpoint.decode(), timeout=TIMEOUT_SECONDS) as client:
            asking = [asyncio.create_task(client.request("echo", b"%d" % n)) for n in range(100)]
            for _ in range(2):
                await asyncio.sleep(0)
            first, others = take(router), take(router)
            assert [asked.body for asked in first + others] == [[b"%d" % n] for n in range(100)]
            assert len(first) == 1
            assert not router.poll(0)
            router.send_multipart(replies(*((asked, asked.body) for asked in first + others)))
            assert await asyncio.gather(*asking) == [[b"%d" % n] for n in range(100)]

    asyncio.run(scenario())


def test_requests_made_when_replies_arrive_are_one_message(router):
    """It takes one turn of the event loop: the message is sent at the end of the turn in which the tasks run."""
    turns = count()

    async def ask_twice(client, number):
        await client.request("echo", b"%d" % number)
        next(turns)
        await client.request("echo", b"again %d" % number)

    async def scenario():
        async with AsyncClient(router.last_endpoint.decode(), timeout=TIMEOUT_SECONDS) as client:
            asking = [asyncio.create_task(ask_twice(client, n)) for n in range(10)]
            for _ in range(2):
                await asyncio.sleep(0)
            first, others = take(router), take(router)
            router.send_multipart(replies(*((asked, asked.body) for asked in first + others)))
            while not router.poll(0):
                await asyncio.sleep(0)
            assert next(turns) == 10
            assert [asked.body for asked in take(router)] == [[b"again %d" % n] for n in range(10)]
            for task in asking:
                task.cancel()

    asyncio.run(scenario())


def test_a_silent_broker_is_sent_a_bare_header(router):
    async def scenario():
        async with AsyncClient(
            router.last_endpoint.decode(), timeout=TIMEOUT_SECONDS, heartbeat=0.01, liveness=100_000
        ) as client:
            asking = asyncio.create_task(client.request("echo"))
            (asked,) = await asyncio.to_thread(take, router)
            heartbeat = await asyncio.to_thread(router.recv_multipart)
            assert heartbeat == [asked.sender, b"", b"MDPCX1"]
            router.send_multipart(replies((asked, [b"x"])))
            assert await asking == [b"x"]

    asyncio.run(scenario())


def test_a_socket_that_cannot_be_opened_is_not_tried_again_at_once(router, connection, monkeypatch):
    """Even if the broker before it had answered, after which a client reconnects at once."""
    outcomes = []
    ask(connection, outcomes)
    connection.step(time.monotonic())
    answer(router, b"reply")
    step_until(connection, lambda: outcomes)

    def fail(*arguments):
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr("zmdp.mdp.transport.monitored.MonitoredDealer.__init__", fail)
    session = connection.session
    ask(connection, outcomes)
    now = time.monotonic()
    session.lose("the broker closed the connection", now)
    assert session.retry_at == now
    connection.step(now)
    assert session.lost == "Too many open files"
    assert session.retry_at > now


# ── several brokers ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def second(context):
    with context.socket(zmq.ROUTER) as second:
        second.linger = 0
        second.rcvtimeo = TIMEOUT_MS
        second.bind("tcp://127.0.0.1:*")
        yield second


@pytest.fixture
def pair(router, second, context):
    """A connection to the first of two brokers, stepped once."""

    def deliver(events):
        for call, outcome in events:
            call.receiver.append(outcome)

    endpoints = [each.last_endpoint.decode() for each in (router, second)]
    made = ClientConnection(ClientSession(endpoints), context, deliver)
    made.step(time.monotonic())
    yield made
    made.close(time.monotonic())


def step_while_needed(connection):
    while connection.step(time.monotonic()):
        pass


def readable(*descriptors):
    """Wait until one of these is readable."""
    poller = select.poll()
    for each in descriptors:
        poller.register(each, select.POLLIN)
    return bool(poller.poll(TIMEOUT_MS))


def asked_twice(connection, router):
    """Make two requests; return the list of their outcomes, and the requests as the broker gets them."""
    outcomes = []
    for _ in range(2):
        ask(connection, outcomes)
    connection.step(time.monotonic())
    return outcomes, take(router)


@pytest.mark.parametrize("reported", [False, True], ids=["not reported", "reported"])
def test_what_arrived_after_disconnect_is_received_in_the_same_turn(router, second, pair, reported):
    """Also if the event loop was held up until the connection had ended: then the monitor has reported it already."""
    outcomes, asked = asked_twice(pair, router)
    monitor = pair.descriptors()[1]
    router.send_multipart([asked[0].sender, *DISCONNECT])
    router.send_multipart(replies((asked[0], [b"reply"])))
    router.close()
    assert readable(monitor)  # so everything before has arrived
    pair.monitor_reported = reported
    step_while_needed(pair)
    assert outcomes == [[b"reply"]]
    assert [again.number for again in take(second)] == [asked[1].number]


def test_the_end_is_seen_before_what_arrived_last(router, second, pair):
    """The monitor has reported the end, which it does only once, when DISCONNECT is read."""
    outcomes, asked = asked_twice(pair, router)
    monitor = pair.descriptors()[1]
    router.send_multipart([asked[0].sender, *DISCONNECT])
    router.send_multipart(replies((asked[0], [b"reply"])))
    router.close()
    assert readable(monitor)
    pair._check_monitor(pair._current, time.monotonic())
    step_while_needed(pair)
    assert outcomes == [[b"reply"]]
    assert [again.number for again in take(second)] == [asked[1].number]


def test_the_descriptors_of_an_old_connection_report_what_arrives(router, pair):
    outcomes, asked = asked_twice(pair, router)
    router.send_multipart([asked[0].sender, *DISCONNECT])
    step_until(pair, lambda: pair.descriptors()[2])
    for each in asked:
        step_while_needed(pair)
        before = len(outcomes)
        router.send_multipart(replies((each, [b"reply"])))
        while len(outcomes) == before:
            assert readable(*pair.descriptors()[2])
            step_while_needed(pair)
    assert outcomes == [[b"reply"]] * 2
    assert pair.descriptors()[2] == []


def test_a_request_is_cancelled_at_once_over_an_old_connection(router, pair):
    call, _ = (pair.session.request(ECHO, [b"body"], time.monotonic(), receiver=[]) for _ in range(2))
    pair.step(time.monotonic())
    sender = take(router)[0].sender
    router.send_multipart([sender, *DISCONNECT])
    step_until(pair, lambda: pair.descriptors()[2])
    step_while_needed(pair)
    assert not pair.unsent
    pair.session.cancel(call)
    assert pair.unsent
    pair.step(time.monotonic())
    record = b"\0\0\0\x09\x05" + bytes(7) + b"\1"
    assert router.recv_multipart() == [sender, b"", b"MDPCX1", b"\x09", record]


def test_the_descriptor_of_a_probe_reports_its_answer(router, pair, second, monkeypatch):
    monkeypatch.setattr("zmdp.mdp.transport.failover.PROBE_INTERVAL", (0.0, 0.0))
    _, asked = asked_twice(pair, router)
    router.send_multipart([asked[0].sender, *DISCONNECT])
    step_until(pair, lambda: len(pair.descriptors()[2]) == 3)  # the old connection has two
    probe = pair.descriptors()[2][-1]
    sender, *message = router.recv_multipart()
    assert message == HEARTBEAT
    step_while_needed(pair)
    router.send_multipart([sender, *message])
    while pair.endpoint == second.last_endpoint.decode():
        assert readable(probe)
        step_while_needed(pair)
    assert probe not in pair.descriptors()[2]


def test_a_probe_that_cannot_be_made_is_an_unanswered_one(router, pair, monkeypatch):
    class Failing:
        def __init__(self, endpoint, context, keys):
            tried.append(endpoint)
            raise zmq.ZMQError(errno.EMFILE)

    tried = []
    monkeypatch.setattr("zmdp.mdp.transport.failover.PROBE_INTERVAL", (0.001, 0.001))
    monkeypatch.setattr("zmdp.clients.x1.client_connection.Probe", Failing)
    _, asked = asked_twice(pair, router)
    router.send_multipart([asked[0].sender, *DISCONNECT])
    step_until(pair, lambda: len(tried) > 1)
    assert set(tried) == {router.last_endpoint.decode()}
