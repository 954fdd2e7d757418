"""The service that sends large results, without Spark: its parts and formats, and who may have them."""

import io
import json
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.requests import request_by

from zmdp.mdp.errors import ServiceError
from zmdp.spark.batch import fetching
from zmdp.spark.batch.job_history import History
from zmdp.workers import Request

JOB = "0123456789abcdef"


@pytest.fixture
def history():
    made = History(Path(":memory:"), "batch")
    made.begin(JOB, user="shop", service="sql", what="")
    yield made
    made.close()


@pytest.fixture
def files(tmp_path, history):
    """`files(*rows)`: end the job with a result of these numbers of rows in a file each."""

    def write(*rows):
        first = 0
        for number, count in enumerate(rows):
            table = pa.table({"id": pa.array(range(first, first + count), pa.int64())})
            pq.write_table(table, tmp_path / f"part-{number}.parquet")
            first += count
        history.end(JOB, "done", format="parquet", path=f"file://{tmp_path}")

    return write


def asked(history, caller=request_by("shop"), job=JOB, **settings):  # noqa: B008 - it is never changed
    """Return the PARTIALs and the FINAL of a request."""
    frames = [job.encode(), json.dumps(settings).encode()]
    request = Request(frames, service="spark.fetch.batch", client=b"client", options=caller._options)
    parts, found = [], fetching.handle(request, history)
    while True:
        try:
            parts.append(next(found))
        except StopIteration as end:
            return parts, json.loads(end.value)


@pytest.mark.parametrize(
    ("format_", "wanted"), [("json", b'{"id":0}\n{"id":1}\n{"id":2}\n'), ("csv", b'"id"\n0\n1\n2\n'), ("arrow", None)]
)
def test_the_first_file_of_a_result_may_be_empty(history, files, format_, wanted):
    files(0, 1, 2)  # Spark writes such a file to a URL if the first partition is empty
    parts, end = asked(history, format=format_)
    if wanted is None:
        assert pa.ipc.open_stream(b"".join(parts)).read_all().to_pylist() == [{"id": 0}, {"id": 1}, {"id": 2}]
    else:
        assert b"".join(parts) == wanted
    assert end == {"job": JOB, "format": format_, "rows": 3, "next": None}


def test_files_come_in_the_order_of_their_numbers(history, tmp_path):
    for value, number in enumerate((9, 99_999, 100_000)):
        pq.write_table(pa.table({"id": [value]}), tmp_path / f"part-{number:05}.parquet")
    history.end(JOB, "done", format="parquet", path=f"file://{tmp_path}")
    parts, _ = asked(history, format="json")
    assert b"".join(parts) == b'{"id":0}\n{"id":1}\n{"id":2}\n'


@pytest.mark.parametrize("format_", ["arrow", "json", "csv"])
def test_a_request_gets_a_bounded_part(history, files, monkeypatch, format_):
    monkeypatch.setattr(fetching, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(fetching, "MESSAGE_BYTES", 3000)
    monkeypatch.setattr(fetching, "BATCH_ROWS", 500)
    files(5000, 5000)
    got, position, answers = [], None, 0
    while position is not None or not answers:
        parts, end = asked(history, format=format_, position=position)
        assert sum(map(len, parts)) < 10_000 + 500 * 20
        assert max(map(len, parts)) < 6000
        got += parts
        position, answers = end["next"], answers + 1
    assert answers > 3
    whole = b"".join(got)
    if format_ == "arrow":
        assert pa.ipc.open_stream(io.BytesIO(whole)).read_all()["id"].to_pylist() == list(range(10_000))
    else:
        lines = whole.splitlines()[format_ == "csv" :]
        assert [json.loads(line)["id"] if format_ == "json" else int(line) for line in lines] == list(range(10_000))


def test_a_value_is_sent_as_it_is(history, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "MESSAGE_BYTES", 10)
    (tmp_path / "value.json").write_text('"0123456789012345"')
    history.end(JOB, "done", format="value", path=str(tmp_path / "value.json"))
    first, end = asked(history)
    second, last = asked(history, position=end["next"])
    assert first + second == [b'"012345678', b'9012345"']
    assert (end["format"], end["next"], last["next"]) == ("value", "0:10", None)


@pytest.mark.parametrize(
    ("caller", "code"),
    [(request_by("shop"), None), (request_by("ops", admin=True), None), (request_by("web"), 403), (request_by(), 403)],
)
def test_only_its_owner_and_admins_fetch_a_result(history, files, caller, code):
    files(1)
    if code is None:
        assert asked(history, caller)[1]["rows"] == 1
    else:
        with pytest.raises(ServiceError, match=f"job {JOB} belongs to shop; only shop or an admin can fetch") as no:
            asked(history, caller)
        assert no.value.code == code


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        (None, 422, "has no result: it is running"),
        ({"state": "failed"}, 422, "has no result: it is failed"),
        ({"state": "done"}, 422, "was small and sent with the reply"),
        ({"state": "done", "format": "parquet", "path": "file:///nowhere/at/all"}, 404, "has been deleted"),
    ],
)
def test_jobs_without_a_result(history, end, code, message):
    if end is not None:
        history.end(JOB, **end)
    with pytest.raises(ServiceError, match=message) as no:
        asked(history)
    assert no.value.code == code


def test_results_that_a_format_cannot_hold(history, tmp_path):
    pq.write_table(pa.table({"a": [[1]]}), tmp_path / "part-0.parquet")
    history.end(JOB, "done", format="parquet", path=f"file://{tmp_path}")
    with pytest.raises(ServiceError, match="cannot be sent as csv") as no:
        asked(history, format="csv")
    assert no.value.code == 500
    assert asked(history, format="json")[0] == [b'{"a":[1]}\n']


@pytest.mark.parametrize(("format_", "line"), [("json", b'{"i":"P1DT2S","b":"AP8="}\n'), ("csv", b'"P1DT2S","AP8="\n')])
def test_intervals_and_bytes_as_text(history, tmp_path, format_, line):
    table = pa.table({"i": pa.array([timedelta(1, 2)], pa.duration("us")), "b": [b"\x00\xff"]})
    pq.write_table(table, tmp_path / "part-0.parquet")
    history.end(JOB, "done", format="parquet", path=f"file://{tmp_path}")
    assert asked(history, format=format_)[0][-1] == line


@pytest.mark.parametrize("settings", [{"position": "x"}, {"position": "1:-1"}, {"format": "xml"}, {"colour": 1}])
def test_invalid_requests(history, files, settings):
    files(1)
    with pytest.raises(ServiceError) as no:
        asked(history, **settings)
    assert no.value.code == 422
    with pytest.raises(ServiceError, match="no job nope in the history"):
        asked(history, job="nope")
