"""Messages for slow peers: in order, bounded, dropped with the peer."""

from contextlib import ExitStack
from errno import EAGAIN, EHOSTUNREACH

import pytest
import zmq

from zmdp.mdp.broker.io.outbox import Outbox
from zmdp.mdp.broker.io.ports import MAIN, Port
from zmdp.mdp.limits import Limits
from zmdp.mdp.transport.multipart import cost_of, send


class Wire:
    """Takes what it is given, unless the peer is slow or gone."""

    def __init__(self, **errnos):
        self.errnos = errnos
        self.sent = []

    def __call__(self, message):
        errno = self.errnos.get(message[0].decode(), 0)
        if not errno:
            self.sent.append(message)
        return errno


def outbox_with(*messages, port=None, **limits):
    outbox = Outbox(Limits(**limits), {MAIN: port or Port(MAIN, -1)})
    for turn, message in enumerate(messages):
        assert outbox.add(message, turn)
    return outbox


def test_a_peer_that_is_gone_is_told_of_with_the_turn_of_the_first_message_that_it_missed():
    outbox = outbox_with()
    for turn in (3, 5, 5, 8):
        assert outbox.add([b"a", b"%d" % turn], turn)
    answers = iter([0, EHOSTUNREACH])
    assert list(outbox.flush(lambda _: next(answers))) == [(b"a", 5)]
    assert not outbox


def test_a_peer_that_takes_some_keeps_the_rest():
    outbox = outbox_with([b"a", b"1"], [b"a", b"2"])
    answers = iter([0, EAGAIN])
    assert list(outbox.flush(lambda _: next(answers))) == []
    wire = Wire()
    assert list(outbox.flush(wire)) == []
    assert wire.sent == [[b"a", b"2"]]


def test_a_peer_may_be_discarded_while_another_turns_out_to_be_gone():
    # the server does so: what follows from the loss of one peer may be one message too many for the next
    outbox, wire = outbox_with([b"a", b"1"], [b"b", b"1"], [b"c", b"1"]), Wire(a=EHOSTUNREACH)
    for _ in outbox.flush(wire):
        outbox.discard(b"b")
    assert wire.sent == [[b"c", b"1"]]
    assert not outbox


def test_messages_for_one_peer_are_bounded():
    outbox = outbox_with([b"a", b"1"], [b"a", b"2"], [b"b", b"1"], max_outbox=2)
    assert not outbox.add([b"a", b"3"], 3)


COST = cost_of([b"a", b""])
"""Of a message of two frames, beside the second's content."""


@pytest.mark.parametrize("leave", ["flush", "discard", "forget", "gone"])
def test_bytes_of_all_peers_are_bounded(leave):
    outbox = outbox_with([b"a", b"12345"], [b"b", b"123"], max_outbox_bytes=2 * COST + 10)
    assert outbox.overfull() is None
    assert outbox.add([b"c", b""], 2)
    assert outbox.overfull() == b"a"
    if leave == "flush":
        assert list(outbox.flush(Wire(b=EAGAIN, c=EAGAIN))) == []
    elif leave == "gone":
        assert list(outbox.flush(Wire(a=EHOSTUNREACH, b=EAGAIN, c=EAGAIN))) == [(b"a", 0)]
    elif leave == "forget":
        outbox.forget(b"a")
    else:
        outbox.discard(b"a")
    assert outbox.overfull() is None
    assert outbox.add([b"b", b"12345678"], 3)
    assert outbox.overfull() == b"b"


