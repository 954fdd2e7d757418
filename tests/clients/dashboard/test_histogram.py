import pytest

from zmdp.clients.dashboard.histogram import Histogram

BOUNDS = [1.0, 2.0, 4.0]


def test_the_sum_of_histograms_has_all_buckets():
    total = Histogram.total([Histogram([1], 0.5), Histogram([0, 2, 3], 9.0), Histogram()])
    assert total == Histogram([1, 2, 3], 9.5)
    assert total.count == 6


def test_what_was_counted_in_between():
    assert Histogram([3, 0, 2], 8.0).since(Histogram([1], 1.0)) == Histogram([2, 0, 2], 7.0)


@pytest.mark.parametrize("earlier", [Histogram([4], 1.0), Histogram([1, 0, 0, 1], 1.0)])
def test_a_broker_that_began_anew_has_no_difference(earlier):
    assert Histogram([3, 0, 2], 8.0).since(earlier) == Histogram()


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ([10], 0.5, 0.5),
        ([10, 10], 0.5, 1.0),
        ([10, 10], 0.75, 1.5),
        ([0, 0, 10], 1.0, 4.0),
        ([0, 0, 0, 10], 0.5, 4.0),  # longer than the last bound
        ([99, 0, 1], 0.995, 3.0),
    ],
)
def test_quantiles(buckets, share, expected):
    assert Histogram(buckets).quantile(share, BOUNDS) == pytest.approx(expected)


def test_nothing_has_no_quantile():
    assert Histogram().quantile(0.5, BOUNDS) is None
