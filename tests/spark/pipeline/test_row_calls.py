"""The SQL function as executors run it, on pandas series, without Spark."""

import pandas as pd
import pytest
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.sparks import BEATS
from support.titanics import serving

from zmdp.mdp.errors import ServiceError, SettingError
from zmdp.spark.pipeline.row_calls import CallSettings, call_series
from zmdp.workers import Worker


@pytest.fixture
def handled(endpoint):
    """Run the service `up`; yields what it has handled."""

    def up(request):
        found.append(request[0])
        if request[0] == b"bad":
            raise ServiceError(422, "odd")
        return request[0].upper()

    found = []
    with Worker("up", up, broker=endpoint, **BEATS):
        yield found


def called(endpoint, *parts, **given):
    """Return reply, code and error of each row of these tuples of columns."""
    settings = CallSettings(broker=endpoint, window=4, **{"timeout": SPARK_TIMEOUT_SECONDS, **given})
    frames = call_series(iter([tuple(map(pd.Series, columns)) for columns in parts]), settings)
    return [tuple(None if pd.isna(each) else each for each in row) for frame in frames for row in frame.values.tolist()]


def test_rows_in_batches(endpoint, handled):
    found = called(endpoint, (["up", "up"], ["a", b"b"]), (["up"], ["c"]))
    assert found == [("A", 200, None), ("B", 200, None), ("C", 200, None)]
    assert sorted(handled) == [b"a", b"b", b"c"]


def test_no_batches(endpoint):
    assert called(endpoint) == []


def test_rows_that_fail(endpoint, handled):
    found = called(endpoint, (["up", None, "up", "up"], [None, "a", "bad", "b"]))
    assert found == [
        (None, None, None), (None, 400, "the service is NULL; every row must name a service"), (None, 422, "odd"),
        ("B", 200, None),
    ]  # fmt: skip
    assert sorted(handled) == [b"b", b"bad"]


def test_rows_with_keys_are_executed_once(endpoint, handled, tmp_path):
    with serving(endpoint, str(tmp_path / "titanic.db"), **BEATS):
        columns = (["up"] * 3, ["a", "b", "c"], ["k1", "k2", None])
        first = called(endpoint, columns)
        assert called(endpoint, columns) == first
    assert first[:2] == [("A", 200, None), ("B", 200, None)]
    assert (first[2][1], "the key is NULL" in first[2][2]) == (400, True)
    assert sorted(handled) == [b"a", b"b"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([5], ["x"]), "the service is a int"),
        ((["up"], [{"a": 1}]), r"the input is a dict.* to_json\(\)"),
        ((["up"], ["x"], [5]), "the key is a int"),
        ((["up"],), "call_service takes two or three arguments"),
        ((["up"], ["x"], ["k"], ["l"]), "call_service takes two or three arguments"),
    ],
)
def test_types_that_end_the_query(given, message):
    with pytest.raises(SettingError, match=message):
        called("tcp://127.0.0.1:1", given)


@pytest.mark.parametrize(("at", "role"), [(0, "service"), (1, "input"), (2, "key")])
def test_structs_end_the_query(endpoint, handled, at, role):
    columns = [pd.Series(["up", "up"]), pd.Series(["a", "b"]), pd.Series(["k1", "k2"])]
    columns[at] = pd.DataFrame({"one": ["a", "b"], "other": ["c", "d"]})
    settings = CallSettings(broker=endpoint, window=4, timeout=SPARK_TIMEOUT_SECONDS)
    with pytest.raises(SettingError, match=f"the {role} is a struct"):
        list(call_series(iter([tuple(columns)]), settings))
    assert handled == []