@pytest.fixture
def slow():
    """A ROUTER, and the routing ids of two DEALERs that read nothing."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, ExitStack() as stack:
        router.router_mandatory = True
        router.bind("inproc://outbox")
        identities = []
        for _ in range(2):
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.connect("inproc://outbox")
            dealer.send(b"hello")
            identities.append(router.recv_multipart()[0])
        yield router, *identities


def test_what_libzmq_holds_is_bounded_too(slow):
    router, amy, bob = slow
    port = Port(MAIN, -1)
    outbox = outbox_with(port=port, max_outbox_bytes=4_000_000)
    for _ in range(3):
        for identity in (amy, amy, bob):
            assert send(router, [identity, b"x" * 500_000], port.unsent) == 0
    assert outbox.overfull() is None  # seven wait; the first to each is being sent
    assert outbox.add([bob, b"x" * 500_000], 1)
    assert outbox.overfull() == amy
    outbox.discard(amy)  # changes nothing: nothing is kept for her
    assert outbox.overfull() == amy
    outbox.forget(amy)
    assert outbox.overfull() is None
    for turn in range(2, 7):
        assert outbox.add([bob, b"x" * 500_000], turn)
    assert outbox.overfull() == bob
    outbox.forget(bob)
    assert (outbox.overfull(), port.unsent.bytes, bool(outbox)) == (None, 0, False)


def test_what_an_earlier_worker_was_sent_is_discarded():
    """That of other peers behind the same proxy is kept, and what was sent since."""
    first, other, since = [b"p", b"w", b"1"], [b"p", b"c", b"1"], [b"p", b"w", b"2"]
    outbox, wire = outbox_with(first, other, since), Wire()
    outbox.discard_before((b"p", b"w"), 2)
    assert list(outbox.flush(wire)) == []
    assert wire.sent == [other, since]
    assert not outbox
    assert outbox._bytes == 0


@pytest.mark.parametrize("envelope", [[], [b""]], ids=["bare", "delimited"])
def test_what_a_client_on_the_connection_of_a_worker_that_is_gone_is_sent_is_kept(envelope):
    """One connection may be a client, too."""
    to_worker = [b"a", *envelope, b"MDPW02", b"\x05"]
    to_client = [
        [b"a", b"MDPC02", b"\x03", b"echo", b"x"], [b"a", b"", b"MDPC01", b"echo", b"x"], [b"a", b"", b"MDPCX1"],
    ]  # fmt: skip
    outbox, wire = outbox_with(to_worker, *to_client, to_worker), Wire()
    outbox.discard_before((b"a", *envelope), 4)
    assert list(outbox.flush(wire)) == []
    assert wire.sent == [*to_client, to_worker]


def test_a_message_that_is_as_long_as_the_route_of_a_worker_that_is_gone_is_kept():
    """Peers choose what follows the first frame of their route, also what is a heartbeat to another."""
    heartbeat = [b"p", b"\x02"]
    outbox, wire = outbox_with(heartbeat), Wire()
    outbox.discard_before((b"p", b"\x02"), 4)
    assert list(outbox.flush(wire)) == []
    assert wire.sent == [heartbeat]


def test_messages_pile_up_for_a_peer_that_libzmq_takes_no_more_for_or_holds_much():
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        router = stack.enter_context(context.socket(zmq.ROUTER))
        router.router_mandatory, router.linger = True, 0
        router.bind("inproc://outbox")
        for name in (b"little", b"much"):
            peer = stack.enter_context(context.socket(zmq.DEALER))
            peer.linger, peer.routing_id = 0, name
            peer.connect("inproc://outbox")
            peer.send(b"hello")
            router.recv_multipart()
        port = Port(MAIN, -1)
        outbox = outbox_with([b"slow", b"1"], port=port, max_outbox_bytes=4_000_000)
        assert outbox.piles_up
        assert outbox.congested() == {b"slow"}
        outbox.discard(b"slow")
        assert not outbox.piles_up
        for name, messages in ((b"little", 2), (b"much", 6)):
            for _ in range(messages):
                assert send(router, [name, bytes(300_000)], port.unsent) == 0
        assert outbox.piles_up
        assert outbox.congested() == {b"much"}
        assert send(router, [b"much", bytes(2_000_000)], port.unsent) == 0  # more than half of what is for all
        assert outbox.congested() == {b"little", b"much"}
