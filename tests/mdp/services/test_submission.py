"""A service's defaults for submissions to Titanic, as they are declared and as workers tell them."""

import pytest

from zmdp.mdp.errors import SettingError
from zmdp.mdp.services import About, Service


@pytest.mark.parametrize(
    "invalid",
    [
        {"retries": -1}, {"retries": 1.0}, {"retries": 10**6}, {"priority": True}, {"priority": 10},
        {"backoff": float("inf")}, {"ttl": float("nan")}, {"ttl": 1e10},
    ],
)  # fmt: skip
def test_a_default_is_a_number_that_titanic_takes(invalid):
    with pytest.raises(SettingError, match=f"{next(iter(invalid))} is .*: it must be "):
        Service("echo", **invalid)


def test_of_what_workers_say_only_valid_defaults_are_read():
    said = {"retries": "3", "backoff": -1, "ttl": float("nan"), "priority": 7, "delay": 5, "key": "x"}
    assert About.read({"submission": said}).submission == {"priority": 7}
    assert About.read({"submission": [3]}).submission == {}
