"""Which broker is next, and when.  What follows from it is tested with the sessions of clients and workers."""

import pytest
from support.x1_client import Highest

from zmdp.mdp.transport.failover import PROBE_TIMEOUT_SECONDS, Failover

pytestmark = pytest.mark.unit


def among(count: int) -> Failover:
    made = Failover("ABC"[:count], Highest(), (0.5, 4.0))
    made.connected(100.0)
    return made


def moves(failover: Failover, *losses: bool) -> str:
    """The endpoints used, while brokers are lost that were of use (True) or not (False)."""
    used = failover.endpoint
    for of_use in losses:
        failover.lost("", 100.0, of_use=of_use)
        used += failover.endpoint
    return used


@pytest.mark.parametrize(
    ("count", "losses", "used"),
    [
        (1, [True, False, True], "AAAA"),
        (3, [False, False, False, False], "ABCAB"),  # as long as none answers, one after the other
        (3, [True], "AB"),  # not the first, which has just been lost
        (3, [True, True], "ABA"),  # the second answered: back to the first
        (3, [True, False, True], "ABCA"),
        (3, [False, True, True], "ABAB"),
        (2, [True, True, False, True], "ABABA"),
    ],
)
def test_which_endpoint_is_next(count: int, losses: list[bool], used: str) -> None:
    assert moves(among(count), *losses) == used


@pytest.mark.parametrize(
    ("count", "pauses"), [(1, [0.5, 1.0, 2.0, 4.0, 4.0]), (2, [0.0, 0.5, 0.0, 1.0, 0.0]), (3, [0.0, 0.0, 0.5, 0.0])]
)
def test_there_is_a_pause_when_all_were_tried(count: int, pauses: list[float]) -> None:
    failover, found = among(count), []
    for _ in pauses:
        failover.lost("nobody", 100.0, of_use=False)
        found.append(failover.retry_at - 100.0)
    assert found == pauses
    failover.lost("it broke", 100.0, of_use=True)
    assert failover.retry_at == 100.0
    failover.lost("nobody", 100.0, of_use=False)
    assert failover.retry_at == 100.0 + (0.5 if count < 3 else 0.0)


def test_brokers_that_drain() -> None:
    """The next is tried, not the first, which may have drained just before; pauses stay short."""
    failover, used, pauses = among(3), "A", []
    for _ in range(9):
        failover.lost("", 100.0, of_use=False, dismissed=True)
        used += failover.endpoint
        pauses.append(failover.retry_at - 100.0)
        failover.connected(100.0)
    assert used == "ABCABCABCA"
    assert pauses == [0, 0, 0.5, 0, 0, 1, 0, 0, 1]
    assert failover.all_drain
    failover.lost("", 101.0, of_use=True, dismissed=True)
    assert not failover.all_drain


def test_a_probe_that_is_answered_too_late_changes_nothing() -> None:
    failover = among(2)
    failover.lost("nobody", 100.0, of_use=False)
    failover.connected(100.0)
    assert (failover.take_probe(100.9), failover.take_probe(101.0)) == (None, "A")
    assert failover.probe_at == 101.0 + PROBE_TIMEOUT_SECONDS
    failover.lost("it broke", 101.0, of_use=True)
    failover.probed(True, 101.1)
    assert (failover.endpoint, failover.returning) == ("A", False)
