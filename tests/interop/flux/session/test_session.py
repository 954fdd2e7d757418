"""The machine of a Flux connection: bytes in, effects out, compared as whole values."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmdp.clients.calls.reply import Reply
from zmdp.interop.flux.instance.instance import MAX_FOUND, Found, Instance
from zmdp.interop.flux.instance.topology import BrokerTree
from zmdp.interop.flux.session import subscriptions
from zmdp.interop.flux.session.effects import Answer, Begin, Cancel, Close, Fail, Offer, Withdraw
from zmdp.interop.flux.session.programs import MAX_SERVICES
from zmdp.interop.flux.session.session import EVENT_SECONDS, PROBE_SECONDS, FluxSession
from zmdp.interop.flux.wire.errnos import failure, reported
from zmdp.interop.flux.wire.framing import BIG, LITTLE, encode
from zmdp.interop.flux.wire.messages import EAGAIN, Event, FluxRequest, Response
from zmdp.interop.flux.wire.messages import encode as parts_of
from zmdp.interop.flux.wire.payloads import body_of, payload_of
from zmdp.mdp import wire
from zmdp.mdp.errors import (
    BrokerUnreachable,
    ClosedError,
    RequestCancelled,
    RequestRejected,
    RequestTimeout,
    RetryLater,
    ServiceError,
    ServiceNotFound,
    SettingError,
    StreamInterrupted,
    WorkerLost,
)
from zmdp.workers.session.request import Request

OWNER, GUEST = 5, 6
GATEWAY = "flux.gateway." + "0" * 32
OTHER = "flux.gateway." + "1" * 32
MISSING = ServiceNotFound("no worker", service="x", code=404, text="no worker")
TREE = BrokerTree("a", {"root": None, "a": "root", "b": "root"})


class Departures:
    """Records who is watched."""

    service = GATEWAY

    def __init__(self):
        self.present, self.watched = set(), {}

    def arrived(self, client):
        self.present.add(client)

    def left(self, client):
        self.present.discard(client)

    def watch(self, gateway, client, gone):
        self.watched[gateway, client] = gone

    def forget(self, gateway, client, gone):
        assert self.watched.pop((gateway, client), gone) == gone


@pytest.fixture
def instance():
    return made()


def made(seen=None):
    instance = Instance(Departures(), "local:///x")
    instance.owner = 500
    if seen is not None:
        instance.topology.update(seen)
        instance.broker = seen.own
    return instance


@pytest.fixture
def session(instance):
    return FluxSession(instance, 500)


def data(message, order=LITTLE):
    return encode(parts_of(message), order)


def call(session, **settings):
    """Feed a request; return what follows."""
    return tell(session.receive, data(FluxRequest(**settings)))


def tell(method, *told):
    """Tell a session something; return what follows."""
    method(*told)
    return taken(method.__self__)


def taken(session):
    """Return the effects, and before the end of the connection the messages."""
    effects = session.take_events()
    end = [each for each in effects if isinstance(each, Close)]
    return [*(each for each in effects if each not in end), *session.take_messages(), *end]


def response(topic, payload=None, errnum=0, matchtag=1, order=LITTLE, **settings):
    settings = {"routes": (), "userid": 500, "rolemask": OWNER, **settings}
    return data(Response(topic, payload, matchtag, errnum, **settings), order)


def options(session, topic, userid=500, rolemask=OWNER, **more):
    return {
        "flux": {"userid": userid, "rolemask": rolemask, "topic": topic, "matchtag": 1, "client": session.uuid,
                 "gateway": GATEWAY, **more}
    }  # fmt: skip


def reply(*frames, final=True):
    return Reply(frames, service="x", final=final)


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", [LITTLE, BIG])
def test_a_call_tries_the_whole_topic_and_then_its_first_word(session, order):
    request = FluxRequest("calc.add", b'{"x":1}\0', 1, userid=0, rolemask=1)
    expected = {"wait": False, "options": options(session, "calc.add")}
    assert tell(session.receive, data(request, order)) == [Begin(1, "calc.add", [b'{"x":1}'], **expected)]
    assert tell(session.answered, 1, MISSING) == [Begin(1, "calc", [b'{"x":1}'], **expected)]
    assert tell(session.answered, 1, reply(b'{"y":2}')) == [response("calc.add", b'{"y":2}\0', order=order)]
    assert tell(session.answered, 1, reply(b"late")) == []
    # From now on the first word is tried first.
    assert call(session, topic="calc.add", matchtag=1)[0].service == "calc"
    assert tell(session.answered, 2, MISSING)[0].service == "calc.add"
    text = b"No service matching calc.add is registered\0"
    assert tell(session.answered, 2, MISSING) == [response("calc.add", text, 38)]
    assert call(session, topic="calc.add", matchtag=1)[0].service == "calc.add"


def test_an_incomplete_message_is_freed_when_its_connection_ends(session):
    tell(session.receive, data(FluxRequest("svc.a", bytes(1000), 1))[:500])
    assert session.buffered == 500
    tell(session.ended)
    assert session.buffered == 0


def test_what_cannot_be_a_services_name_is_not_found(session):
    assert call(session, topic="a\n.b", matchtag=1)[0].service == "a\n.b"
    assert tell(session.answered, 1, SettingError("no name"))[0].service == "a\n"
    assert tell(session.answered, 1, SettingError("no name")) == [
        response("a\n.b", b"No service matching a\n.b is registered\0", 38)
    ]  # fmt: skip


def test_streaming_and_routes_travel_with_the_request_and_return(session):
    [begin] = call(session, topic="s", matchtag=9, streaming=True, routes=(b"one", b"two"), user1=True)
    expected = options(session, "s", matchtag=9, streaming=True, routes=["one", "two"])
    assert begin == Begin(1, "s", [b""], wait=False, options=expected)
    same = {"matchtag": 9, "routes": (b"one", b"two"), "streaming": True, "user1": True}
    assert tell(session.answered, 1, reply(b"1", final=False)) == [response("s", b"1", **same)]
    assert tell(session.answered, 1, reply(b"", final=False)) == [response("s", None, **same)]
    assert tell(session.answered, 1, reply(b"2", b"3")) == [
        response("s", b"23", **same),
        response("s", None, 61, **same),
    ]


def test_invalid_messages_end_the_connection_after_what_came_before(session):
    good = data(FluxRequest("attr.get", b'{"name":"rank"}\0', 1))
    assert tell(session.receive, good + b"nonsense") == [
        response("attr.get", b'{"value":"0","flags":1}\0'), Close("not a Flux message: wrong magic")
    ]  # fmt: skip


def test_nodeids_choose_brokers(instance):
    instance = made(TREE)
    session = FluxSession(instance, 500)

    def tried(**settings):
        number = session._last_number + 1
        effects, found = call(session, topic="x", matchtag=1, **settings), []
        while isinstance(effects[0], Begin):
            found.append(effects[0].options.get("broker"))
            effects = tell(session.answered, number, MISSING)
        return found, effects

    text = b"No service matching x is registered\0"
    assert tried() == ([None], [response("x", text, 38)])
    assert tried(nodeid=0) == (["root"], [response("x", text, 38)])
    assert tried(nodeid=1) == (["a"], [response("x", text, 38)])
    assert tried(nodeid=3) == ([], [response("x", None, 113)])
    assert tried(nodeid=1, upstream=True) == (["root"], [response("x", text, 38, upstream=True)])
    assert tried(nodeid=2, upstream=True) == ([None], [response("x", text, 38, upstream=True)])
    instance.topology.update(BrokerTree("a", {"a": None, "b": "a"}))
    assert tried(nodeid=0) == ([], [response("x", None, 113)])
    assert tried(nodeid=1, upstream=True) == ([], [response("x", None, 113, upstream=True)])


# ── what the gateway answers ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_ping_of_a_program_is_answered_by_it_and_of_a_service_by_the_gateway(session, instance):
    ping = b'{"seq":0,"pad":""}\0'
    [begin] = call(session, topic="a.b.ping", payload=ping, matchtag=1)
    assert begin == Begin(1, "a.b.ping", [ping[:-1]], wait=False, options=options(session, "a.b.ping"))
    assert tell(session.answered, 1, MISSING)[0].service == "a.ping"
    [begin] = tell(session.answered, 1, MISSING)
    assert (begin.number, begin.service, begin.body) == (2, "mmi.service", [b"a.b"])
    route = f"{session.uuid[:8]}!{instance.uuid[:8]}"
    pong = f'{{"seq":0,"pad":"","userid":500,"rolemask":5,"rank":0,"route":"{route}"}}\0'.encode()
    assert tell(session.answered, 2, reply(b"200")) == [response("a.b.ping", pong)]
    call(session, topic="x.ping", payload=ping, matchtag=1)
    tell(session.answered, 3, MISSING)
    assert tell(session.answered, 4, reply(b"403")) == [response("x.ping", None, 1)]
    call(session, topic="x.ping", payload=ping, matchtag=1)
    assert tell(session.answered, 5, reply(b'{"mine":1}')) == [response("x.ping", b'{"mine":1}\0')]
    call(session, topic="broker.ping", payload=ping, matchtag=1)
    assert tell(session.answered, 6, WorkerLost("gone", code=502, text="gone")) == [
        response("broker.ping", b"gone\0", 113)
    ]
    call(session, topic="x.ping", payload=ping, matchtag=1)
    tell(session.answered, 7, MISSING)
    missing = response("x.ping", b"No service matching x.ping is registered\0", 38)
    assert tell(session.answered, 8, reply(b"404")) == [missing]


def test_cancelling(session):
    call(session, topic="x.watch", matchtag=3, streaming=True)
    call(session, topic="y.watch", matchtag=3)
    assert call(session, topic="x.cancel", payload=b'{"matchtag":3}\0', noresponse=True) == [
        Cancel(1), response("x.watch", None, 61, 3, streaming=True)
    ]  # fmt: skip
    assert tell(session.answered, 1, reply(b"late")) == []
    assert call(session, topic="x.cancel", payload=b'{"matchtag":3}\0', noresponse=True) == []
    assert call(session, topic="y.cancel", payload=b'{"matchtag":3}\0', matchtag=4) == [
        Cancel(2), response("y.watch", None, 125, 3), response("y.cancel", None, 0, 4)
    ]  # fmt: skip
    assert call(session, topic="y.cancel", matchtag=5)[0].service == "y.cancel"  # a method of that name
    assert call(session, topic="y.disconnect", noresponse=True) == []
    assert call(session, topic="y.disconnect", matchtag=6)[0].service == "y.disconnect"


def test_events_are_published_for_the_user_of_the_connection(session):
    credentials = {"flux": {"userid": 500, "rolemask": 5}}
    body = b'{"topic":"a.b","flags":32,"payload":"eAA="}'
    begin = Begin(1, "flux.events", [body], EVENT_SECONDS, options=credentials)
    assert call(session, topic="event.publish", payload=body + b"\0", matchtag=1) == [begin]
    assert tell(session.answered, 1, reply(b'{"seq":7}')) == [response("event.publish", b'{"seq":7}\0')]
    begin = Begin(2, "flux.events", [body], EVENT_SECONDS, options=credentials, detached=True)
    assert tell(session.receive, data(Event("a.b", b"x\0", private=True, userid=1, rolemask=1))) == [begin]
    assert tell(session.answered, 2, reply(b'{"seq":8}')) == []


def test_subscriptions_are_confirmed_when_events_arrive(session, instance):
    changes, delivered = [], []
    instance.subscribers.changed = lambda: changes.append(bool(instance.subscribers))
    session.output.wake = lambda: delivered.extend(taken(session))
    assert call(session, topic="event.subscribe", payload=b'{"topic":"a"}\0', matchtag=1) == []
    assert call(session, topic="event.subscribe", payload=b'{"topic":"b"}\0', matchtag=2) == []
    assert changes == [True]
    instance.subscribers.ready = True
    instance.subscribers.subscribed()
    assert delivered == [response("event.subscribe"), response("event.subscribe", matchtag=2)]
    assert call(session, topic="event.subscribe", payload=b'{"topic":"a"}\0', matchtag=3) == [
        response("event.subscribe", matchtag=3)
    ]  # fmt: skip
    delivered.clear()
    for event in (Event("abc", b"x", 1), Event("c", b"x", 2)):
        instance.subscribers.deliver(event)
    assert delivered == [data(Event("abc", b"x", 1))]
    for _ in range(2):
        assert call(session, topic="event.unsubscribe", payload=b'{"topic":"a"}\0', matchtag=1)
    assert changes == [True]
    call(session, topic="event.unsubscribe", payload=b'{"topic":"b"}\0', matchtag=1)
    assert changes == [True, False]
    tell(session.ended)
    assert changes == [True, False]


def test_a_connection_has_so_many_subscriptions_and_no_more(session, instance, monkeypatch):
    monkeypatch.setattr(subscriptions, "MAX_SUBSCRIPTIONS", 3)
    refused = [response("event.subscribe", None, EAGAIN)]
    for topic in (b"a", b"a", b"b"):
        assert call(session, topic="event.subscribe", payload=b'{"topic":"%s"}\0' % topic, matchtag=1) == []
    assert call(session, topic="event.subscribe", payload=b'{"topic":"a"}\0', matchtag=1) == refused
    # Neither does it help to end some: those that wait to be confirmed take memory too.
    assert call(session, topic="event.unsubscribe", payload=b'{"topic":"b"}\0', matchtag=1)
    assert call(session, topic="event.subscribe", payload=b'{"topic":"b"}\0', matchtag=1) == refused
    instance.subscribers.ready = True
    instance.subscribers.subscribed()
    assert taken(session) == 3 * [response("event.subscribe")]
    assert call(session, topic="event.subscribe", payload=b'{"topic":"b"}\0', matchtag=1) == [
        response("event.subscribe")
    ]


def test_a_subscription_that_ends_before_it_was_confirmed_is_confirmed(session):
    call(session, topic="event.subscribe", payload=b'{"topic":"a"}\0', matchtag=1)
    assert call(session, topic="event.unsubscribe", payload=b'{"topic":"a"}\0', matchtag=2) == [
        response("event.subscribe"), response("event.unsubscribe", matchtag=2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("userid", "rolemask", "seen"), [(7, GUEST, [7, 7]), (8, GUEST, [7]), (500, OWNER, [7, 7]), (8, OWNER, [7, 7])]
)
def test_private_events_reach_their_publisher_and_owners(instance, userid, rolemask, seen):
    session, delivered = FluxSession(instance, userid, rolemask), []
    session.output.wake = lambda: delivered.extend(taken(session))
    instance.subscribers.ready = True
    call(session, topic="event.subscribe", payload=b'{"topic":""}\0', matchtag=1)
    instance.subscribers.deliver(Event("a", None, 1, userid=7, rolemask=2))
    instance.subscribers.deliver(Event("a", None, 2, userid=7, rolemask=2, private=True))
    assert len(delivered) == len(seen)


# ── programs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def add(session, name):
    return call(session, topic="service.add", payload=b'{"service":"%s"}\0' % name.encode(), matchtag=1)


def asked(session, number, *frames, service="svc", **flux):
    given = wire.Options(json.dumps({"flux": flux}).encode())
    return tell(session.asked, number, Request(frames, service=service, client=b"addr", options=given))


@pytest.fixture
def program(session):
    """A session that offers `svc`."""
    add(session, "svc")
    tell(session.answered, 1, reply(b"200"))
    return session


def test_a_service_is_confirmed_once_the_broker_knows_it(session):
    offers = [Offer("svc.ping"), Offer("svc")]
    begin = Begin(1, "mmi.service", [b"svc"], wait=False, options={"flux": {}})
    assert add(session, "svc") == [*offers, begin]
    assert tell(session.answered, 1, reply(b"404")) == [
        Begin(1, "svc", [b""], PROBE_SECONDS, options={"flux": {"probe": True}})
    ]  # fmt: skip
    assert asked(session, 5, b"", probe=True) == [Answer(5, [b""], final=True)]
    assert tell(session.answered, 1, reply(b"")) == [response("service.add")]
    add(session, "other")
    assert tell(session.answered, 2, reply(b"200")) == [response("service.add")]
    add(session, "forbidden")
    assert tell(session.answered, 3, reply(b"403")) == [
        Withdraw("forbidden.ping"), Withdraw("forbidden"), response("service.add", None, 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "errnum"),
    [
        (RequestTimeout("", code=408, text="late"), 110),
        (RequestRejected("", code=403, text="late"), 1),
    ],
)
def test_a_service_that_the_broker_refuses_is_withdrawn(session, instance, error, errnum):
    add(session, "svc")
    [begin] = tell(session.answered, 1, WorkerLost("", code=502, text="lost"))
    assert begin.options == {"flux": {"probe": True}}
    assert tell(session.answered, 1, error) == [
        Withdraw("svc.ping"), Withdraw("svc"), response("service.add", b"late\0", errnum)
    ]  # fmt: skip
    assert not instance.programs
    assert isinstance(add(session, "svc")[0], Offer)


def test_a_service_that_cannot_be_offered_is_not_added(session, instance):
    add(session, "svc")
    assert tell(session.refused, "svc.ping", "Too many open files") == [
        Withdraw("svc.ping"), Withdraw("svc"), Cancel(1), response("service.add", b"Too many open files\0", 11)
    ]  # fmt: skip
    assert tell(session.refused, "svc", "Too many open files") == []
    assert not instance.programs


def test_a_connection_offers_so_many_services_and_no_more(session, instance):
    for number in range(MAX_SERVICES):
        assert isinstance(add(session, f"x{number}")[0], Offer)
    assert add(session, "y") == [response("service.add", None, 11)]
    tell(session.ended)
    assert instance.programs == set()
    assert instance.departures.present == set()


def test_all_connections_together_offer_so_many_services_and_no_more():
    instance = Instance(Departures(), max_services=2)
    one, two = FluxSession(instance, 500), FluxSession(instance, 500)
    for session in (one, two):
        assert isinstance(add(session, f"x{len(instance.programs)}")[0], Offer)
    assert add(one, "y") == add(two, "y") == [response("service.add", None, 11, userid=instance.owner)]
    tell(two.ended)
    assert isinstance(add(one, "y")[0], Offer)


def test_guests_offer_services_under_their_own_number(instance):
    session = FluxSession(instance, 77, GUEST)
    assert add(session, "svc") == [response("service.add", None, 1)]
    assert isinstance(add(session, "77-svc")[0], Offer)


def test_requests_reach_the_program_and_its_responses_their_clients(program):
    passed = {"topic": "svc.a", "userid": 9, "rolemask": 2, "matchtag": 4, "client": "cl", "gateway": OTHER}
    expected = FluxRequest("svc.a", b'{"x":1}\0', 4, routes=(b"3", b"cl"), userid=9, rolemask=2)
    assert asked(program, 3, b'{"x":1}', **passed) == [data(expected)]
    answer = Response("svc.a", b'{"y":2}\0', 4, routes=(b"3", b"cl"))
    assert tell(program.receive, data(answer)) == [Answer(3, [b'{"y":2}'], final=True)]
    assert tell(program.receive, data(answer)) == []
    asked(program, 4, b"", **passed)
    failed = Response("svc.a", b"no\0", 4, 22, routes=(b"4", b"cl"))
    assert tell(program.receive, data(failed)) == [Fail(4, 500, "no", b'{"errnum":22}')]
    asked(program, 5, b"", **passed)
    assert tell(program.receive, data(Response("svc.a", None, 4, 38, routes=(b"5",)))) == [
        Fail(5, 404, "errno 38", b'{"errnum":38}')
    ]  # fmt: skip
    asked(program, 6, b"", **passed)
    assert tell(program.withdrawn, 6) == []  # it is no stream
    assert tell(program.withdrawn, 6) == []


def test_streams_of_the_program(program):
    passed = {"topic": "svc.a", "matchtag": 4, "client": "cl", "gateway": OTHER, "streaming": True, "routes": ["far"]}
    routes = (b"3", b"cl", b"far")
    expected = FluxRequest("svc.a", None, 4, routes=routes, rolemask=1, streaming=True)
    assert asked(program, 3, b"", **passed) == [data(expected)]
    part = Response("svc.a", b"1", 4, routes=routes, streaming=True)
    assert tell(program.receive, data(part)) == [Answer(3, [b"1"], final=False)]
    end = Response("svc.a", None, 4, 61, routes=routes, streaming=True)
    assert tell(program.receive, data(end)) == [Answer(3, [b""], final=True)]
    asked(program, 4, b"", **passed)
    notice = FluxRequest("svc.cancel", b'{"matchtag":4}\0', routes=(b"4", b"cl", b"far"), rolemask=1, noresponse=True)
    assert tell(program.withdrawn, 4) == [data(notice)]
    asked(program, 5, b"", **passed)
    last = Response("svc.a", b"all", 4, routes=(b"5",))  # without the flag: there is no more
    assert tell(program.receive, data(last)) == [Answer(5, [b"all"], final=True)]


def test_a_request_that_wants_no_response_is_answered_when_it_was_passed(program):
    assert asked(program, 3, b"x", topic="svc.a", matchtag=0, noresponse=True, client="cl", gateway=OTHER) == [
        Answer(3, [b""], final=True),
        data(FluxRequest("svc.a", b"x", 0, routes=(b"3", b"cl"), rolemask=1, noresponse=True)),
    ]
    assert program._instance.departures.watched == {}


def test_a_program_is_told_once_for_each_service_that_a_client_has_left(program):
    delivered = []
    program.output.wake = lambda: delivered.extend(taken(program))
    watched = program._instance.departures.watched
    for number, topic in enumerate(("svc.a", "svc.b"), 3):
        asked(program, number, b"", topic=topic, matchtag=number, client="cl", gateway=OTHER)
    asked(program, 5, b"", service="two", topic="two.x", client="cl", gateway=OTHER)
    assert list(watched) == [(OTHER, "cl")]
    watched.pop((OTHER, "cl"))("cl")
    assert delivered == [
        data(FluxRequest("svc.disconnect", routes=(b"3", b"cl"), rolemask=1, noresponse=True)),
        data(FluxRequest("two.disconnect", routes=(b"5", b"cl"), rolemask=1, noresponse=True)),
    ]
    asked(program, 6, b"", topic="svc.a", client="cl", gateway=OTHER)
    assert list(watched) == [(OTHER, "cl")]
    tell(program.ended)
    assert watched == {}


def test_no_payload_is_kept_for_clients_that_may_leave(program):
    asked(program, 3, b"payload", topic="svc.a", matchtag=3, client="cl", gateway=OTHER)
    tell(program.receive, data(Response("svc.a", None, 3, routes=(b"3", b"cl"))))
    [(_, first)] = program._programs._clients.values()
    assert [each.payload for each in first.values()] == [None]


@pytest.mark.parametrize("gateway", ["titanic.close", "flux.gateway.x", GATEWAY + "0", 1, None])
def test_only_gateways_are_asked_who_has_left(program, gateway):
    asked(program, 3, b"", topic="svc.a", client="cl", gateway=gateway)
    assert program._instance.departures.watched == {}


# ── bodies, errors, topics ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("error", "errnum", "text"),
    [
        (RequestRejected("", code=400, text="bad"), 71, "bad"),
        (RequestRejected("", code=403, text="no"), 1, "no"),
        (RequestRejected("", code=413, text="big"), 90, "big"),
        (RequestTimeout("", code=408, text="late"), 110, "late"),
        (RetryLater("", code=429, text="full"), 11, "full"),
        (RetryLater("", code=503, text="drains"), 11, "drains"),
        (RequestCancelled("", code=499, text="c"), 125, "c"),
        (WorkerLost("", code=502, text="lost"), 113, "lost"),
        (StreamInterrupted("", code=502, text="lost"), 113, "lost"),
        (StreamInterrupted("the connection was lost"), 113, ""),
        (BrokerUnreachable("nobody"), 113, "the broker does not answer"),
        (ClosedError("closed"), 113, "the broker does not answer"),
        (SettingError("too many frames"), 71, "too many frames"),
        (ServiceError(404, "no such user"), 5, "no such user"),
        (ServiceError(500, "x", b'{"errnum":200}'), 200, "x"),
        (ServiceError(500, "x", b'{"errnum":0}'), 5, "x"),
        (ServiceError(500, "x", b'{"errnum":4294967296}'), 5, "x"),
        (ServiceError(500, "x", b'{"errnum":true}'), 5, "x"),
        (ServiceError(500, "x", b'{"errnum":'), 5, "x"),
        (ServiceError(500, "x", b"detail"), 5, "x"),
    ],
)
def test_every_error_has_an_errno(error, errnum, text):
    assert failure(error) == (errnum, text)


@given(st.integers(1, 0xFFFFFFFF), st.text())
def test_a_programs_errno_and_text_survive_the_way_through_brokers(errnum, text):
    code, shown, detail = reported(errnum, text)
    assert failure(ServiceError(code, shown, detail)) == (errnum, text or f"errno {errnum}")
    assert 0 <= code <= 999


@given(st.none() | st.binary() | st.sampled_from([b"{}", b'{"x":1}', b"{\xff}", b"", b"{}\0", b"{", b"}\0"]))
def test_payloads_of_requests_reach_programs_unchanged(payload):
    caller, program = FluxSession(made(), 500), FluxSession(made(), 500)
    add(program, "svc")
    [begin, *_] = call(caller, topic="svc.a", payload=payload, matchtag=1)
    [write] = asked(program, 1, *begin.body, **begin.options["flux"])
    routes = (b"1", caller.uuid.encode())
    assert write == data(FluxRequest("svc.a", payload, 1, routes=routes, userid=500, rolemask=OWNER))


@given(st.none() | st.binary(min_size=1) | st.sampled_from([b"{}\0", b'{"x":1}\0', b"}", b"{", b"\0", b"}\0"]))
def test_payloads_survive_the_way_through_brokers(payload):
    if payload is None or not (payload.startswith(b"{") and payload.endswith(b"}")):
        assert payload_of([body_of(payload)]) == payload


def test_what_is_remembered_of_topics_is_bounded():
    found = Found()
    for number in range(MAX_FOUND + 1):
        found.served(f"x.{number}", "x")
    assert found.services(f"x.{MAX_FOUND}") == ["x", f"x.{MAX_FOUND}"]
    assert found.services("x.0") == ["x.0", "x"]
    found.served(f"x.{MAX_FOUND}", f"x.{MAX_FOUND}")
    assert found.services(f"x.{MAX_FOUND}") == [f"x.{MAX_FOUND}", "x"]
    assert found.services("x") == ["x"]
