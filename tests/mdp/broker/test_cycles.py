"""The machine creates no reference cycles, since `mdp-broker` runs without the collector that would find them."""

import gc
import logging

from support import turns
from support.garbage import no_collector
from support.x1_messages import cancel, feed, final, leave, ready, request

from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits

ROUNDS = 300


def live_through_everything(broker):
    """Workers that come, leave and are lost; requests that are done, cancelled, retried, expired and dropped."""
    now = 0.0
    for number in range(ROUNDS):
        now += 0.01
        worker, client = b"w%d" % number, b"c%d" % number
        feed(broker, ready(worker, credit=3), now=now)
        for each in range(5):
            for sent in feed(broker, request(each, client=client, ttl=1000), now=now):
                if sent[:2] == (worker, "REQUEST") and each == 2:
                    feed(broker, final(sent[2], worker), now=now)
        feed(broker, [client, b"MDPC02", b"\x01", b"echo", b"x"], cancel(client=client), [worker, b"junk"], now=now)
        if number % 3 == 0:
            feed(broker, leave(worker), now=now)
        elif number % 3 == 1:
            turns.disconnected(broker, worker, broker.turn, now)
        turns.tick(broker, now)
        if number % 2:
            turns.give_up(broker, client, now)
    turns.tick(broker, now + 1000)
    turns.close(broker, now + 1001)


def test_no_cycles_are_left():
    broker = Broker(Limits(), now=0, logger=logging.Logger("quiet", logging.CRITICAL + 1))
    with no_collector():
        live_through_everything(broker)
        assert gc.collect() == 0
