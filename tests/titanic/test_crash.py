"""A short run of the crash harness; `make crash` runs it for longer."""

import pytest
from crash import Plan, crash, told


@pytest.mark.parametrize(
    ("db", "titanics", "seed", "kills"),
    [
        ("sqlite", 1, 19, 4),
        pytest.param("sqlite", 1, 19, 12, marks=pytest.mark.long),
        pytest.param("postgres", 2, 154, 12, marks=pytest.mark.long),
    ],
)
def test_no_accepted_request_is_lost_whatever_is_killed(db, titanics, seed, kills, tmp_path):
    # Seeds that cover a bit of everything.
    report = crash(Plan(db, titanics, kills=kills, seed=seed, pause=0.4, settle=300), tmp_path, quiet=True)
    assert not report["troubles"], told(report)
    assert report["kills"] >= kills
    assert report["accepted"] >= 100 * kills // 12
