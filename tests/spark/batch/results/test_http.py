"""Queries and jobs as curl calls them: a real gateway before a real batch."""

import io
import json
from contextlib import ExitStack

import httpx
import pyarrow as pa
import pytest
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.http_gateways import await_services, http_gateway
from support.sparks import BEATS, LIMITS, running_batch
from support.titanics import serving

from zmdp.clients import Client
from zmdp.testing import running_broker

pytestmark = pytest.mark.long
ARROW = "application/vnd.apache.arrow.stream"
ROWS = "SELECT id, concat('é', id) AS name FROM range(2) ORDER BY id"


@pytest.fixture(scope="module")
def at(spark, tmp_path_factory):
    """The endpoint of a broker with a batch and Titanic."""
    folder = tmp_path_factory.mktemp("http")
    with ExitStack() as stack:
        server = stack.enter_context(running_broker(limits=LIMITS, drain_timeout=0.0))
        stack.enter_context(running_batch(spark, server.endpoints[0], folder))
        stack.enter_context(serving(server.endpoints[0], str(folder / "titanic.db"), **BEATS))
        await_services(server.endpoints[0], "spark.sql", "spark.job", "titanic.request", **BEATS)
        yield server.endpoints[0]


@pytest.fixture(scope="module")
def http(at):
    with (
        http_gateway(at, timeout=SPARK_TIMEOUT_SECONDS) as gateway,
        httpx.Client(base_url=gateway.url, timeout=SPARK_TIMEOUT_SECONDS) as client,
    ):
        yield client


def asked(http, service, accept, body, path="services", **headers):
    content = body if isinstance(body, str) else json.dumps(body)
    return http.post(f"/{path}/spark.{service}", content=content, headers={"accept": accept, **headers})


def test_rows_of_a_query(http):
    """As the types that a caller accepts; curl sends Accept: */*."""
    for accept in ("*/*", "application/json", "text/html, application/*;q=0.3"):
        answer = asked(http, "sql", accept, {"query": ROWS})
        assert answer.json() == [{"id": 0, "name": "é0"}, {"id": 1, "name": "é1"}]
        assert answer.headers["content-type"] == "application/json"
    answer = asked(http, "sql", "text/csv", ROWS)
    assert (answer.content.decode(), answer.headers["content-type"]) == ('"id","name"\n0,"é0"\n1,"é1"\n', "text/csv")
    answer = asked(http, "sql", ARROW, {"query": ROWS, "format": "json"})
    assert pa.ipc.open_stream(io.BytesIO(answer.content)).read_all().to_pydict() == {"id": [0, 1], "name": ["é0", "é1"]}
    assert answer.headers["content-type"] == ARROW


def test_parameters_and_arguments(http):
    body = {"query": "SELECT :n + 1 AS m, :s AS s", "args": {"n": 1, "s": "{"}}
    assert asked(http, "sql", "*/*", body, **{"content-type": "application/json"}).json() == [{"m": 2, "s": "{"}]
    answer = asked(http, "job", "text/csv", {"job": "rows", "arguments": {"n": 2}})
    assert answer.text == '"id"\n0\n1\n'
    assert asked(http, "job", "*/*", "rows").json() == [{"id": 0}, {"id": 1}, {"id": 2}]
    assert asked(http, "job", "*/*", {"job": "value", "arguments": {"a": 1}}).json()["given"] == {"a": 1}


@pytest.mark.parametrize("accept", ["application/x-ndjson", "application/jsonl"])
def test_events_are_lines(http, accept):
    answer = asked(http, "job", accept, {"job": "streaming", "arguments": {"n": 2}})
    assert answer.headers["content-type"] == accept
    events = [json.loads(line) for line in answer.text.splitlines()]
    assert events[0]["event"] == "started"
    assert [each["value"] for each in events if each["event"] == "yielded"] == [{"step": 0}, {"step": 1}]
    assert events[-1].items() >= {"event": "result", "rows": 2, "data": [{"id": 0}, {"id": 1}], "path": None}.items()


def test_a_result_that_is_too_large_for_a_reply(http, at):
    """It is not lost: the answer says how to get it, and asks nobody to try again."""
    answer = asked(http, "sql", "text/csv", "SELECT id, repeat('x', 100) AS x FROM range(3000)")
    assert answer.status_code == 422
    described = json.loads(answer.json()["data"])
    assert (described["format"], described["rows"]) == ("parquet", 3000)
    assert f"mdp-spark fetch {described['job']} --format csv" in answer.json()["detail"]
    with Client(at, timeout=SPARK_TIMEOUT_SECONDS) as client:
        fetched = client.request("spark.fetch.batch", described["job"].encode(), b'{"format": "csv"}')
    assert fetched[0] == b'"id","x"\n'
    lines = asked(http, "sql", "application/jsonl", "SELECT id, repeat('x', 100) AS x FROM range(3000)").text
    assert json.loads(lines.splitlines()[-1])["data"] is None


@pytest.mark.parametrize(
    ("service", "accept", "body", "status", "text"),
    [
        ("sql", "image/png", "SELECT 1", 406, f"application/json, text/csv, {ARROW}"),
        ("sql", "text/csv", "SELECT array(1) AS a", 422, "the rows cannot be written as CSV: "),
        ("job", "text/csv", {"job": "value"}, 422, "returned a value instead of rows"),
        ("sql", "*/*", {"sql": "SELECT 1"}, 422, 'is a JSON object, {"query": "…", …}: '),
        ("job", "*/*", '{"job": ', 422, 'is a JSON object, {"job": "…", "arguments": {…}, …}: '),
        ("job", "*/*", {"job": "rows", "arguments": {"m": 2}}, 422, "job rows: "),
        ("sql", "*/*", {"query": "SELECT 1", "limit": 2}, 422, "the settings: Object contains unknown field `limit`"),
        ("sql", "*/*", {"query": "SELECT x"}, 422, "`x`"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered(http, service, accept, body, status, text):
    answer = asked(http, service, accept, body)
    assert answer.status_code == status
    assert text in answer.json()["detail"]
    if service == "job" and accept == "text/csv":
        assert json.loads(answer.json()["data"])["given"] == {}, "the value is not lost"


def test_a_header_that_names_no_type(at):
    with Client(at, timeout=SPARK_TIMEOUT_SECONDS) as client, pytest.raises(Exception, match="expected one of applic"):
        client.request("spark.sql", b"SELECT 1", headers={"accept": "text/html"})


def test_a_durable_job(http):
    """Its type is selected when it is submitted."""
    wanted = {"zmdp-header-accept": "text/csv", "prefer": "wait=600"}
    answer = asked(http, "job", "text/csv", {"job": "rows", "arguments": {"n": 1}}, "jobs", **wanted)
    assert (answer.status_code, answer.text) == (200, '"id"\n0\n')
