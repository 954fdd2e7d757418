"""Rates from counts."""

from zmdp.clients.command.monitoring.rates import Interval


def test_rates():
    assert Interval(4.0).rate(10, 2) == 2.0
    assert Interval(3.0).rate(1, digits=3) == 0.333
    assert Interval(4.0).rate(2, 10) == 0.0
    assert Interval(0.0).rate(2) == 0.0
