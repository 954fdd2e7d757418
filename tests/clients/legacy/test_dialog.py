"""Clients of MDP/0.2 with several brokers."""

import pytest
from doors.adapters import SERVICE, Asyncio02, Threads02
from support.router import Router


@pytest.mark.parametrize("kind", [Threads02, Asyncio02])
def test_a_legacy_client_returns_to_the_first_broker(kind, tmp_path):
    with Router() as first, Router() as second, Router() as third:
        with kind([each.endpoint for each in (first, second, third)], tmp_path) as door:
            for router in (first, second, first):
                asking = door.begin(b"x")
                message = router.recv()
                router.send(message[0], b"MDPC02", b"\x03", SERVICE.encode(), b"x")
                assert asking.outcome() == [b"x"]
                assert door.client.endpoint == router.endpoint
                assert door.begin(b"lost", timeout=0.2).outcome().kind == "timeout"
                router.recv()
