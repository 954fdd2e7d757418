"""A short soak; `make soak` runs it for hours."""

import pytest
from faults.referee import SHOWN
from faults.soak import soak


@pytest.mark.long
@pytest.mark.timeout(1800)  # it waits for callers and replacements, on a busy machine for minutes
def test_everything_at_once_keeps_its_promises_while_everything_fails(tmp_path):
    found = soak(hours=0.03, seed=3, folder=tmp_path)
    assert not found.broken, found.broken[:SHOWN]
    assert found.verdict.counts["ended right"] > 500
    assert len(found.replaced) == 2
    assert "all invariants hold" in (tmp_path / "report.md").read_text()
