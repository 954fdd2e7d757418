"""Latenciess of latencies."""

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zmdp.clients.command.bench.latencies import PERCENTILES, Latencies

seconds = st.integers(0, 10**10).map(lambda microseconds: microseconds / 1e6)


def recorded(values):
    histogram = Latencies()
    for value in values:
        histogram.record(value)
    return histogram


@given(st.lists(seconds, min_size=1, max_size=300), st.sampled_from([1.0, 25.0, *PERCENTILES, 100.0]))
@example([0.000_255, 0.000_256, 0.000_257], 50.0)
def test_percentiles_are_within_one_part_in_128(values, percent):
    exact = sorted(values)[math.ceil(len(values) * Fraction(str(percent)) / 100) - 1]
    found = recorded(values).percentile(percent)
    assert exact * (1 - 1 / 128) - 1e-9 <= found <= exact + 1e-9


@given(st.lists(seconds, min_size=1, max_size=100))
def test_mean_count_and_maximum_are_exact(values):
    histogram = recorded(values)
    assert histogram.count == len(values)
    assert histogram.mean == pytest.approx(sum(values) / len(values))
    assert histogram.largest == max(values)


@given(st.lists(seconds, min_size=1, max_size=100))
def test_a_summary_is_in_order(values):
    summary = recorded(values).summary()
    assert list(summary) == ["mean", "p50", "p90", "p99", "p99.9", "max"]
    assert summary["p50"] <= summary["p90"] <= summary["p99"] <= summary["p99.9"] <= summary["max"]


def test_a_summary_is_in_milliseconds():
    assert recorded([0.1] * 9 + [2.0]).summary() == {
        "mean": 290.0, "p50": pytest.approx(100, rel=1 / 128), "p90": pytest.approx(100, rel=1 / 128),
        "p99": pytest.approx(2000, rel=1 / 128), "p99.9": pytest.approx(2000, rel=1 / 128), "max": 2000.0,
    }  # fmt: skip


def test_nothing_recorded():
    assert Latencies().summary() == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0, "p99.9": 0.0, "max": 0.0}


def test_its_memory_does_not_grow_with_the_number_of_values():
    histogram = recorded(number / 1e6 for number in range(200_000))
    assert histogram.count == 200_000
    assert len(histogram._counts) < 2000
    assert histogram.percentile(50) == pytest.approx(0.1, rel=1 / 128)


def test_a_clock_that_goes_back():
    assert recorded([-0.001]).percentile(50) == 0
