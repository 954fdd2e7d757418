"""Rates and quantiles from counts."""

import pytest

from zmdp.clients.rates import Interval, quantile

BOUNDS = [0.01, 0.1, 1.0]


@pytest.mark.parametrize(
    ("share", "buckets", "zeros", "expected"),
    [
        (0.5, [], 0, None),
        (0.5, [0, 0], 0, None),
        (0.5, [], 3, 0.0),
        (0.5, [10], 0, 0.005),
        (0.99, [100], 0, 0.0099),
        (0.5, [10], 10, 0.0),
        (0.75, [10], 10, 0.005),
        (0.5, [0, 10], 0, 0.055),
        (0.5, [5, 0, 5], 0, 0.01),
        (0.6, [5, 0, 5], 0, 0.28),
        (0.99, [1, 0, 0, 99], 0, 1.0),
        (1.0, [0, 0, 4], 0, 1.0),
    ],
)
def test_quantiles(share, buckets, zeros, expected):
    assert quantile(share, buckets, BOUNDS, zeros=zeros) == expected


def test_rates():
    assert Interval(4.0).rate(10, 2) == 2.0
    assert Interval(3.0).rate(1, digits=3) == 0.333
    assert Interval(4.0).rate(2, 10) == 0.0
    assert Interval(0.0).rate(2) == 0.0
