"""Both makes of `receive` and `send`, on real sockets, beside pyzmq's own."""

import threading
import tracemalloc
from errno import EAGAIN, EHOSTUNREACH, ENOTSOCK
from importlib import import_module
from itertools import count

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import TIMEOUT_MS, eventually
from zmq.auth.thread import ThreadAuthenticator

from zmdp.mdp.transport import multipart
from zmdp.mdp.transport.multipart import COUNTED_BYTES, SHARED, ZERO_COPY_BYTES

MAKES = ["multipart_python", pytest.param("multipart_cython", marks=pytest.mark.compiled_only)]


@pytest.fixture(scope="module", params=MAKES)
def make(request):
    return import_module(f"zmdp.mdp.transport.{request.param}")


@pytest.fixture(scope="module")
def context():
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


def pair_in(context, kind=zmq.PAIR, other=zmq.PAIR, **options):
    one, two = context.socket(kind), context.socket(other)
    for socket in (one, two):
        socket.linger = 0  # else a test that fails would keep the context from ending
        for name, value in options.items():
            socket.set(getattr(zmq, name), value)
    port = one.bind_to_random_port("tcp://127.0.0.1")
    two.connect(f"tcp://127.0.0.1:{port}")
    assert one.poll(TIMEOUT_MS, zmq.POLLOUT)  # until then nobody is there who would take anything
    return one, two


@pytest.fixture
def pair(context):
    one, two = pair_in(context)
    yield one, two
    one.close(0)
    two.close(0)


def wait_for_message(receive, socket, **options):
    assert socket.poll(TIMEOUT_MS)
    return receive(socket, **options)


