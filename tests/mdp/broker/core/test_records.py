"""Peers as the broker keeps them: by their addresses, and as people read of them."""

import pytest

from zmdp.mdp.broker.core.records import Service, Worker, key_of
from zmdp.mdp.broker.core.roles import Role
from zmdp.mdp.wire import W02


@pytest.mark.parametrize(
    ("route", "key"),
    [
        ((b"c",), b"c"),
        ((b"c", b""), b"c"),
        ((b"p", b"c", b""), (b"p", b"c")),
        ((b"p", b"q", b"c", b""), (b"p", b"q", b"c")),
    ],
)
def test_a_peer_is_known_by_its_addresses(route, key):
    assert key_of(route) == key


def test_a_worker_is_named_for_people():
    worker = Worker((b"secret",), W02, Service(b"echo"), Role(), credit=1, id=5, now=0)
    assert str(worker) == "5"
    worker.host = "box"
    assert str(worker) == "5 (on box)"
    worker.name, worker.pid = "resize", 17
    assert str(worker) == "5 (resize, on box, pid 17)"
