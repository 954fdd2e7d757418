"""A short run of one limit under everything that can call; `make limited` runs it for longer, and measures it."""

import pytest
from faults.ledger import Entry
from faults.limited import AT_ONCE, figures, limited
from faults.services import LIMIT
from support.sparks import skip_without_java


@pytest.mark.timeout(900)  # it waits for replacements and callers, on a busy machine for minutes
@pytest.mark.parametrize(
    ("callers", "frames", "least"), [(2, False, 60), pytest.param(16, True, 300, marks=pytest.mark.long)]
)
def test_a_limit_holds_for_all_callers_whatever_is_killed(callers, frames, least, tmp_path):
    if frames:
        skip_without_java()
    verdict, site, found = limited(tmp_path, seconds=0.0, every=2.0, callers=callers, frames=frames, least=least)
    assert not site.broken
    assert site.killed
    assert verdict.counts["ended right"] >= least
    assert found.starts >= least


def entries(*times):
    """Return what the handler of process 1 writes for executions that begin and end at these times."""
    return [
        Entry(at, event, f"call-{number}", f"1.{number}")
        for number, pair in enumerate(times)
        for event, at in zip(("executed", "finished"), pair, strict=False)
    ]


def test_as_many_as_are_allowed_at_once_and_in_any_time():
    spaced = [(number * LIMIT.interval, number * LIMIT.interval + 0.5) for number in range(100)]
    found = figures(entries(*spaced), {})
    assert (found.starts, found.at_once) == (100, 5)
    assert found.excess == pytest.approx(1 - LIMIT.at_once)
    assert found.broken() == []


def test_too_many_at_once():
    assert figures(entries(*[(0, 1)] * AT_ONCE), {}).broken() == []
    assert figures(entries(*[(0, 1)] * AT_ONCE, (0.5, 1)), {}).broken()


def test_too_many_in_some_time():
    """Each starts when the one before has ended, so nothing can have delayed it."""
    quick = [(number * 0.01, number * 0.01 + 0.01) for number in range(LIMIT.at_once + 2 * AT_ONCE)]
    assert figures(entries(*quick), {}).proven > 0


def test_what_a_killed_process_ran_has_ended_then():
    times = [(0, 9)] * (AT_ONCE - 1) + [(0,), (2, 3)]
    assert figures(entries(*times), {1: 1.0}).broken() == []
    assert figures(entries(*times), {1: 2.5}).broken()
