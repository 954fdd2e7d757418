"""What gateways tell each other: events, and who has left."""

import asyncio

import pytest
from support.processes import TIMEOUT_SECONDS

from zmdp.clients import AsyncClient
from zmdp.gateways.upstream import Upstream
from zmdp.interop.flux.instance import departures, pubsub
from zmdp.interop.flux.instance.departures import Departures
from zmdp.interop.flux.instance.pubsub import EVENTS, Publisher, Subscribers, Subscription
from zmdp.interop.flux.instance.topology import BrokerTree, ask
from zmdp.mdp.errors import ServiceError, SettingError, WorkerLost
from zmdp.workers.session.request import Request


def request(*frames):
    return Request(frames, service="x", client=b"c")


async def until(condition):
    """Let others run until something has happened."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not condition():
            await asyncio.sleep(0)


class Subscriber:
    """Records what a connection is told."""

    def __init__(self):
        self.seen = []

    def subscribed(self):
        self.seen.append("subscribed")

    def event(self, event, message):
        self.seen.append((event.sequence, event.topic))


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_gateway_that_does_not_keep_up_must_subscribe_again(monkeypatch):
    monkeypatch.setattr(pubsub, "MAX_BACKLOG", 2)

    async def story():
        publisher = Publisher()
        stream = publisher.handle(request(b""))
        assert await anext(stream) is None
        for _ in range(2):
            assert [each.value async for each in publisher.handle(request(b'{"topic":"x","flags":0}'))]
        assert (await anext(stream))[0] == b"x"
        for _ in range(2):
            async for _ in publisher.handle(request(b'{"topic":"x","flags":0}')):
                pass
        with pytest.raises(ServiceError, match="subscribe again"):
            await anext(stream)
        assert publisher.sequence == 4
        assert not publisher._streams

    asyncio.run(story())


def test_a_gateway_subscribes_while_it_has_subscribers(broker, monkeypatch):
    monkeypatch.setattr(pubsub, "RETRY_SECONDS", 0.0)

    async def story():
        async with Upstream(broker) as upstream:
            publisher = Publisher()
            upstream.offer(EVENTS, publisher.handle)
            subscribers, one, two = Subscribers(), Subscriber(), Subscriber()
            subscription = Subscription(subscribers, upstream.client)
            assert not subscribers.add(one)
            await until(lambda: one.seen == ["subscribed"])
            assert subscribers.add(two)
            await upstream.client.request(EVENTS, b'{"topic":"x"}')
            await until(lambda: one.seen[1:] == two.seen == [(1, "x")])
            subscribers.remove(one)
            assert len(publisher._streams) == 1
            subscribers.remove(two)
            subscribers.remove(two)
            await until(lambda: not publisher._streams)
            assert not subscribers.ready
            # The subscription is made again when it breaks, and its subscribers are told.
            subscribers.add(one)
            await until(lambda: len(publisher._streams) == 1)
            await until(lambda: subscribers.ready)
            next(iter(publisher._streams)).put([b"no event"])
            publisher.close()
            await until(lambda: not subscribers.ready)
            await until(lambda: subscribers.ready)
            assert one.seen[-2:] == ["subscribed", "subscribed"]
            subscription.close()
            subscribers.remove(one)
            subscribers.add(one)
            await until(lambda: not publisher._streams)
            publisher.close()

    asyncio.run(story())


def test_subscribers_do_not_wait_for_ever_for_the_gateway_at_rank_0(broker, monkeypatch):
    monkeypatch.setattr(pubsub, "CONFIRM_SECONDS", 0.0)

    async def story():
        async with AsyncClient(broker, timeout=None) as client:
            subscribers, one, two = Subscribers(), Subscriber(), Subscriber()
            subscription = Subscription(subscribers, client)
            for each in (one, two):
                subscribers.add(each)
                await until(lambda each=each: each.seen == ["subscribed"])
            subscribers.add(one)  # to another topic
            await until(lambda: one.seen == ["subscribed"] * 2)
            assert not subscribers.ready
            gone = Subscriber()
            subscribers.add(gone)
            subscribers.remove(gone)
            await until(lambda: not subscription._waiting)
            assert not gone.seen
            subscription.close()

    asyncio.run(story())


# ── departures ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_whoever_watches_a_client_is_told_once_that_it_has_left(broker):
    async def story():
        async with Upstream(broker) as one, Upstream(broker) as two:
            here, there = Departures(one.client, 0.0), Departures(two.client, 0.0)
            two.offer(there.service, there.handle)
            await one.client.request(there.service, b"")
            gone, also, never = [], [], []
            for client in ("a", "b"):
                there.arrived(client)
            here.watch(there.service, "a", gone.append)
            here.watch(there.service, "a", gone.append)
            here.watch(there.service, "a", also.append)
            here.watch(there.service, "b", never.append)
            await until(lambda: all(there._present.values()))
            here.forget(there.service, "b", never.append)
            here.forget(there.service, "b", never.append)
            await until(lambda: not there._present["b"])
            there.left("a")
            there.left("b")
            await until(lambda: (gone, also) == (["a"], ["a"]))
            here.watch(there.service, "a", gone.append)  # it is not there
            await until(lambda: gone == ["a", "a"])
            assert not never
            assert not here._watches

    asyncio.run(story())


def test_a_gateway_that_does_not_come_back_takes_its_clients_with_it(broker):
    async def story():
        async with AsyncClient(broker, timeout=TIMEOUT_SECONDS) as client:
            here, gone = Departures(client, 0.0), []
            here.watch(departures.GATEWAY + "0" * 32, "a", gone.append)
            await until(lambda: gone == ["a"])
            here.watch("no service\n", "a", gone.append)
            await until(lambda: gone == ["a", "a"])
            here.watch(departures.GATEWAY + "0" * 32, "b", gone.append)
            here.close()
            here.watch(departures.GATEWAY + "0" * 32, "c", gone.append)
            await client.request("mmi.service", b"x")
            assert gone == ["a", "a"]

    asyncio.run(story())


# ── the broker's side ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_service_is_offered_once(broker):
    async def story():
        async with Upstream(broker) as upstream:
            upstream.offer("x", Publisher().handle)
            with pytest.raises(SettingError, match="offered already"):
                upstream.offer("x", Publisher().handle)
            upstream.withdraw("x")
            upstream.withdraw("x")
            upstream.offer("x", Publisher().handle)

    asyncio.run(story())


def test_brokers_that_vanish_while_they_are_asked_are_left_out():
    class Client:
        async def request(self, service, *frames, timeout, options=None):
            if options == {"broker": "gone"}:
                raise WorkerLost("gone")
            links = b'[{"broker":"root","kind":"parent","state":"up"}]' if options is None else b"[]"
            return [b'{"name":"a","links":%s,"brokers":[{"name":"gone"},{"name":"root"}]}' % links]

    assert asyncio.run(ask(Client(), 1.0)) == BrokerTree("a", {"a": "root", "root": None})
