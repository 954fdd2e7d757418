"""The machine creates no reference cycles, since `mdp-broker` runs without the collector that would find them."""

import gc
import logging

from zmdp.mdp.broker.machine import Broker
from zmdp.mdp.limits import Limits

ROUNDS = 300


def live_through_everything(broker):
    """Workers that come, leave and are lost; requests that are done, cancelled, retried, expired and dropped."""
    now = 0.0
    for number in range(ROUNDS):
        now += 0.01
        worker, client = b"w%d" % number, b"c%d" % number
        broker.receive([worker, b"", b"MDPWX1", b"\x01", b"echo", b'{"credit":3}'], now)
        for each in range(5):
            ask = [client, b"%d" % each, b"", b"MDPCX1", b"\x01", b"echo", b'{"ttl":1000}', b"x"]
            for sent in broker.receive(ask, now):
                if sent[0] == worker and each == 2:
                    broker.receive([*sent[:3], b"\x04", sent[4], b"", b"reply"], now)
        broker.receive([client, b"MDPC02", b"\x01", b"echo", b"x"], now)
        broker.receive([client, b"1", b"", b"MDPCX1", b"\x05", b"echo"], now)
        broker.receive([worker, b"junk"], now)
        if number % 3 == 0:
            broker.receive([worker, b"", b"MDPWX1", b"\x06"], now)
        elif number % 3 == 1:
            broker.unreachable(worker, broker.turn, now)
        broker.tick(now)
        if number % 2:
            broker.gone(client, now)
    broker.tick(now + 1000)
    broker.close(now + 1001)


def test_no_cycles_are_left():
    broker = Broker(Limits(), now=0, logger=logging.Logger("quiet", logging.CRITICAL + 1))
    gc.collect()
    gc.disable()
    try:
        live_through_everything(broker)
        assert gc.collect() == 0
    finally:
        gc.enable()
