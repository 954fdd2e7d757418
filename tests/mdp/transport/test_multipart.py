"""Both makes of `receive` and `send`, on real sockets, beside pyzmq's own."""

import threading
from errno import EAGAIN, EHOSTUNREACH, ENOTSOCK
from importlib import import_module

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from zmdp.mdp.transport import multipart
from zmdp.mdp.transport.multipart import SHARED, ZERO_COPY_BYTES

MAKES = ["multipart_python", "multipart_cython"]


@pytest.fixture(scope="module", params=MAKES)
def make(request):
    if request.param == "multipart_cython" and not multipart.COMPILED:
        pytest.skip("not compiled here")
    return import_module(f"zmdp.mdp.transport.{request.param}")


@pytest.fixture(scope="module")
def context():
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


def pair_in(context, kind=zmq.PAIR, other=zmq.PAIR, **options):
    one, two = context.socket(kind), context.socket(other)
    for socket in (one, two):
        for name, value in options.items():
            socket.set(getattr(zmq, name), value)
    port = one.bind_to_random_port("tcp://127.0.0.1")
    two.connect(f"tcp://127.0.0.1:{port}")
    assert one.poll(10_000, zmq.POLLOUT)  # until then nobody is there who would take anything
    return one, two


@pytest.fixture
def pair(context):
    one, two = pair_in(context)
    yield one, two
    one.close(0)
    two.close(0)


def wait_for_message(receive, socket, **options):
    assert socket.poll(10_000)
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
        assert two.poll(10_000)
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

    def __init__(self, *known):
        self.known = set(known)
        self.added = []

    def add(self, identity, descriptor):
        self.added.append((identity, descriptor))


def test_a_router_reports_unknown_peers(make, context):
    router, dealer = pair_in(context, zmq.ROUTER, zmq.DEALER)
    sources = Sources()
    for _ in range(2):
        dealer.send_multipart([b"", b"large" * SHARED, b"x"])
    first = wait_for_message(make.receive, router, share=True, sources=sources)
    ((identity, descriptor),) = sources.added
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
    assert sources.added == [(identity, -1)]
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


def test_a_peer_that_does_not_read(make, context):
    one, two = pair_in(context, zmq.ROUTER, zmq.DEALER, SNDHWM=1, RCVHWM=1, SNDBUF=4096, RCVBUF=4096)
    one.set(zmq.ROUTER_MANDATORY, 1)
    two.send(b"hello")
    identity, _ = wait_for_message(make.receive, one)
    sent = 0
    while make.send(one, [identity, b"%d" % sent, b"x" * 60_000]) == 0:
        sent += 1
    assert make.send(one, [identity, b"%d" % sent, b"y"]) == EAGAIN
    # Each that was sent is whole, and none that was not.
    assert [wait_for_message(make.receive, two)[0] for _ in range(sent)] == [b"%d" % n for n in range(sent)]
    one.close(0)
    two.close(0)


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
