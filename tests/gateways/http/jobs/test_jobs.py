"""Jobs over HTTP, with a real broker, Titanic and workers."""

import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime

import httpx
import pytest
from support.access import Folder
from support.gateways import Raw
from support.http_gateways import TITANIC, await_services, http_gateway
from support.offered import offered
from support.processes import TIMEOUT_SECONDS, eventually
from support.titanics import row, serving

from zmdp import Services
from zmdp.gateways import access as http_access
from zmdp.gateways.http.jobs import routes as jobs
from zmdp.testing import running_broker
from zmdp.titanic.api import steps as conversation
from zmdp.workers import ServiceError, Worker

UNKNOWN = "0" * 32


def fails(request):
    raise ServiceError(422, "no good", b"why")


def pieces(request):
    yield b"one"
    yield b"two\nlines"
    yield b"\xff"
    return b"done"


class Gate:
    """A service whose requests wait until they are told to go on."""

    def __init__(self):
        self.begun = threading.Event()
        self.go = threading.Event()
        self.cancelled = threading.Event()

    def __call__(self, request):
        self.begun.set()
        yield b"first"
        while not self.go.wait(0.01):
            if request.cancelled:
                self.cancelled.set()
                return
        yield b"second"
        return b"last"


@pytest.fixture(scope="module")
def db(endpoint, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("titanic") / "titanic.db")
    with (
        Worker("echo", list, broker=endpoint),
        Worker("a/b", list, broker=endpoint),
        Worker("fails", fails, broker=endpoint),
        Worker("pieces", pieces, broker=endpoint),
        serving(endpoint, path),
    ):
        await_services(endpoint, *TITANIC)
        yield path


@pytest.fixture(scope="module")
def gateway(endpoint, db):
    with http_gateway(endpoint, max_body=100_000, max_unread=50_000) as running:
        yield running


@pytest.fixture
def gate(endpoint):
    gate = Gate()
    with Worker("gate", gate, broker=endpoint):
        yield gate
        gate.go.set()


def submitted(http, service="echo", body=b"hi", **settings):
    """Store a request, and return the path of the job."""
    answer = http.post(f"/jobs/{service}", content=body, **settings)
    assert answer.status_code == 202, answer.text
    assert answer.json() == {"uuid": answer.headers["location"][6:], "location": answer.headers["location"]}
    return answer.headers["location"]


def problem(answer):
    """Return the status and the kind of problem."""
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == answer.status_code
    return answer.status_code, answer.json()["type"].partition("#")[2]


def result(http, job, **headers):
    return http.get(job, headers={"Prefer": f"wait={TIMEOUT_SECONDS:g}", **headers})


def test_a_job_from_its_beginning_to_its_end(http):
    job = submitted(http)
    done = result(http, job, Accept="text/plain")
    assert (done.status_code, done.content, done.headers["content-type"]) == (200, b"hi", "text/plain")
    assert http.get(job).content == b"hi"
    assert http.delete(job).status_code == 204
    assert problem(http.get(job)) == (404, "unknown-job")
    assert http.delete(job).status_code == 204


def test_values_are_json(http, endpoint):
    """What is not JSON is refused before it is stored."""
    services = Services()

    @services.service("total")
    def total(values: list[int]) -> dict[str, int]:
        return {"total": sum(values)}

    with offered(services, endpoint):
        job = http.post("/jobs/total", json=[1, 2]).headers["location"]
        assert result(http, job, Accept="application/json").json() == {"total": 3}
        done = http.post("/jobs/total", json=[3], headers={"Prefer": f"wait={TIMEOUT_SECONDS:g}"})
        assert (done.status_code, done.headers["content-type"], done.json()) == (200, "application/json", {"total": 3})
        done = http.post("/services/total", json=[4])
        assert (done.status_code, done.headers["content-type"], done.json()) == (200, "application/json", {"total": 4})
        failed = result(http, http.post("/jobs/total", json=["x"]).headers["location"])
        assert problem(failed) == (422, "service-error")
        assert failed.json()["detail"] == "$[0]: expected int, got str"
        refused = http.post("/jobs/total", content=b"[1", headers={"content-type": "application/json"})
        assert problem(refused) == (400, "invalid")


def test_a_body_of_several_frames_and_headers_for_the_handler(http):
    job = submitted(http, files=[("x", b"a"), ("x", b"\xff")], body=None)
    done = result(http, job)
    assert done.headers["content-type"].startswith("multipart/mixed")
    assert b"\r\n\r\na\r\n" in done.content
    assert b"\r\n\r\n\xff\r\n" in done.content


