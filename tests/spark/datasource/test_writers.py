"""What Spark asks the writers for, without Spark: options, attempts, commits and micro-batches."""

import re

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.pandas.types import from_arrow_schema

from zmdp.mdp.errors import SettingError, ZmdpError
from zmdp.spark.datasource import writer as writers
from zmdp.spark.datasource.writer import JobWriter, StreamWriter
from zmdp.titanic.api.submission import unpack

only_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
KEYED = from_arrow_schema(pa.schema({"request": pa.string(), "key": pa.string()}))


def writer(url, kind=JobWriter, *, overwrite=False, **options):
    return kind({"db": str(url), "service": "s", **options}, KEYED, overwrite=overwrite)


def batches(*texts):
    """Return rows as an executor receives them."""
    return iter([pa.RecordBatch.from_pydict({"request": list(texts), "key": pa.nulls(len(texts), pa.string())})])


def bodies(db):
    return sorted(unpack(row.body)[0] for row in db.requests())


@pytest.mark.parametrize("kind", [JobWriter, StreamWriter])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "k"}, "titanic has no option 'key' to write"),
        ({"priority": "high"}, "priority is 'high'; expected an integer"),
        ({"db": "nowhere.db"}, "there is no database nowhere.db"),
        ({"overwrite": True}, "titanic only adds requests"),
        ({"job": "", "sink": ""}, "to write"),
    ],
)
def test_invalid_options(pristine, kind, options, message):
    with pytest.raises(ZmdpError, match=re.escape(message)):
        writer(**{"url": pristine, "kind": kind, **options})


@pytest.mark.parametrize(("kind", "name"), [(JobWriter, "job"), (StreamWriter, "sink")])
def test_names_of_writes(pristine, kind, name):
    writer(pristine, kind, **{name: "n" * 500})
    for text in ("", "n" * 501):
        with pytest.raises(SettingError, match="the name of a job or sink must have 1 to 500 characters"):
            writer(pristine, kind, **{name: text})


def test_invalid_columns(pristine):
    with pytest.raises(SettingError, match="titanic cannot write request as int32"):
        JobWriter({"db": str(pristine), "service": "s"}, from_arrow_schema(pa.schema({"request": pa.int32()})),
                  overwrite=False)  # fmt: skip


def test_a_job_commits_the_attempts_that_spark_accepts(db):
    job = writer(db.url, job="j")
    messages = [job.write(batches("a", "b")), job.write(iter([])), None]  # the message of a failed task is None
    job.write(batches("a", "b"))  # an attempt of which Spark does not tell
    job.commit(messages)
    again = writer(db.url, job="j")
    assert again.write(batches("c")).staged is None
    again.commit([again.write(batches("c"))])
    assert bodies(db) == [b"a", b"b"]
    assert db.left_over == (0, 0)


@pytest.mark.parametrize("kind", [JobWriter, StreamWriter])
def test_an_aborted_write_leaves_nothing(db, kind):
    aborted = writer(db.url, kind)
    rows = batches("a") if kind is JobWriter or writers.STREAM_ARROW else iter([Row(request="a", key=None)])
    aborted.abort([aborted.write(rows), None], *([0] if kind is StreamWriter else []))
    assert (db.count(), db.left_over) == (0, (0, 0))


@only_sqlite
def test_rows_of_a_stream_without_arrow(db, monkeypatch):
    monkeypatch.setattr(writers, "STREAM_ARROW", False)
    one = writer(db.url, StreamWriter, sink="s")
    one.commit([one.write(iter([Row(request="a", key=None), Row(request="b", key="k")]))], 0)
    assert [(unpack(row.body)[0], row.key) for row in db.requests()] == [(b"a", None), (b"b", "k")]
    one.abort([], 1)


@only_sqlite
def test_a_micro_batch_without_rows(db):
    unnamed = writer(db.url, StreamWriter)
    unnamed.commit([], 0)
    assert db.count("titanic_written") == 0
    if writers.STREAM_ARROW:  # else it takes rows
        with pytest.raises(SettingError, match="Spark does not identify this stream; name it"):
            unnamed.commit([unnamed.write(batches("a"))], 1)
