"""Titanics that share schedules are killed, and every occurrence is submitted exactly once."""

import pytest
from support.processes import TIMEOUT_SECONDS, broker
from support.schedules import survive


@pytest.mark.parametrize(
    ("occurrences", "kills"), [(8, 4), pytest.param(60, 40, marks=pytest.mark.long)], ids=["short", "long"]
)
def test_every_occurrence_is_submitted_exactly_once_whoever_is_killed(own_url, occurrences, kills):
    with broker() as (_, endpoint):
        report = survive(
            own_url, endpoint, titanics=2, schedules=20, occurrences=occurrences, kills=kills, seed=7,
            limit=TIMEOUT_SECONDS + 5 * occurrences,
        )  # fmt: skip
    assert (report.twice, report.never) == ([], [])
    assert report.submitted == report.expected >= 20 * occurrences
    assert report.kills >= kills