def test_a_reply_that_is_in_time_is_the_answer(http):
    answer = http.post("/jobs/echo", content=b"hi", headers={"Prefer": f"wait={TIMEOUT_SECONDS:g}"})
    assert (answer.status_code, answer.content) == (200, b"hi")
    assert http.get(answer.headers["location"]).content == b"hi"


def test_a_reply_that_is_not_there_yet(http, gate):
    answer = http.post("/jobs/gate", headers={"Prefer": "wait=0.01"})
    assert answer.status_code == 202
    job = answer.headers["location"]
    for headers in ({}, {"Prefer": "wait=0.01"}):
        pending = http.get(job, headers=headers)
        assert (pending.status_code, pending.headers["retry-after"], pending.json()["location"]) == (202, "1", job)
    gate.go.set()
    assert result(http, job).content == b"last"


def test_a_job_that_failed(http):
    job = submitted(http, "fails")
    answer = result(http, job)
    assert problem(answer) == (422, "service-error")
    assert {**answer.json(), "type": ""} == {
        "type": "", "title": "The service reported an error", "status": 422, "detail": "no good", "service": "fails",
        "code": 422, "data": "why",
    }  # fmt: skip
    assert problem(http.get(job)) == (422, "service-error")


def test_deleting_a_job_cancels_it(http, gate):
    job = submitted(http, "gate")
    assert gate.begun.wait(TIMEOUT_SECONDS)
    assert http.delete(job).status_code == 204
    assert gate.cancelled.wait(TIMEOUT_SECONDS)


def test_the_same_key_stores_once(http):
    keys = ["one key", '"one key"', '"one key"']
    assert len({submitted(http, headers={"Idempotency-Key": key}) for key in keys}) == 1
    assert submitted(http, headers={"Idempotency-Key": r'"one \"key"'}) != submitted(
        http, headers={"Idempotency-Key": "one key"}
    )
    assert problem(http.post("/jobs/echo", headers={"Idempotency-Key": ""})) == (400, "invalid")
    assert problem(http.post("/jobs/echo", headers={"Idempotency-Key": "x" * 256})) == (400, "invalid")
    twice = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    assert problem(http.post("/jobs/echo", headers=twice)) == (400, "invalid")


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(gateway):
    with gateway.connect() as client:
        client.send(b"POST /jobs/echo HTTP/1.1\r\nhost: x\r\ncontent-length: 100001\r\nexpect: 100-continue\r\n\r\n")
        assert client.response()[0] == 413


def test_jobs_are_at_one_path(http):
    assert problem(http.post("/%6Aobs/echo")) == (404, "not-found")


def test_the_options_of_a_job(http, db):
    query = "?delay=1h&priority=7&retries=3&backoff=500ms&ttl=7d&key_ttl=12h"
    stored = row(db, submitted(http, "echo" + query, headers={"Idempotency-Key": "with options"})[6:])
    assert (stored["priority"], stored["retries"], stored["backoff"], stored["result_ttl"]) == (7, 3, 0.5, 7 * 86400)
    assert stored["due"] - stored["created"] == pytest.approx(3600)
    later = row(db, submitted(http, "echo?at=2099-01-31T12:00:00+01:00")[6:])
    assert later["due"] == datetime(2099, 1, 31, 11, tzinfo=UTC).timestamp()
    assert row(db, submitted(http, "echo?at=2099-01-31T11:00:00Z")[6:])["due"] == later["due"]


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("colour=red", "there is no parameter 'colour'"),
        ("key=x", "it is the header Idempotency-Key"),
        ("delay=1&delay=2", "is there twice"),
        ("delay=soon", "such as 2.5 (seconds)"),
        ("delay=-1", "such as 2.5 (seconds)"),
        ("ttl=7", "such as 30s"),
        ("priority=high", "a whole number"),
        ("priority=10", "from 0 to 9"),
        ("at=tomorrow", "such as 2030-01-31"),
        ("at=2030-01-31", "such as 2030-01-31"),
        ("delay=1&at=2030-01-31T12:00:00Z", "cannot be combined"),
        ("key_ttl=1h", "needs a key"),
    ],
)
def test_invalid_options(http, query, why):
    answer = http.post(f"/jobs/echo?{query}")
    assert problem(answer) == (400, "invalid")
    assert why in answer.json()["detail"]


