"""Settings: defaults that are sane, values out of range that are named."""

from dataclasses import FrozenInstanceError, fields

import pytest

from zmdp.mdp.errors import SettingError
from zmdp.mdp.limits import Limits

SETTINGS = {setting.name: setting for setting in fields(Limits)}
WHOLE = {name for name in SETTINGS if name not in {"heartbeat", "busy_grace", "expiry"}}


def test_the_defaults_are_allowed():
    limits = Limits()
    assert (limits.heartbeat, limits.liveness, limits.busy_grace, limits.max_attempts) == (1.0, 5, 60.0, 3)


def test_patience_is_liveness_intervals():  # C13
    assert Limits(heartbeat=0.5, liveness=4).patience == 2.0


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_explains_itself(name):
    metadata = SETTINGS[name].metadata
    assert metadata["unit"].isalpha()
    assert metadata["help"].endswith(".")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_accepts_positive_numbers(name):
    assert getattr(Limits(**{name: 1}), name) == 1


@pytest.mark.parametrize("value", [0, -1, True, None, "1", float("nan"), float("inf")])
@pytest.mark.parametrize("name", SETTINGS)
def test_an_error_names_the_value_out_of_range(name, value):
    if value is None and SETTINGS[name].default is None:
        return
    kind = "a whole number" if name in WHOLE else "a number"
    unit = SETTINGS[name].metadata["unit"]
    with pytest.raises(SettingError) as error:
        Limits(**{name: value})
    assert str(error.value) == f"{name} is {value!r}: it must be {kind} of {unit} above 0"


@pytest.mark.parametrize("name", SETTINGS)
def test_only_times_accept_fractions(name):
    if name in WHOLE:
        with pytest.raises(SettingError, match=f"{name} is 1.5: it must be a whole number"):
            Limits(**{name: 1.5})
    else:
        assert getattr(Limits(**{name: 1.5}), name) == 1.5


def test_a_message_has_no_more_frames_than_a_body_in_x1():
    assert Limits(max_frames=65_535).max_frames == 65_535
    with pytest.raises(SettingError, match="max_frames is 65536: it must be 65535 frames or fewer"):
        Limits(max_frames=65_536)


def test_heartbeats_have_a_shortest_interval():
    assert Limits(heartbeat=0.01).heartbeat == 0.01
    with pytest.raises(SettingError, match=r"heartbeat is 0\.009: it must be 0\.01 seconds or more"):
        Limits(heartbeat=0.009)


def test_limits_are_immutable():
    with pytest.raises(FrozenInstanceError):
        Limits().heartbeat = 2.0
