"""The gate: who gets through a handshake, over real CURVE connections."""

import logging
import math
from contextlib import closing, suppress
from errno import EFAULT

import pytest
import zmq
import zmq.auth
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import TIMEOUT_MS
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from zmdp.mdp.broker.io.connections import Connections
from zmdp.mdp.broker.io.gate import Gate
from zmdp.mdp.errors import BindError
from zmdp.mdp.limits import Limits
from zmdp.mdp.security.access import Access, Permissions
from zmdp.mdp.security.keys import ClientKeys
from zmdp.mdp.timers import Alarms
from zmdp.mdp.transport.zap import DOMAIN, ENDPOINT


def new_connections(alarms=None):
    return Connections(Limits(), logging.getLogger("zmdp.broker"), alarms or Alarms())


BROKER_PUBLIC, BROKER_SECRET = zmq.curve_keypair()
SHOP, WEB, STRANGER = (ClientKeys(*zmq.curve_keypair(), BROKER_PUBLIC) for _ in range(3))
ENDED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def rules(**keys):
    """The access of these keys, each named after its role."""
    roles = {name: Permissions(name) for name in keys}
    found = {key.public: name for name, key in keys.items()}
    return Access("access.toml", BROKER_SECRET, BROKER_PUBLIC, roles, found, dict.fromkeys(found, "a.key"))


class Door:
    """A ROUTER that a gate protects, with its monitor, and what comes in through it."""

    def __init__(self, context, access):
        self.context = context
        self.alarms = Alarms()
        self.gate = Gate(context, access, new_connections(self.alarms))
        self.router = context.socket(zmq.ROUTER)
        self.gate.protect(self.router)
        self.open()

    def replace(self):
        """Close the ROUTER, and make another one that the gate does not protect."""
        self.close_router()
        self.router = self.context.socket(zmq.ROUTER)

    def open(self):
        self.monitor = self.router.get_monitor_socket(ENDED)
        self.router.bind("tcp://127.0.0.1:*")

    def knock(self, prepare):
        """Connect a DEALER after `prepare(it)`; return the role of what it sends, or the value of the failure."""
        poller = zmq.Poller()
        for each in (self.gate.descriptor, self.router, self.monitor):
            poller.register(each, zmq.POLLIN)
        with self.context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.reconnect_ivl = -1
            prepare(dealer)
            dealer.connect(self.router.last_endpoint)
            with suppress(zmq.Again):  # the connection has failed already
                dealer.send_multipart([b"hello", b"you"], zmq.NOBLOCK)
            while True:
                ready = dict(poller.poll(TIMEOUT_MS))
                assert ready, "nothing came in, and nothing failed"
                self.gate.answer(0.0)
                if self.monitor in ready:
                    return parse_monitor_message(self.monitor.recv_multipart())["value"]
                if self.router in ready:
                    frames = self.router.recv_multipart(copy=False)
                    assert len(frames) == 3
                    (user,) = {frame.get("User-Id") for frame in frames}
                    return user

    def close_router(self):
        if not self.router.closed:
            self.router.disable_monitor()
            self.monitor.close(0)
            self.router.close(0)

    def close(self):
        self.close_router()
        self.gate.close()


@pytest.fixture
def door(context):
    door = Door(context, rules(shop=SHOP, web=WEB))
    yield door
    door.close()


def test_a_known_key_gets_in_and_every_frame_carries_its_role(door):
    assert door.knock(SHOP.apply) == SHOP.public.decode()
    assert door.knock(WEB.apply) == WEB.public.decode()
    assert door.gate.counts == {"admitted": 2}


def test_a_peer_cannot_choose_its_role(door):
    def claims(dealer):
        SHOP.apply(dealer)
        dealer.routing_id = b"web"

    assert door.knock(claims) == SHOP.public.decode()


def test_an_unknown_key_is_refused(door, caplog):
    assert door.knock(STRANGER.apply) == 400
    assert door.gate.counts == {"unknown-key": 1}
    assert f"refused a connection from 127.0.0.1: unknown key {STRANGER.public.decode()}" in caplog.text


def test_a_key_without_its_secret_is_refused(door):
    """Whoever knows only the public key of the shop."""
    thief = ClientKeys(SHOP.public, STRANGER.secret, BROKER_PUBLIC)
    assert door.knock(thief.apply) == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
    assert door.gate.counts == {}


def test_who_takes_it_for_another_broker_is_refused(door):
    elsewhere = ClientKeys(SHOP.public, SHOP.secret, STRANGER.public)
    assert door.knock(elsewhere.apply) == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
    assert door.gate.counts == {}


def plain(dealer):
    dealer.plain_username, dealer.plain_password = b"shop", b"secret"


@pytest.mark.parametrize("prepare", [lambda dealer: None, plain], ids=["NULL", "PLAIN"])
def test_other_mechanisms_are_refused(door, prepare):
    assert door.knock(prepare) == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
    assert door.gate.counts == {}


