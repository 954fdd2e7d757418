"""The limits of services: what may be said, what it means, and which of two is stricter."""

import pytest

from zmdp import Limit
from zmdp.mdp.errors import SettingError
from zmdp.mdp.service_limits import NO_LIMITS, ServiceLimits


@pytest.mark.parametrize(
    ("rate", "interval", "at_once"),
    [("500/min", 0.12, 1), ("1/s", 1, 1), ("200/s", 0.005, 20), ("2/h", 1800, 1), ("0.5/d", 172_800, 1)],
)
def test_a_rate_is_a_number_per_unit_of_time(rate, interval, at_once):
    limit = Limit(rate=rate)
    assert limit.interval == pytest.approx(interval)
    assert limit.at_once == at_once


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"concurrency": 0}, "concurrency is 0: it must be a whole number of at least 1"),
        ({"concurrency": True}, "concurrency is True"),
        ({"rate": "1/s", "burst": 1.5}, "burst is 1.5"),
        ({"burst": 3}, "burst is 3, but there is no rate"),
        ({"rate": 5}, 'like "500/min"'),
        ({"rate": "0/s"}, "rate is '0/s'"),
        ({"rate": "5/week"}, "(s, min, h, d)"),
        ({"rate": "-5/s"}, "rate is '-5/s'"),
    ],
)
def test_what_is_wrong_with_a_limit(arguments, said):
    with pytest.raises(SettingError) as raised:
        Limit(**arguments)
    assert said in str(raised.value)


@pytest.mark.parametrize("given", [1, [], {"tenant": {}}, {"service": 5}, {"group": {"speed": 1}}])
def test_what_is_not_limits(given):
    with pytest.raises(SettingError, match="limits"):
        ServiceLimits.read(given)


def test_the_stricter_of_two_keeps_both():
    one, other = Limit(concurrency=8, rate="10/s", burst=5), Limit(concurrency=9, rate="60/min")
    both = ServiceLimits(one).stricter(ServiceLimits(other))
    assert both == ServiceLimits(other).stricter(ServiceLimits(one)) == ServiceLimits(Limit(8, "60/min", 1))
    limits = ServiceLimits(one, other)
    assert NO_LIMITS.stricter(limits) == limits == ServiceLimits.read(limits.as_dict())


def test_limits_are_shown_to_people():
    assert str(ServiceLimits(Limit(8, "500/min", 20), Limit(2))) == "8 at once, 500/min (burst 20); per group 2 at once"
    assert str(NO_LIMITS) == "none"
