"""A broker keeps nothing of peers that are gone: its objects are counted, over real sockets."""

import gc
import logging
import math
import time
from collections import Counter

import zmq
from support.processes import eventually

from zmdp.mdp.broker.io.loop import Server
from zmdp.testing import free_endpoint

CLIENTS = 20
IGNORED = (int, float, str, bytes, bool, type(None), type, logging.Logger)


def objects_of(root):
    """Count everything that can be reached from `root`, by type."""
    seen, found, new = {}, Counter(), [root]
    while new:
        each = new.pop()
        if id(each) in seen or callable(each) or type(each).__name__ == "module":
            continue
        seen[id(each)] = each
        found[type(each).__name__] += 1
        new += [inner for inner in gc.get_referents(each) if not isinstance(inner, IGNORED)]
    return found


def test_nothing_is_kept_of_clients_and_workers_that_are_gone():
    endpoint = free_endpoint()
    with zmq.Context() as context, Server((endpoint,)) as server:

        def turn_until(condition):
            def turned():
                now = time.monotonic()
                server._turn(now)
                server._sockets.wait(0)
                return condition()

            eventually(turned)

        def come_and_leave():
            with context.socket(zmq.DEALER) as worker:
                worker.connect(endpoint)
                worker.send_multipart([b"MDPW02", b"\x01", b"echo"])
                turn_until(lambda: server.broker.directory.workers)
                for _ in range(CLIENTS):
                    with context.socket(zmq.DEALER) as client:
                        client.connect(endpoint)
                        client.send_multipart([b"MDPC02", b"\x01", b"echo", b"x"])
                        turn_until(lambda: worker.poll(0))
                        _, _, address, *_ = worker.recv_multipart()
                        worker.send_multipart([b"MDPW02", b"\x04", address, b"", b"y"])
                        turn_until(lambda client=client: client.poll(0))
                        client.recv_multipart()
                worker.send_multipart([b"MDPW02", b"\x06"])
                turn_until(lambda: not server.broker.directory.workers)
            turn_until(lambda: server.connections.open == 0)
            turn_until(
                lambda: not server._delivery.gone and server._sockets.main.alarm.due == math.inf
            )  # all were probed
            return objects_of(server)

        first = come_and_leave()
        come_and_leave()
        assert come_and_leave() == first
