"""`call_service` on Spark Connect: a server of its own."""

import pyarrow.compute as pc
import pytest
from support.connect import connected
from support.sparks import BEATS

from zmdp import Service
from zmdp.mdp.errors import SettingError
from zmdp.spark.pipeline import call_service, register_function
from zmdp.workers import Worker

pytestmark = [pytest.mark.usefixtures("java"), pytest.mark.timeout(2400)]


@pytest.fixture
def up(endpoint):
    """Run a service that replies in capitals."""
    with Worker("up", lambda request: [frame.upper() for frame in request], broker=endpoint, **BEATS):
        yield


@pytest.mark.long
@pytest.mark.usefixtures("up")
def test_all_ways_to_call(tmp_path, endpoint):
    with connected(tmp_path) as session:
        df = session.range(100).selectExpr("id", "concat('row ', id) AS text", "id AS id")
        replies = call_service(df, "up", input="text", broker=endpoint)
        assert [tuple(row) for row in replies.collect()] == [
            (n, f"row {n}", n, f"ROW {n}", 200, None) for n in range(100)
        ]
        (row,) = call_service(df.limit(1), "up", input=["text"], broker=endpoint).collect()
        assert row.reply == '{"TEXT":"ROW 0"}'
        (row,) = call_service(df.limit(1), "up", input=df.text.substr(1, 3), broker=endpoint).collect()
        assert row.reply == "ROW"
        (row,) = call_service(df.limit(1), Service("up", str, str), input="text", broker=endpoint).collect()
        assert row.reply == "ROW 0"
        for given in ({"input": "nope"}, {"input": df.nope}, {"input": "id"}):
            with pytest.raises(SettingError):
                call_service(df, "up", broker=endpoint, **given)
        with Worker(
            "length", lambda table: {"length": pc.utf8_length(table["text"])}, broker=endpoint, codec="arrow", **BEATS
        ):
            lengths = call_service(df, "length", input="text", codec="arrow", result="int", broker=endpoint)
            assert [row.reply for row in lengths.collect()] == [len(f"row {n}") for n in range(100)]
        with pytest.raises(SettingError, match="result is 'no type'; expected one of Spark's types"):
            call_service(df, "length", input="text", codec="arrow", result="no type", broker=endpoint)
        register_function(session, broker=endpoint)
        (row,) = session.sql("SELECT call_service('up', 'x') AS r").collect()
        assert tuple(row.r) == ("X", 200, None)