@pytest.mark.parametrize("prepare", [lambda dealer: None, plain], ids=["NULL", "PLAIN"])
def test_other_mechanisms_are_refused_even_where_a_socket_offers_them(door, prepare, caplog):
    door.replace()
    door.router.zap_domain = DOMAIN
    door.router.plain_server = prepare is plain
    door.open()
    assert door.knock(prepare) == 400
    assert door.gate.counts == {"wrong-mechanism": 1}
    assert "refused a connection from 127.0.0.1: it does not use CURVE keys" in caplog.text


def test_a_socket_that_is_not_the_brokers_admits_nobody(door):
    door.replace()
    door.gate.protect(door.router)
    door.router.zap_domain = b"another"
    door.open()
    assert door.knock(SHOP.apply) == 400
    assert door.gate.counts == {"wrong-domain": 1}


def test_a_protected_socket_admits_nobody_where_no_gate_answers(door):
    door.close_router()
    with zmq.Context() as elsewhere:
        door.router = elsewhere.socket(zmq.ROUTER)
        door.gate.protect(door.router)
        door.open()
        assert door.knock(SHOP.apply) == EFAULT
        door.close_router()


def test_a_context_has_one_gate(context, door):
    with pytest.raises(BindError, match="this ZeroMQ context has a ZAP handler already"):
        Gate(context, rules(), new_connections())


RAW_KEY = z85.decode(SHOP.public)


def request(*, mechanism=b"CURVE", credentials=(RAW_KEY,), domain=DOMAIN, version=b"1.0"):
    return [b"", version, b"1", domain, b"127.0.0.1", b"id", mechanism, *credentials]


@pytest.fixture
def insider(door):
    """A socket of the same process that talks to the gate as libzmq does."""
    with door.context.socket(zmq.DEALER) as insider:
        insider.linger = 0
        insider.connect(ENDPOINT)
        yield insider


@pytest.mark.parametrize(
    ("message", "status", "reason"),
    [
        (request(), b"200", "admitted"),
        (request(credentials=()), b"400", "wrong-mechanism"),
        (request(credentials=(b"short",)), b"400", "wrong-mechanism"),
        (request(credentials=(b"",)), b"400", "wrong-mechanism"),
        (request(credentials=(RAW_KEY, b"more")), b"400", "wrong-mechanism"),
        (request(mechanism=b"curve"), b"400", "wrong-mechanism"),
        (request(domain=b""), b"400", "wrong-domain"),
    ],
)
def test_answers_have_the_form_that_libzmq_expects(door, insider, message, status, reason):
    insider.send_multipart(message)
    door.gate.answer(0.0)
    text, user = (b"OK", SHOP.public) if status == b"200" else (b"not admitted", b"")
    assert insider.recv_multipart(zmq.NOBLOCK) == [b"", b"1.0", b"1", status, text, user, b""]
    assert door.gate.counts == {reason: 1}


@pytest.mark.parametrize("message", [[b""], [b"", b"1.0"], request()[:6], request(version=b"2.0"), request()[1:]])
def test_malformed_requests_are_counted_and_get_no_answer(door, insider, message):
    insider.send_multipart(message)
    door.gate.answer(0.0)
    assert not insider.poll(0)
    assert door.gate.counts == {"malformed": 1}
    assert door.knock(SHOP.apply) == SHOP.public.decode()


FRAME = st.one_of(st.sampled_from([*request(), b"2.0"]), st.binary(max_size=40))


@settings(max_examples=200, deadline=None)
@given(messages=st.lists(st.lists(FRAME, min_size=1, max_size=12), max_size=5))
def test_no_request_raises_and_each_is_counted(messages):
    with (
        zmq.Context() as context,
        closing(Gate(context, rules(shop=SHOP), new_connections())) as gate,
        context.socket(zmq.DEALER) as insider,
    ):
        insider.linger = 0
        insider.connect(ENDPOINT)
        for message in messages:
            insider.send_multipart(message)
        gate.answer(0.0)
        assert gate.counts.total() == len(messages)


def test_one_turn_answers_a_bounded_number(door, insider):
    for _ in range(150):
        insider.send_multipart(request())
    assert door.gate.answer(0.0)
    assert door.gate.counts == {"admitted": 100}
    assert not door.gate.answer(0.0)
    assert door.gate.counts == {"admitted": 150}


def test_refusals_are_logged_at_a_bounded_rate(door, insider, caplog):
    for _ in range(20):
        insider.send_multipart(request(domain=b""))
    door.gate.answer(1.0)
    assert len(caplog.records) == 5
    due = door.alarms.due
    door.alarms.run(due)
    assert len(caplog.records) == 6
    assert "15" in caplog.records[-1].getMessage()
    assert door.alarms.due == math.inf
