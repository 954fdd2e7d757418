"""A short run of the crash harness; `make crash` runs it for longer."""

import pytest
from faults.crash import Plan, crash


@pytest.mark.parametrize(
    ("db", "titanics", "seed", "kills"),
    [
        ("sqlite", 1, 19, 4),
        pytest.param("sqlite", 1, 19, 12, marks=pytest.mark.long),
        pytest.param("postgres", 2, 154, 12, marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(900)  # it waits for callers, on a busy machine for minutes
def test_no_accepted_request_is_lost_whatever_is_killed(db, titanics, seed, kills, tmp_path):
    verdict, site = crash(Plan(db, titanics, kills=kills, seed=seed, pause=0.4), tmp_path, quiet=True)
    assert not site.broken
    assert site.kills >= kills
    assert verdict.counts["ended right"] >= 100
