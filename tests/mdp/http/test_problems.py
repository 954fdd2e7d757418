"""The table of problems."""

import json

import pytest

from zmdp.mdp.codes import Code
from zmdp.mdp.errors import (
    BrokerUnreachable,
    ClosedError,
    RequestCancelled,
    RequestRejected,
    RequestTimeout,
    RetryLater,
    ServiceError,
    ServiceNotFound,
    SettingError,
    StreamInterrupted,
    WorkerLost,
    ZmdpError,
)
from zmdp.mdp.http.problems import KINDS, TYPE_BASE, Problem, as_members, problem_of


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestRejected("x", service="s", code=400, text="t"), 400, "malformed"),
        (RequestRejected("x", service="s", code=403, text="t"), 403, "not-allowed"),
        (ServiceNotFound("x", service="s", code=404, text="t"), 404, "no-worker"),
        (RequestTimeout("x", service="s", code=408, text="t"), 504, "timeout"),
        (RequestRejected("x", service="s", code=413, text="t"), 413, "too-large"),
        (RetryLater("x", service="s", code=429, text="t"), 429, "queue-full"),
        (RequestCancelled("x", service="s", code=499, text="t"), 499, "cancelled"),
        (ServiceError(500, "t", service="s"), 500, "failed"),
        (WorkerLost("x", service="s", code=502, text="t"), 502, "worker-lost"),
        (StreamInterrupted("x", service="s", code=502, text="t"), 502, "worker-lost"),
        (RetryLater("x", service="s", code=503, text="t"), 503, "draining"),
        (RequestTimeout("x", service="s"), 504, "timeout"),
        (BrokerUnreachable("x", service="s"), 503, "unreachable"),
        (StreamInterrupted("x", service="s"), 502, "interrupted"),
        (RequestRejected("x", service="s"), 502, "interrupted"),
        (SettingError("x"), 400, "invalid"),
        (ClosedError("x"), 503, "closing"),
        (ZmdpError("x"), 502, "interrupted"),
    ],
)
def test_exceptions(error, status, kind):
    problem = problem_of(error)
    assert (problem.status, problem.kind) == (status, kind)
    assert problem.code == KINDS[kind].code
    document = problem.document()
    assert document["type"] == TYPE_BASE + kind
    assert document.get("service") == getattr(error, "service", None)
    assert (b"retry-after" in dict(problem.response()[1])) is (status in {429, 503})


def test_every_code_of_the_broker_has_one_status():
    assert sorted(kind.code for kind in KINDS.values() if kind.code is not None) == sorted(Code)


def test_a_stream_that_took_too_long():
    assert problem_of(StreamInterrupted("x"), overdue=True).status == 504


def test_a_code_of_a_handler_is_never_mistaken():
    taken = {kind.status for kind in KINDS.values()}
    for code in range(100, 1000):
        problem = problem_of(ServiceError(code, "text", b""))
        assert (problem.kind, problem.code) == ("service-error", code)
        assert problem.status == 500 or (problem.status == code and code not in taken)


def test_a_code_of_a_handler_that_it_may_have_as_its_status():
    assert [problem_of(ServiceError(code, "", b"")).status for code in (409, 410, 418, 422, 451, 507)] == [
        409, 410, 418, 422, 451, 507,
    ]  # fmt: skip


def test_details_of_a_handler():
    assert as_members(None) == {}
    assert as_members(b"{}") == {"data": "{}"}
    assert as_members(b"\xff") == {"data_base64": "/w=="}
    assert problem_of(ServiceError(422, "t", b"d")).document()["data"] == "d"


def test_a_response():
    status, headers, body = Problem("overloaded", "text \ud800", service="é").response()
    assert status == 503
    assert dict(headers) == {
        b"content-type": b"application/problem+json",
        b"content-length": b"%d" % len(body),
        b"retry-after": b"1",
    }
    assert json.loads(body) == {
        "type": TYPE_BASE + "overloaded",
        "title": "The server has too much to do",
        "status": 503,
        "detail": "text ?",
        "service": "é",
    }