def test_other_bad_requests(http):
    assert problem(http.get("/jobs/nonsense")) == (404, "unknown-job")
    assert problem(http.get(f"/jobs/{UNKNOWN}")) == (404, "unknown-job")
    assert problem(http.get(f"/jobs/{UNKNOWN}", headers={"Accept": "text/event-stream"})) == (404, "unknown-job")
    assert problem(http.delete("/jobs/nonsense")) == (404, "unknown-job")
    assert problem(http.post("/jobs/")) == (400, "invalid")
    assert problem(http.post("/jobs/a%00b")) == (400, "invalid")
    assert problem(http.post("/jobs/mmi.service")) == (400, "invalid")
    assert problem(http.post("/jobs/titanic.request")) == (400, "invalid")
    assert problem(http.put("/jobs/echo")) == (405, "method-not-allowed")
    assert problem(http.post("/jobs/echo", content=b"x" * 100_001)) == (413, "too-large")
    assert problem(http.post("/jobs/echo", content=iter([b"x" * 60_000] * 2))) == (413, "too-large")
    assert problem(http.post("/jobs/echo", headers={"Origin": "https://evil.example"})) == (403, "origin-not-allowed")


def test_without_titanic():
    with running_broker(drain_timeout=0.0) as server, http_gateway(server.endpoints[0]) as gateway:
        with httpx.Client(base_url=gateway.url, timeout=TIMEOUT_SECONDS) as http:
            for answer in (http.post("/jobs/echo"), http.get(f"/jobs/{UNKNOWN}"), http.delete(f"/jobs/{UNKNOWN}")):
                assert problem(answer) == (503, "no-titanic")
                assert answer.headers["retry-after"] == "1"
                assert "start one with `titanic serve`" in answer.json()["detail"]


def test_a_titanic_that_restarts(tmp_path, monkeypatch):
    """A request during the restart waits; if no Titanic comes back, it fails."""
    path = str(tmp_path / "titanic.db")
    with running_broker(drain_timeout=0.0) as server, http_gateway(server.endpoints[0]) as gateway:
        with httpx.Client(base_url=gateway.url, timeout=TIMEOUT_SECONDS) as http, ThreadPoolExecutor(1) as other:
            with serving(server.endpoints[0], path):
                await_services(server.endpoints[0], *TITANIC)
                job = submitted(http)
            later = other.submit(http.get, job)
            eventually(lambda: gateway.gateway.outstanding == 1)
            with serving(server.endpoints[0], path):
                assert later.result().status_code == 202
            monkeypatch.setattr(conversation, "RESTART_SECONDS", 0.0)
            eventually(lambda: problem(http.get(job)) == (503, "no-titanic"))


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Events:
    """Reads server-sent events: the fields of each as a dictionary."""

    def __init__(self, answer):
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        self._lines = answer.iter_lines()

    def __iter__(self):
        found = {}
        for line in self._lines:
            name, _, value = line.partition(": ")
            if not line:
                yield found
                found = {}
            elif name in found:
                found[name] += "\n" + value
            else:
                found[name] = value


@contextmanager
def streamed(http, job, **headers):
    with http.stream("GET", job, headers={"Accept": "text/event-stream", **headers}) as answer:
        yield iter(Events(answer))


def test_the_events_of_a_job(http):
    job = submitted(http, "pieces")
    everything = [
        {"id": "0", "event": "partial", "data": "one"},
        {"id": "1", "event": "partial", "data": "two\nlines"},
        {"id": "2", "event": "partial-base64", "data": '["/w=="]'},
        {"id": "end", "event": "final", "data": "done"},
    ]
    with streamed(http, job) as events:
        assert list(events) == everything
    with streamed(http, job, **{"Last-Event-ID": "1"}) as events:
        assert list(events) == everything[2:]
    ended = http.get(job, headers={"Accept": "text/event-stream", "Last-Event-ID": "end"})
    assert (ended.status_code, ended.content) == (204, b"")
    wrong = http.get(job, headers={"Accept": "text/event-stream", "Last-Event-ID": "-1"})
    assert problem(wrong) == (400, "invalid")


def test_events_arrive_while_the_job_runs(http, gate, monkeypatch):
    monkeypatch.setattr(jobs, "KEEP_ALIVE_SECONDS", 0.01)
    with streamed(http, submitted(http, "gate")) as events:
        assert next(each["data"] for each in events if "data" in each) == "first"
        assert next(events) == {":": ""}  # a comment
        gate.go.set()
        assert [each["data"] for each in events if "data" in each] == ["second", "last"]


def test_the_last_event_of_a_job_that_failed_or_was_deleted(http, gate):
    with streamed(http, submitted(http, "fails")) as events:
        (last,) = events
    assert (last["id"], last["event"]) == ("end", "error")
    assert json.loads(last["data"])["status"] == 422
    job = submitted(http, "gate")
    with streamed(http, job) as events:
        assert next(events)["data"] == "first"
        http.delete(job)
        assert json.loads(next(events)["data"])["status"] == 404


