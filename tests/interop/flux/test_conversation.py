"""A conversation carries out what its machine asks for: over a real broker, with machines that follow a script."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from support.processes import TIMEOUT_SECONDS

from zmdp.clients import AsyncClient, ServiceError
from zmdp.gateways import upstream
from zmdp.gateways.upstream import Upstream
from zmdp.interop.flux.conversation import MAX_ANSWERS, Conversation
from zmdp.interop.flux.session.effects import Answer, Begin, Cancel, Close, Fail, Offer, Withdraw
from zmdp.mdp.errors import SettingError
from zmdp.testing import running_broker
from zmdp.workers import AsyncWorker


class Script:
    """A machine that does what the test puts in `replies`, and notes what it is told."""

    def __init__(self):
        self.told = asyncio.Queue()
        self.replies = {}
        """What to do, by the kind of what it is told: messages and effects."""
        self._to_do = []

    def _tell(self, kind, *what):
        self.told.put_nowait((kind, *what))
        self.do(*self.replies.get(kind, []))

    def do(self, *what):
        self._to_do += what

    def _take(self, wanted):
        taken = [each for each in self._to_do if isinstance(each, bytes) is wanted]
        self._to_do = [each for each in self._to_do if isinstance(each, bytes) is not wanted]
        return taken

    def take_messages(self):
        return self._take(True)

    def take_events(self):
        return self._take(False)

    def receive(self, data):
        self._tell("received", data)

    def answered(self, number, outcome):
        self._tell("answered", number, outcome)

    def asked(self, number, request):
        self._tell("asked", number, list(request))

    def withdrawn(self, number):
        self._tell("withdrawn", number)

    def refused(self, service, why):
        self._tell("refused", service, why)

    def ended(self):
        self._tell("ended")


class Wire:
    """The connection to a peer, which notes what happens to it."""

    def __init__(self):
        self.events = []
        self.unread = 0

    def write(self, data):
        self.events.append(data)

    def unread_bytes(self):
        return self.unread

    def __getattr__(self, name):  # pause, resume, close, abort
        return lambda: self.events.append(name)


class Scene:
    """A conversation, and a client beside it."""

    def __init__(self, endpoint, upstream, **limits):
        self.endpoint = endpoint
        self.machine = Script()
        self.wire = Wire()
        self.conversation = Conversation(self.machine, self.wire, upstream, name="test", **limits)

    def do(self, *what):
        self.machine.do(*what)
        self.conversation.act()

    async def told(self, kind):
        """Return the next thing of that kind that the machine is told."""
        while True:
            found = await self.machine.told.get()
            if found[0] == kind:
                return found[1:]


@asynccontextmanager
async def scene(handler=None, **limits):
    with running_broker() as server:
        (endpoint,) = server.endpoints
        async with Upstream(endpoint, timeout=TIMEOUT_SECONDS) as upstream:
            if handler is None:
                yield Scene(endpoint, upstream, **limits)
            else:
                async with AsyncWorker("echo", handler, broker=endpoint):
                    yield Scene(endpoint, upstream, **limits)


async def echo(request):
    for part in request[1:]:
        yield part
    yield request[0]


async def for_ever(request):
    await asyncio.Event().wait()


def run(story):
    asyncio.run(asyncio.wait_for(story(), TIMEOUT_SECONDS))


def test_parts_and_the_reply_are_passed_on_in_order():
    async def story():
        async with scene(echo) as played:
            played.do(Begin(7, "echo", [b"a", b"b"]))
            outcomes = [await played.told("answered") for _ in range(3)]
            assert [(number, list(reply), reply.final) for number, reply in outcomes] == [
                (7, [b"b"], False), (7, [b"a"], False), (7, [b""], True),
            ]  # fmt: skip

    run(story)


def test_an_impossible_request_is_answered():
    async def story():
        async with scene() as played:
            played.machine.replies["answered"] = [b"sorry"]
            played.do(b"before", Begin(1, "", [b""]), b"after")
            number, error = await played.told("answered")
            assert (number, type(error)) == (1, SettingError)
            assert b"".join(played.wire.events) == b"beforeaftersorry"

    run(story)


@pytest.mark.parametrize("end", [lambda played: played.do(Cancel(1)), lambda played: played.conversation.lost()])
def test_requests_are_cancelled_at_the_worker(end):
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def handler(request):
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def story():
        async with scene(handler) as played:
            played.do(Begin(1, "echo", [b""]))
            await started.wait()
            end(played)
            await cancelled.wait()
            played.conversation.answered(1, SettingError("late"))
            assert all(told[0] != "answered" for told in drain(played.machine.told))

    run(story)


def drain(queue):
    while not queue.empty():
        yield queue.get_nowait()


def test_nothing_is_read_while_too_much_is_outstanding():
    async def story():
        async with scene(for_ever, max_outstanding=2) as played:
            played.do(Begin(1, "echo", [b""]))
            assert played.wire.events == []
            played.do(Begin(2, "echo", [b""]))
            assert played.wire.events == ["pause"]
            played.do(Cancel(1))
            assert played.wire.events == ["pause", "resume"]

    run(story)


def test_a_peer_that_does_not_read_is_disconnected():
    async def story():
        async with scene(max_unread_bytes=10) as played:
            played.do(b"x")
            played.wire.unread = 11
            played.do(b"y", b"z")
            played.do(b"no more")
            assert played.wire.events == [b"x", "abort"]

    run(story)


def test_what_was_written_goes_out_before_the_connection_closes():
    async def story():
        async with scene() as played:
            played.do(Close("it is late"), b"bye")
            played.do(b"lost")
            played.conversation.received(b"ignored")
            assert played.wire.events == [b"bye", "close"]
            assert played.machine.told.empty()

    run(story)


def test_a_peer_offers_a_service():
    async def story():
        async with scene() as played, AsyncClient(played.endpoint, timeout=TIMEOUT_SECONDS) as client:
            played.do(Offer("peer"))
            parts = [part async for part in asked(played, client)]
            assert parts == [[b"1"], [b"2", b"3"]]

    async def asked(played, client):
        stream = client.stream("peer", b"question")
        first = asyncio.ensure_future(anext(stream))
        assert await played.told("asked") == (1, [b"question"])
        played.do(Answer(1, [b"1"], False), Answer(1, [b"2", b"3"], True), Answer(1, [b"4"], True))
        yield list(await first)
        async for part in stream:
            yield list(part)

    run(story)


def test_a_peer_fails_a_request():
    async def story():
        async with scene() as played, AsyncClient(played.endpoint, timeout=TIMEOUT_SECONDS) as client:
            played.machine.replies["asked"] = [Fail(1, 471, "no", b"detail")]
            played.do(Offer("peer"))
            with pytest.raises(ServiceError) as caught:
                await client.request("peer", b"question")
            assert (caught.value.code, caught.value.text, caught.value.detail) == (471, "no", b"detail")

    run(story)


def test_a_request_that_nobody_wants_any_longer_is_withdrawn():
    async def story():
        async with scene() as played, AsyncClient(played.endpoint, timeout=TIMEOUT_SECONDS) as client:
            played.do(Offer("peer"))
            asking = asyncio.ensure_future(client.request("peer", b"question"))
            (number, _) = await played.told("asked")
            asking.cancel()
            assert await played.told("withdrawn") == (number,)
            played.do(Answer(number, [b"late"], True))

    run(story)


def test_a_service_is_withdrawn():
    async def story():
        async with scene() as played, AsyncClient(played.endpoint, timeout=TIMEOUT_SECONDS) as client:
            played.do(Offer("peer"), Offer("other"))
            while not (await client.available("peer") and await client.available("other")):
                await asyncio.sleep(0)
            played.do(Withdraw("peer"))
            while await client.available("peer"):
                await asyncio.sleep(0)
            played.conversation.lost()
            while await client.available("other"):
                await asyncio.sleep(0)

    run(story)


class Waiting(asyncio.Future):
    """Gets the outcome of a request."""

    put = asyncio.Future.set_result


def test_requests_that_arrive_while_the_connection_ends_go_to_another_worker():
    """One that the worker has just begun to handle is among them."""

    async def story():
        async with scene() as played, AsyncClient(played.endpoint, timeout=TIMEOUT_SECONDS) as client:
            played.do(Offer("peer"))
            outcomes = [Waiting() for _ in range(3)]  # in one message
            for each in outcomes:
                client.begin(each, "peer", b"question")
            await played.told("asked")
            played.conversation.lost()
            async with AsyncWorker("peer", echo, broker=played.endpoint):
                assert [list(await each) for each in outcomes] == [[b"question"]] * 3

    run(story)


def test_a_service_that_cannot_be_offered_is_refused_and_nothing_else_suffers(monkeypatch):
    monkeypatch.setattr(upstream, "MAX_SOCKETS", 20)

    async def story():
        async with scene() as played, AsyncClient(played.endpoint, timeout=TIMEOUT_SECONDS) as client:
            names = [f"peer{number}" for number in range(20)]
            played.do(*map(Offer, names), Offer("peer0"), b"after")
            refused = [told[1:] for told in drain(played.machine.told) if told[0] == "refused"]
            assert ("peer0", "service 'peer0' is offered already") in refused
            assert "as many sockets as it may" in dict(refused)["peer19"]
            assert played.wire.events == [b"after"]
            played.do(Withdraw("peer19"), Withdraw("peer19"))
            played.machine.replies["asked"] = [Answer(1, [b"here"], True)]
            assert list(await client.request("peer0", b"")) == [b"here"]

    run(story)


def test_nothing_is_read_while_the_broker_does_not_keep_up_with_answers():
    async def story():
        async with scene() as played, AsyncClient(played.endpoint, timeout=TIMEOUT_SECONDS) as client:
            played.do(Offer("peer"))
            stream = client.stream("peer", b"question")
            first = asyncio.ensure_future(anext(stream))
            (number, _) = await played.told("asked")
            played.do(*[Answer(number, [b"%d" % each], False) for each in range(MAX_ANSWERS)])
            assert played.wire.events == ["pause"]
            played.do(Answer(number, [b"last"], True))
            parts = [list(await first), *[list(part) async for part in stream]]
            assert parts == [*[[b"%d" % each] for each in range(MAX_ANSWERS)], [b"last"]]
            assert played.wire.events == ["pause", "resume"]

    run(story)
