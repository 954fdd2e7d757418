"""Arguments that are refused before Spark is asked for anything."""

import pytest

from zmdp.mdp.errors import SettingError
from zmdp.spark.pipeline import call_service, register_function

COMMON = [
    ({"window": 0}, "window is 0"),
    ({"window": 10_001}, "1 to 10000"),
    ({"window": True}, "window is True"),
    ({"timeout": 0}, "timeout is 0"),
    ({"keep": -1}, "keep is -1"),
    ({"result": "json"}, "one of string, binary, frames"),
    ({"headers": {"a": 1}}, "a mapping, whose names and values are text"),
    ({"headers": "who"}, "a mapping, whose names and values are text"),
    ({"headers": {"a": "x" * 70_000}}, "limits: 65535 bytes"),
    ({"broker": "nowhere"}, "'nowhere' is not a valid endpoint"),
    ({"broker": []}, "broker is empty"),
    ({"broker": "inproc://here"}, "executors cannot reach"),
]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        *COMMON,
        ({"service": "no\nname"}, "is not a valid service name"),
        ({"codec": "json"}, "codec is 'json'"),
        ({"codec": "arrow", "key": "text"}, "a key belongs to a row"),
        ({"codec": "arrow", "group": "text"}, "group cannot be combined with codec='arrow'"),
        ({"rows_per_request": 2}, "without codec='arrow' each row is a request"),
        ({"codec": "arrow", "rows_per_request": 0}, "rows_per_request is 0"),
    ],
)
def test_arguments_of_a_call(asked, message):
    with pytest.raises(SettingError, match=message):
        call_service(None, **{"service": "up", "input": "text", "broker": "tcp://127.0.0.1:5555", **asked})


@pytest.mark.parametrize(
    ("asked", "message"), [*COMMON, ({"name": "call me"}, "is not a valid function name"), ({"group": "a\nb"}, "group")]
)
def test_arguments_of_a_function(asked, message):
    with pytest.raises(SettingError, match=message):
        register_function(None, **asked)
