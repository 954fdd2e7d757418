"""The rule of failover, as a pure function and over real connections."""

import pytest
from doors.adapters import SERVICE, Asyncio02, Threads02
from support.router import Router

from zmdp.mdp.endpoints import Endpoints


def followed(count, *losses):
    """The numbers of the endpoints used, while brokers are lost that have answered (True) or have not (False)."""
    endpoints = Endpoints([str(number) for number in range(count)])
    used = [endpoints.current]
    for answered in losses:
        used.append(endpoints.fail_over(answered=answered))
        assert used[-1] == endpoints.current
    return "".join(used)


@pytest.mark.parametrize(
    ("count", "losses", "used"),
    [
        (1, [True, False, True], "0000"),
        (3, [False, False, False, False], "01201"),  # as long as none answers, one after the other
        (3, [True], "01"),  # not the first, which has just been lost
        (3, [True, True], "010"),  # the second answered: back to the first
        (3, [True, False, True], "0120"),
        (3, [False, True, True], "0101"),
        (2, [True, True, False, True], "01010"),
    ],
)
def test_which_endpoint_is_next(count, losses, used):
    assert followed(count, *losses) == used


def test_leaving_and_returning():
    endpoints = Endpoints("ABC")
    assert (endpoints.current, endpoints.first, endpoints.at_first) == ("A", "A", True)
    used = [endpoints.advance() for _ in range(4)]
    assert (used, endpoints.at_first) == (["B", "C", "A", "B"], False)  # not "ABAB": A may drain as well
    assert (endpoints.restart(), endpoints.current, endpoints.at_first) == ("A", "A", True)


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
