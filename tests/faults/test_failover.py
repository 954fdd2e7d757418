"""A short run of linked brokers that end under load; `make failover` runs it at length, and measures it."""

import pytest
from faults.failover import failover


@pytest.mark.timeout(900)  # it waits for callers, on a busy machine for minutes
@pytest.mark.parametrize("how", ["kill", "drain"])
def test_no_call_fails_while_the_brokers_of_a_pair_end_in_turn(how, tmp_path):
    verdict, site = failover(tmp_path, how=how, seconds=0.0, every=1.0, outstanding=200)
    assert not site.broken
    assert verdict.counts["ended right"] > 2000
    assert how == "kill" or "ended failed" not in verdict.counts
