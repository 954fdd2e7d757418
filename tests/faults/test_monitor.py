"""What a soak takes for a leak."""

import pytest
from faults.monitor import Series, Usage

MB = 1e6


@pytest.mark.parametrize(
    ("leaks", "rss", "hours"),
    [
        (False, lambda hour: 40 + 0.3 * hour, 6),
        (True, lambda hour: 40 + 0.6 * hour, 6),
        (True, lambda hour: 40 + 6 * hour, 0.5),
        (False, lambda hour: 40 + 6 * hour, 0.4),  # too short to tell
        (False, lambda hour: 40 if hour < 0.3 else 41.2, 0.6),  # one step of the allocators
        (False, lambda hour: 40 + 8 * (hour % 0.05), 1),  # something bounded that is filled again and again
        (False, lambda hour: 40 + 10 * min(hour, 1 / 6), 2),  # caches
        (False, lambda hour: 80 if 0.49 < hour < 0.5 else 40, 1),
    ],
)
def test_growth_is_a_leak_if_it_goes_on_and_is_more_than_a_step(leaks, rss, hours):
    seconds = range(0, round(3600 * hours), 5)
    series = Series("it", [Usage(at, round(MB * rss(at / 3600)), 9, 1) for at in seconds])
    assert series.leaks() == leaks
