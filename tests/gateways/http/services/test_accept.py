"""The header Accept, and types that a service replies with itself."""

import json

import httpx
import pytest
from support.http_gateways import await_services, http_gateway
from support.processes import TIMEOUT_SECONDS

from zmdp.gateways.http.services.rows import own_types
from zmdp.gateways.http.services.translation import preferred
from zmdp.mdp.http.problems import Problem
from zmdp.mdp.services import About
from zmdp.testing import running_broker
from zmdp.workers import Worker

OFFERED = (b"application/json", b"text/csv", b"text/html")


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (b"*/*", b"application/json"),
        (b"text/csv", b"text/csv"),
        (b"Text/CSV ; header=present; Q=0.3", b"text/csv"),
        (b"text/*", b"text/csv"),
        (b"text/*;q=0.5, text/csv;q=0.1", b"text/html"),
        (b"text/*, text/csv;q=0", b"text/html"),
        (b"text/csv;q=0.2, application/json;q=0.8", b"application/json"),
        (b"text/csv, */*;q=0.1", b"text/csv"),
        (b"text/csv, application/json", b"application/json"),
        (b"image/png, */*;q=0.001", b"application/json"),
        (b"text/csv;q=7, text/html;q=x", b"text/csv"),
    ],
)
def test_the_preferred_type(accept, expected):
    assert preferred(accept, OFFERED) == expected


@pytest.mark.parametrize("accept", [b"image/png", b"*/*;q=0", b"text/csv;q=0.000", b"text", b",;", b"*/csv", b"\xff/*"])
def test_no_type_is_accepted(accept):
    with pytest.raises(Problem, match="replies with: application/json, text/csv, text/html, x/y") as caught:
        preferred(accept, OFFERED, b"x/y")
    assert caught.value.status == 406


def test_what_a_worker_says_that_is_no_type():
    """Workers may write anything, which must not get into headers."""
    about = About.read({"media_types": ["Text/CSV", 5, "x/y\r\nset-cookie: a=b", "ä/ö", "*/*; q", *["a/b"] * 99]})
    assert own_types(about)[:2] == [b"text/csv", b"a/b"]
    assert len(own_types(about)) < 20
    assert own_types(About.read({"media_types": "text/csv"})) == []


def table(request):
    """Rows as the caller wants them."""
    yield b'{"event": "begun"}'
    wanted = request.headers.get("accept", "none")
    if wanted == "application/x-ndjson":
        return b'{"event":\n"ended"}'
    return [wanted.encode() + b" " + request[0]]


@pytest.fixture(scope="module")
def gateway():
    about = {"media_types": ["application/json", "text/csv", "application/x-ndjson"]}
    with running_broker(drain_timeout=0.0) as server, Worker("table", table, broker=server.endpoints[0], about=about):
        await_services(server.endpoints[0], "table")
        with http_gateway(server.endpoints[0]) as gateway:
            yield gateway


def post(gateway, **headers):
    return httpx.post(f"{gateway.url}/services/table", content=b"x", headers=headers, timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [("*/*", "application/json"), ("text/csv", "text/csv"), ("text/csv;q=0.1, application/json", "application/json")],
)
def test_the_service_is_told_which_of_its_types_is_wanted(gateway, accept, wanted):
    answer = post(gateway, accept=accept, **{"zmdp-header-accept": "text/html", "content-type": "application/x"})
    assert (answer.headers["content-type"], answer.text) == (wanted, f"{wanted} x")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_its_parts_are_lines_of_json(gateway):
    answer = post(gateway, accept="application/x-ndjson")
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["event"] for line in answer.text.splitlines()] == ["begun", "ended"]


def test_its_parts_are_events(gateway):
    answer = post(gateway, accept="text/event-stream")
    assert answer.text == 'event: partial\ndata: {"event": "begun"}\n\nevent: final\ndata: application/json x\n\n'


def test_a_type_that_it_does_not_have(gateway):
    answer = post(gateway, accept="image/png")
    assert answer.status_code == 406
    assert answer.json()["detail"].endswith(
        "replies with: application/json, text/csv, application/x-ndjson, text/event-stream"
    )


def test_the_document_names_its_types(gateway):
    found = httpx.get(gateway.url + "/openapi.json", timeout=TIMEOUT_SECONDS).json()
    responses = found["paths"]["/services/table"]["post"]["responses"]
    assert {"application/json", "text/csv", "text/event-stream"} <= responses["200"]["content"].keys()
    assert "406" in responses