def test_a_client_that_stops_reading_events_leaves_nothing_behind(gateway, http, gate):
    job = submitted(http, "gate")
    with streamed(http, job) as events:
        next(events)
        assert gateway.gateway.outstanding == 1
    eventually(lambda: gateway.gateway.outstanding == 0)
    with httpx.Client(base_url=gateway.url, timeout=httpx.Timeout(TIMEOUT_SECONDS, read=0.2)) as hasty:
        with pytest.raises(httpx.ReadTimeout):
            result(hasty, job)
    eventually(lambda: gateway.gateway.outstanding == 0)


def test_a_stream_larger_than_what_may_wait_is_complete(endpoint, http):
    def many(request):
        for number in range(500):
            yield b"%d " % number + b"x" * 1000

    with Worker("many", many, broker=endpoint):
        job = submitted(http, "many")
        with streamed(http, job) as events:
            heard = [int(each["data"].split()[0]) for each in events if each["event"] == "partial"]
    assert heard == list(range(500))


def test_events_that_are_not_read_count_as_memory(endpoint, db):
    def large(request):
        for _ in range(100):
            yield bytes(100_000)

    limit = 1_000_000
    with (
        Worker("large", large, broker=endpoint),
        http_gateway(endpoint, max_memory=limit) as gateway,
        httpx.Client(base_url=gateway.url, timeout=TIMEOUT_SECONDS) as http,
    ):
        job = submitted(http, "large")
        with Raw(gateway.port, receive_buffer=4096) as client:
            client.send(f"GET {job} HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\n\r\n".encode())
            client.until(b"event: partial\n")

            def is_used_up():  # or it was, and the connection has been closed for that
                return gateway.gateway.memory > limit or not gateway.gateway.outstanding

            eventually(lambda: gateway.call(is_used_up))
        eventually(lambda: gateway.gateway.memory == 0)


# ── roles ────────────────────────────────────────────────────────────────────────────────────────────────────────────

BROKER_ROLES = """
[roles.gateway]
keys = ["driver.key"]
call = ["*"]
on_behalf = true

[roles.titanic]
keys = ["titanic.key"]
call = ["*"]
offer = ["titanic.*"]
on_behalf = true

[roles.farm]
keys = ["resizer.key"]
offer = ["*"]

[roles.shop]
call = ["echo", "titanic.*"]

[roles.other]
call = ["titanic.*"]
"""
ROLES = ("shop", "other")


def gateway_access(path):
    """Return an access file with roles whose tokens are their names."""
    tables = [
        f'[roles.{role}]\ntokens = ["sha256:{hashlib.sha256(role.encode()).hexdigest()}"]\ncall = ["echo", "other"]\n'
        for role in ROLES
    ]
    return http_access.parse("".join(tables), path)


def as_role(gateway, role):
    return httpx.Client(base_url=gateway.url, headers={"Authorization": f"Bearer {role}"}, timeout=TIMEOUT_SECONDS)


def test_a_job_belongs_to_its_role(tmp_path):
    folder = Folder(tmp_path)
    folder.write(BROKER_ROLES)
    with (
        folder.broker() as server,
        Worker("echo", list, broker=server.endpoints[0], **folder.settings("resizer")),
        serving(server.endpoints[0], str(tmp_path / "titanic.db"), **folder.settings("titanic")),
        http_gateway(server.endpoints[0], access=gateway_access(tmp_path), keys=folder.keys("driver")) as gateway,
        as_role(gateway, "shop") as shop,
        as_role(gateway, "other") as other,
    ):
        await_services(server.endpoints[0], *TITANIC, **folder.settings("driver"))
        key = {"Idempotency-Key": "same"}
        job = submitted(shop, headers=key)
        assert result(shop, job).content == b"hi"
        assert problem(other.get(job)) == (404, "unknown-job")
        other.delete(job)
        assert shop.get(job).content == b"hi"
        theirs = submitted(other, headers=key)
        assert theirs != job
        refused = result(other, theirs)  # the broker does not let this role call `echo`
        assert problem(refused) == (500, "service-error")
        assert refused.json()["code"] == 403
        assert problem(shop.post("/jobs/fails")) == (403, "not-allowed")
        assert problem(httpx.get(gateway.url + job, timeout=TIMEOUT_SECONDS)) == (401, "unauthorized")


def test_the_keys_of_roles_are_apart_even_if_the_broker_knows_no_roles(endpoint, db, tmp_path):
    with http_gateway(endpoint, access=gateway_access(tmp_path)) as gateway:
        jobs_of = set()
        for role in ROLES:
            with as_role(gateway, role) as http:
                jobs_of.add(submitted(http, headers={"Idempotency-Key": "same for both"}))
        assert len(jobs_of) == 2
