"""A short run of the crash harness; `make crash` runs it for longer."""

import pytest
from crash import Plan, crash, told


@pytest.mark.parametrize(("db", "titanics", "seed"), [("sqlite", 1, 19), ("postgres", 2, 154)])
def test_no_accepted_request_is_lost_whatever_is_killed(db, titanics, seed, tmp_path):
    # Seeds that cover a bit of everything.
    report = crash(Plan(db, titanics, kills=12, seed=seed, pause=0.4, settle=300), tmp_path, quiet=True)
    assert not report["troubles"], told(report)
    assert report["kills"] >= 12
    assert report["accepted"] >= 100
