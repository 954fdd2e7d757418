"""Histograms: sums, differences, quantiles."""

import pytest

from zmdp.mdp.histogram import Histogram, sum_of

BOUNDS = [1.0, 2.0, 4.0]


def as_pair(histogram):
    return histogram.buckets, histogram.total


def test_values_are_counted_and_summed_up():
    made = Histogram([0, 0, 0, 0])
    made.add(1, 1.5)
    made.add(1, 1.75)
    assert (as_pair(made), made.count, made.trimmed()) == (([0, 2, 0, 0], 3.25), 2, [0, 2])
    assert Histogram([0, 0]).trimmed() == []


def test_the_sum_of_histograms_has_all_buckets():
    total = sum_of([Histogram([1], 0.5), Histogram([0, 2, 3], 9.0), Histogram([])])
    assert as_pair(total) == ([1, 2, 3], 9.5)
    assert total.count == 6


def test_what_was_counted_in_between():
    assert as_pair(Histogram([3, 0, 2], 8.0).since(Histogram([1], 1.0))) == ([2, 0, 2], 7.0)
    assert as_pair(Histogram([3], 8.0).since(Histogram([1, 0], 1.0))) == ([2, 0], 7.0)


@pytest.mark.parametrize("earlier", [Histogram([4], 1.0), Histogram([1, 0, 0, 1], 1.0)])
def test_counts_that_began_anew_have_no_difference(earlier):
    assert as_pair(Histogram([3, 0, 2], 8.0).since(earlier)) == ([], 0.0)


@pytest.mark.parametrize(
    ("share", "buckets", "zeros", "expected"),
    [
        (0.5, [], 0, None),
        (0.5, [0, 0], 0, None),
        (0.5, [], 3, 0.0),
        (0.5, [10], 0, 0.5),
        (0.99, [100], 0, 0.99),
        (0.5, [10], 10, 0.0),
        (0.75, [10], 10, 0.5),
        (0.5, [10, 10], 0, 1.0),
        (0.75, [10, 10], 0, 1.5),
        (0.5, [5, 0, 5], 0, 1.0),
        (0.6, [5, 0, 5], 0, 2.4),
        (1.0, [0, 0, 10], 0, 4.0),
        (0.5, [0, 0, 0, 10], 0, 4.0),  # longer than the last bound
        (0.995, [99, 0, 1], 0, 3.0),
    ],
)
def test_quantiles(share, buckets, zeros, expected):
    assert Histogram(buckets).quantile(share, BOUNDS, zeros) == pytest.approx(expected)


def test_prometheus_gets_cumulative_buckets():
    assert Histogram([3, 0, 2]).cumulative(BOUNDS) == [("1.0", 3.0), ("2.0", 3.0), ("4.0", 5.0), ("+Inf", 5.0)]