SIZES = [0, 1, 2, 255, SHARED - 1, SHARED, ZERO_COPY_BYTES - 1, ZERO_COPY_BYTES, ZERO_COPY_BYTES + 1, 3_000_000]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [False, True])
def test_frames_of_any_size_arrive_unchanged(make, pair, size, share):
    one, two = pair
    message = [b"", b"x", bytes(range(256)) * (size // 256) + b"y" * (size % 256), b"", b"end"]
    assert make.send(one, message) == 0
    received = wait_for_message(make.receive, two, share=share)
    assert received == message
    assert [type(frame) for frame in received] == [
        memoryview if share and len(frame) >= SHARED else bytes for frame in message
    ]


@settings(max_examples=50)
@given(
    message=st.lists(
        st.binary(max_size=40) | st.integers(ZERO_COPY_BYTES - 2, ZERO_COPY_BYTES + 2).map(lambda n: b"z" * n),
        min_size=1,
        max_size=20,
    )
)
def test_multipart_interoperates_with_pyzmq(make, context, message):
    one, two = pair_in(context)
    try:
        make.send(one, message)
        assert two.poll(TIMEOUT_MS)
        assert two.recv_multipart() == message
        two.send_multipart(message)
        assert wait_for_message(make.receive, one) == message
    finally:
        one.close(0)
        two.close(0)


def test_receiving_without_a_message_returns_nothing(make, pair):
    assert make.receive(pair[0]) is None


def test_messages_come_one_by_one(make, pair):
    one, two = pair
    for number in range(100):
        make.send(one, [b"number", b"%d" % number])
    assert [wait_for_message(make.receive, two) for _ in range(100)] == [
        [b"number", b"%d" % number] for number in range(100)
    ]
    assert make.receive(two) is None


def test_a_shared_frame_is_passed_on_and_outlives_its_socket(make, context):
    one, two = pair_in(context)
    three, four = pair_in(context)
    large = b"0123456789" * 20_000
    make.send(one, [b"head", large])
    message = wait_for_message(make.receive, two, share=True)
    frame = message[1]
    assert isinstance(frame, memoryview)
    assert frame.readonly
    assert len(frame) == len(large)
    one.close(0)
    two.close(0)
    assert make.send(three, [b"again", frame, frame[10:-5]]) == 0
    del message
    assert wait_for_message(make.receive, four) == [b"again", large, large[10:-5]]
    assert frame == large
    three.close(0)
    four.close(0)


class Sources:
    """Who was told of, as `receive` expects it."""

    def __init__(self, *known, secured=False, max_frames=1024):
        self.known = set(known)
        self.secured = secured
        self.user = b"nobody yet"
        self.max_frames = max_frames
        self.added = []
        self.offenders = []

    def add(self, identity, descriptor):
        self.added.append((identity, descriptor, self.user))

    def offender(self, descriptor):
        self.offenders.append(descriptor)


def test_a_router_reports_unknown_peers(make, context):
    router, dealer = pair_in(context, zmq.ROUTER, zmq.DEALER)
    sources = Sources()
    for _ in range(2):
        dealer.send_multipart([b"", b"large" * SHARED, b"x"])
    first = wait_for_message(make.receive, router, share=True, sources=sources)
    ((identity, descriptor, user),) = sources.added
    assert user == b"nobody yet"  # nobody asked
    assert first == [identity, b"", b"large" * SHARED, b"x"]
    assert [type(frame) for frame in first] == [bytes, bytes, memoryview, bytes]
    assert descriptor > 2
    assert wait_for_message(make.receive, router, sources=Sources(identity)) == first
    dealer.send(b"end")
    known = Sources(identity)
    assert wait_for_message(make.receive, router, sources=known) == [identity, b"end"]
    assert known.added == []
    assert make.receive(router, True, known) is None
    router.close(0)
    dealer.close(0)


def test_a_peer_within_the_process_has_no_descriptor(make, context):
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.bind(f"inproc://{make.__name__}")
    dealer.connect(f"inproc://{make.__name__}")
    dealer.send(b"hello")
    sources = Sources()
    identity, _ = wait_for_message(make.receive, router, sources=sources)
    assert [each[:2] for each in sources.added] == [(identity, -1)]
    router.close(0)
    dealer.close(0)


@pytest.fixture
def authenticator(context):
    running = ThreadAuthenticator(context)
    running.start()
    running.configure_plain(passwords={"amy": "secret", "bob": "secret"})
    yield running
    running.stop()


@pytest.mark.usefixtures("authenticator")
def test_the_user_of_each_message_is_known_before_its_source(make, context):
    router = context.socket(zmq.ROUTER)
    router.plain_server = True
    endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    sources = Sources(secured=True)
    dealers = {}
    for name in (b"amy", b"bob"):
        dealers[name] = context.socket(zmq.DEALER)
        dealers[name].plain_username, dealers[name].plain_password = name, b"secret"
        dealers[name].connect(endpoint)
        dealers[name].send(b"hello")
        identity, _ = wait_for_message(make.receive, router, sources=sources)
        assert sources.added.pop()[::2] == (identity, name)
        sources.known.add(identity)
    for name in (b"amy", b"bob", b"amy"):
        dealers[name].send_multipart([b"", b"more"])
        wait_for_message(make.receive, router, sources=sources)
        assert sources.user == name
    assert sources.added == []
    for socket in (router, *dealers.values()):
        socket.close(0)


def test_without_access_control_there_is_no_user(make, context):
    router, dealer = pair_in(context, zmq.ROUTER, zmq.DEALER)
    sources = Sources(secured=True)
    dealer.send(b"hello")
    wait_for_message(make.receive, router, sources=sources)
    assert sources.user == b""
    router.close(0)
    dealer.close(0)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("length", [9, 10, 11, 5000])
def test_the_rest_of_a_message_of_too_many_frames_is_discarded(make, context, length, known):
    router, dealer = pair_in(context, zmq.ROUTER, zmq.DEALER)
    dealer.send(b"hello")
    identity, _ = wait_for_message(make.receive, router)
    sources = Sources(*[identity] * known, max_frames=10)
    frames = [b"%d" % number for number in range(length - 1)]
    dealer.send_multipart(frames)
    dealer.send(b"next")
    assert wait_for_message(make.receive, router, sources=sources) == [identity, *frames][:11]
    assert [descriptor > 2 for descriptor in sources.offenders] == [True] * (length > 11)
    assert wait_for_message(make.receive, router, sources=sources) == [identity, b"next"]
    router.close(0)
    dealer.close(0)


def test_sending_without_a_peer_returns_eagain(make, context):
    alone = context.socket(zmq.DEALER)
    assert make.send(alone, [b"a", b"b"]) == EAGAIN
    assert make.send(alone, [b"x" * ZERO_COPY_BYTES, b"b"]) == EAGAIN
    alone.close(0)


def test_a_message_to_an_unknown_peer_reaches_no_other(make, context):
    router, dealer = pair_in(context, zmq.ROUTER, zmq.DEALER)
    router.set(zmq.ROUTER_MANDATORY, 1)
    dealer.send(b"hello")
    identity, _ = wait_for_message(make.receive, router)
    assert make.send(router, [b"nobody", b"a", b"b"]) == EHOSTUNREACH
    assert make.send(router, [b"n" * ZERO_COPY_BYTES, b"a", b"b"]) == EHOSTUNREACH
    assert make.send(router, [identity, b"a", b"b"]) == 0
    assert wait_for_message(make.receive, dealer) == [b"a", b"b"]
    assert make.receive(dealer) is None
    router.close(0)
    dealer.close(0)


numbers = count()


@pytest.fixture
def stopped(make, context):
    """A ROUTER, the routing id of a DEALER that reads nothing, and the DEALER."""
    # Between threads nothing is buffered but in libzmq's queues.
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.router_mandatory = True
    endpoint = f"inproc://stopped-{next(numbers)}"
    router.bind(endpoint)
    dealer.connect(endpoint)
    dealer.send(b"hello")
    identity, _ = wait_for_message(make.receive, router)
    yield router, identity, dealer
    router.close(0)
    dealer.close(0)


def test_a_peer_that_does_not_read(make, stopped):
    router, identity, dealer = stopped
    sent = 0
    while make.send(router, [identity, b"%d" % sent, b"x" * SHARED]) == 0:
        sent += 1
    assert make.send(router, [identity, b"%d" % sent, b"y"]) == EAGAIN
    # Each that was sent is whole, and none that was not.
    assert [wait_for_message(make.receive, dealer)[0] for _ in range(sent)] == [b"%d" % n for n in range(sent)]
    assert make.receive(dealer) is None


def settled(unsent, count, router):
    """Wait until that many bytes wait for the peers of `router`."""

    def is_settled():
        router.poll(0)  # libzmq does its work for a socket when it is used
        unsent.settle()
        return unsent.bytes == count == sum(unsent.waiting().values())

    return eventually(is_settled)


LASTS = [b"", b"end", b"x" * 20_000, b"x" * 100_000, memoryview(b"x" * 20_000)[1:], "shared"]


@pytest.mark.parametrize("last", LASTS, ids=["empty", "small", "large", "larger", "view", "shared"])
def test_what_libzmq_holds_is_counted_until_it_is_sent(make, context, stopped, last):
    router, identity, dealer = stopped
    if last == "shared":
        one, two = pair_in(context)
        make.send(one, [b"x" * 30_000])
        last = wait_for_message(make.receive, two, share=True)[0]
        one.close(0)
        two.close(0)
    unsent = make.Unsent()
    message = [identity, b"y" * COUNTED_BYTES, last]
    cost = make.cost_of(message)
    for number in range(5):
        assert make.send(router, message, unsent) == 0
        assert unsent.bytes == number * cost  # the first is being sent
    assert unsent.waiting() == {identity: 4 * cost}
    for number in (3, 2, 1, 0, 0):
        assert wait_for_message(make.receive, dealer) == [message[1], bytes(last)]
        assert settled(unsent, number * cost, router)


def test_small_messages_count_together(make, stopped):
    router, identity, dealer = stopped
    unsent = make.Unsent()
    message = [identity, b"x" * 100]
    for _ in range(900):
        assert make.send(router, message, unsent) == 0
    total = 900 * make.cost_of(message)
    assert total - 3 * COUNTED_BYTES < unsent.bytes < total
    for _ in range(900):
        wait_for_message(make.receive, dealer)
    assert settled(unsent, 0, router)


def test_what_is_not_sent_does_not_count(make, context, stopped):
    router, identity, dealer = stopped
    unsent = make.Unsent()
    large = b"x" * COUNTED_BYTES
    for _ in range(10):
        assert make.send(router, [b"nobody", large], unsent) == EHOSTUNREACH
    while make.send(router, [identity, b"x"], unsent) == 0:
        pass
    before = unsent.bytes
    for _ in range(100):
        assert make.send(router, [identity, large], unsent) == EAGAIN
    assert unsent.bytes == before
    assert set(unsent.waiting()) == {identity}
    while dealer.poll(0):
        make.receive(dealer)
    assert settled(unsent, 0, router)


def test_a_forgotten_peer_does_not_count(make, stopped):
    router, identity, dealer = stopped
    unsent = make.Unsent()
    message = [identity, b"x" * COUNTED_BYTES]
    for _ in range(3):
        make.send(router, message, unsent)
    unsent.forget(b"stranger")
    unsent.forget(identity)
    assert (unsent.bytes, unsent.waiting()) == (0, {})
    for _ in range(3):
        make.send(router, message, unsent)
    assert unsent.bytes == 2 * make.cost_of(message)
    for _ in range(6):
        wait_for_message(make.receive, dealer)
    assert settled(unsent, 0, router)


def test_what_is_held_for_a_connection_that_ends_does_not_count(make, context):
    router, dealer = pair_in(context, zmq.ROUTER, zmq.DEALER, RCVHWM=1, SNDBUF=4096, RCVBUF=4096)
    router.router_mandatory = True
    dealer.send(b"hello")
    identity, _ = wait_for_message(make.receive, router)
    unsent = make.Unsent()
    for _ in range(100):
        make.send(router, [identity, b"x" * 100_000], unsent)
    assert unsent.bytes > 5_000_000
    dealer.close(0)
    while make.send(router, [identity, b"still there?"]) != EHOSTUNREACH:
        assert make.receive(router) is None  # libzmq notices the end of a connection when it has read everything
    assert settled(unsent, 0, router)
    router.close(0)


def test_what_is_held_may_outlive_the_count(make, stopped):
    router, identity, dealer = stopped
    unsent = make.Unsent()
    for _ in range(3):
        make.send(router, [identity, b"x" * COUNTED_BYTES], unsent)
    del unsent
    for _ in range(3):
        assert wait_for_message(make.receive, dealer) == [b"x" * COUNTED_BYTES]


def test_peers_that_are_gone_take_no_memory(make, context):
    router = context.socket(zmq.ROUTER)
    router.router_mandatory = True
    unsent = make.Unsent()
    tracemalloc.start()
    for number in range(20_000):
        make.send(router, [b"nobody %d" % number, b"x"], unsent)
    most, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1_000_000
    router.close(0)


def test_a_closed_socket(make, context):
    socket = context.socket(zmq.PAIR)
    socket.close(0)
    for call in (lambda: make.receive(socket), lambda: make.send(socket, [b"x"])):
        with pytest.raises(zmq.ZMQError) as raised:
            call()
        assert raised.value.errno == ENOTSOCK


def test_a_context_that_was_terminated(make):
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    ending = threading.Thread(target=context.term)  # it waits for the socket
    ending.start()
    with pytest.raises(zmq.ContextTerminated):
        list(iter(lambda: make.receive(socket), "something"))  # until then there is nothing
    with pytest.raises(zmq.ContextTerminated):
        make.send(socket, [b"x"])
    socket.close(0)
    ending.join()


def test_an_invalid_message_is_rejected(make, pair):
    with pytest.raises(TypeError):
        make.send(pair[0], ["text"])


def test_the_implementation_in_use_is_reported():
    made = "multipart_cython" if multipart.COMPILED else "multipart_python"
    assert multipart.receive.__module__.endswith(made)
