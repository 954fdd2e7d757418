"""Requests to services over HTTP: a real gateway, broker and workers."""

import gzip

import httpx
import pytest
from support.gateways import running_gateway
from support.processes import TIMEOUT_SECONDS, eventually, free_endpoint

from zmdp.mdp.http.problems import TYPE_BASE
from zmdp.mdp.limits import Limits
from zmdp.testing import running_broker

PROBLEM = "application/problem+json"


def problem(response):
    """Return status and kind of a response that is a problem."""
    assert response.headers["content-type"] == PROBLEM
    document = response.json()
    assert document["status"] == response.status_code
    return response.status_code, document["type"].removeprefix(TYPE_BASE)


def multipart(*parts):
    body = b"".join(b"--b\r\nContent-Disposition: form-data; name=x\r\n\r\n%s\r\n" % part for part in parts)
    return {"content": body + b"--b--\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}}


def test_a_body_becomes_a_frame_and_back(http):
    response = http.post("/services/echo", content=b"\x00\xff")
    assert (response.status_code, response.content) == (200, b"\x00\xff")
    assert response.headers["content-type"] == "application/octet-stream"
    assert "date" in response.headers


def test_a_browser_does_not_run_a_reply(http):
    response = http.post("/services/echo", content=b"<script>", headers={"accept": "text/html"})
    assert response.headers["content-type"] == "text/html"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in response.headers["content-security-policy"]


@pytest.mark.parametrize("coding", ["gzip", "identity, br", "unknown"])
@pytest.mark.parametrize("path", ["/services/echo", "/jobs/echo"])
def test_an_encoded_body_is_refused(http, services, path, coding):
    before = len(services.requests)
    response = http.post(path, content=gzip.compress(b"{}"), headers={"content-encoding": coding})
    assert problem(response) == (415, "unsupported-media-type")
    assert response.headers["accept-encoding"] == "identity"
    assert f"is '{coding}': send it as it is" in response.json()["detail"]
    assert len(services.requests) == before


def test_a_body_may_say_that_it_is_not_encoded(http):
    response = http.post("/services/echo", content=b"{}", headers={"content-encoding": "Identity"})
    assert (response.status_code, response.content) == (200, b"{}")


def test_large_bodies(http):
    body = bytes(range(256)) * 40_000
    assert http.post("/services/echo", content=body).content == body
    assert (
        http.post("/services/echo", content=(body[at : at + 100_000] for at in range(0, len(body), 100_000))).content
        == body
    )


def test_only_the_final_counts_without_events(http):
    assert http.post("/services/parts", content=b"3").content == b""


def test_headers_travel(http, services):
    tracing = {"traceparent": "00-1-2-01", "tracestate": "a=b"}
    sent = {**tracing, "Zmdp-Header-Tenant": "Zoë".encode(), "X-Request-ID": "order-7"}
    http.post("/services/echo", content=b"", headers=sent)
    assert services.requests[-1].headers == {**tracing, "tenant": "Zoë", "request-id": "order-7"}


def test_names_are_percent_decoded(http):
    assert problem(http.post("/services/caf%C3%A9%20noir"))[0] == 404
    assert http.post("/services/caf%C3%A9%20noir").json()["service"] == "café noir"
    assert http.post("/services/%65cho", content=b"x").content == b"x"


@pytest.mark.parametrize("path", ["%FF", "", "%00", "a" * 256, "%0A"])
def test_invalid_names(http, path):
    assert problem(http.post(f"/services/{path}")) == (400, "invalid")


def test_too_many_parts(http):
    assert problem(http.post("/services/echo", **multipart(*[b""] * 1001))) == (413, "too-large")


class TestStatuses:
    def test_404_at_once(self, http):
        response = http.post("/services/nobody", headers={"request-timeout": "30"})
        assert problem(response) == (404, "no-worker")
        assert response.json()["code"] == 404

    def test_413_of_the_broker(self, endpoint, services):
        with running_broker(limits=Limits(max_message=1000)) as small, running_gateway(small.endpoints[0]) as gateway:
            response = httpx.post(f"{gateway.url}/services/mmi.service", content=b"x" * 2000, timeout=TIMEOUT_SECONDS)
            assert problem(response) == (413, "too-large")

    def test_429_with_retry_after(self):
        with running_broker(limits=Limits(max_queue=1), drain_timeout=0.0) as full:
            with (
                running_gateway(full.endpoints[0]) as gateway,
                httpx.Client(base_url=gateway.url, timeout=TIMEOUT_SECONDS) as http,
            ):
                with gateway.connect() as first:
                    first.send(b"POST /services/x HTTP/1.1\r\nhost: x\r\nprefer: wait=600\r\n\r\n")
                    eventually(lambda: [row["queued"] for row in http.get("/services").json()["services"]] == [1])
                    response = http.post("/services/x", headers={"prefer": "wait=600"})
                    assert problem(response) == (429, "queue-full")
                    assert response.headers["retry-after"] == "1"

    @pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD"])
    def test_405(self, http, method):
        response = http.request(method, "/services/echo")
        assert (response.status_code, response.headers["allow"]) == (405, "POST")

    def test_paths_that_do_not_exist(self, http):
        assert problem(http.get("/nothing")) == (404, "not-found")
        assert problem(http.post("/readyz")) == (405, "method-not-allowed")

    def test_413_of_the_gateway(self, endpoint, services):
        with running_gateway(endpoint, max_body=1000) as gateway:
            with httpx.Client(base_url=gateway.url, timeout=TIMEOUT_SECONDS) as http:
                assert problem(http.post("/services/echo", content=b"x" * 1001)) == (413, "too-large")
                assert problem(http.post("/services/echo", content=(b"x" * 600 for _ in range(2)))) == (
                    413,
                    "too-large",
                )
                assert http.post("/services/echo", content=b"x" * 1000).status_code == 200
            assert gateway.gateway.memory == 0

    def test_503_if_too_much_is_outstanding(self, endpoint, services):
        with running_gateway(endpoint, max_outstanding=1) as gateway, gateway.connect() as first:
            first.send(b"POST /services/hold HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nfirst")
            assert eventually(lambda: b"first" in services.begun)
            response = httpx.post(f"{gateway.url}/services/echo", timeout=TIMEOUT_SECONDS)
            assert problem(response) == (503, "overloaded")
            assert response.headers["retry-after"] == "1"

    def test_503_if_bodies_take_too_much_memory(self, endpoint, services):
        with running_gateway(endpoint, max_memory=1000) as gateway, gateway.connect() as first:
            first.send(b"POST /services/hold HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n" + bytes(900))
            assert eventually(lambda: bytes(900) in services.begun)
            assert problem(httpx.post(f"{gateway.url}/services/echo", content=bytes(200), timeout=TIMEOUT_SECONDS)) == (
                503,
                "overloaded",
            )
            assert (
                httpx.post(f"{gateway.url}/services/echo", content=bytes(50), timeout=TIMEOUT_SECONDS).status_code
                == 200
            )

    def test_503_if_replies_that_are_not_read_take_too_much_memory(self, endpoint, services):
        with running_gateway(endpoint, max_memory=20_000_000) as gateway:
            with gateway.connect() as first:
                first.send(b"POST /services/large HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\n\r\n16000000")
                assert eventually(lambda: gateway.gateway.memory >= 16_000_000)  # all of it, however much was sent
                response = httpx.post(f"{gateway.url}/services/large", content=b"8000000", timeout=TIMEOUT_SECONDS)
                assert problem(response) == (503, "overloaded")
            eventually(lambda: gateway.gateway.memory == 0)
            response = httpx.post(f"{gateway.url}/services/large", content=b"8000000", timeout=TIMEOUT_SECONDS)
            assert (response.status_code, len(response.content)) == (200, 8_000_000)


def test_services(http):
    rows = {row["name"]: row for row in http.get("/services").json()["services"]}
    assert rows["echo"]["workers"] == 1


class TestHealth:
    def test_a_gateway_is_ready_if_the_broker_answers(self, http):
        response = http.get("/readyz")
        assert (response.status_code, response.json()) == (200, {"ready": True, "reasons": []})

    def test_without_a_broker_it_lives_but_is_not_ready(self):
        endpoint = free_endpoint()
        with running_gateway(endpoint) as gateway:
            assert httpx.get(f"{gateway.url}/livez", timeout=TIMEOUT_SECONDS).json() == {"live": True}
            response = httpx.get(f"{gateway.url}/readyz", timeout=TIMEOUT_SECONDS)
            reasons = [f"the broker at {endpoint} does not answer"]
            assert (response.status_code, response.json()) == (503, {"ready": False, "reasons": reasons})

    def test_with_too_much_outstanding_it_lives_but_is_not_ready(self, endpoint, services):
        with running_gateway(endpoint, max_outstanding=1) as gateway, gateway.connect() as first:
            first.send(b"POST /services/hold HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nready")
            assert eventually(lambda: b"ready" in services.begun)
            assert httpx.get(f"{gateway.url}/livez", timeout=TIMEOUT_SECONDS).json() == {"live": True}
            response = httpx.get(f"{gateway.url}/readyz", timeout=TIMEOUT_SECONDS)
            assert response.status_code == 503
            assert "--max-outstanding" in response.json()["reasons"][0]


class TestOrigins:
    def test_pages_are_refused(self, http):
        headers = {"origin": "http://evil.example"}
        assert problem(http.post("/services/echo", headers=headers)) == (403, "origin-not-allowed")
        assert problem(http.get("/services", headers=headers)) == (403, "origin-not-allowed")

    def test_pages_of_an_allowed_origin(self, endpoint, services):
        with running_gateway(endpoint, allow_origins=("http://good.example",)) as gateway:
            with httpx.Client(base_url=gateway.url, timeout=TIMEOUT_SECONDS) as http:
                good = {"origin": "http://good.example"}
                response = http.post("/services/echo", content=b"x", headers=good)
                assert (response.status_code, response.content) == (200, b"x")
                assert response.headers["access-control-allow-origin"] == "http://good.example"
                asked = {**good, "access-control-request-method": "POST", "access-control-request-headers": "x-a"}
                preflight = http.options("/services/echo", headers=asked)
                assert preflight.status_code == 200
                assert preflight.headers["access-control-allow-headers"] == "x-a"
                assert "POST" in preflight.headers["access-control-allow-methods"]
                failed = http.post("/services/nobody", headers=good)
                assert failed.status_code == 404
                assert failed.headers["access-control-allow-origin"] == "http://good.example"
                bad = {"origin": "http://evil.example"}
                assert problem(http.post("/services/echo", headers=bad)) == (403, "origin-not-allowed")
                assert "access-control-allow-origin" not in http.options("/services/echo", headers=bad).headers
                assert http.get("/services", headers=good).headers["access-control-allow-origin"]


HELLO = {"name": "mallory", "instance": "1", "kind": "peer", "link": 1}


def test_a_caller_cannot_make_the_gateways_connection_a_link(broker, http):
    assert http.post("/services/mmi.link", json=HELLO).content == b"501"
    assert broker.broker.federation.links.by_identity == {}
    assert http.post("/services/echo", content=b"still here").content == b"still here"


def test_an_offer_of_a_websocket_is_ignored(http):
    offer = {"connection": "upgrade", "upgrade": "websocket"}
    assert http.get("/ws", headers=offer).status_code == 404
    assert http.get("/livez", headers=offer).status_code == 200


def test_metrics(endpoint, services):
    with running_gateway(endpoint) as gateway, httpx.Client(base_url=gateway.url, timeout=TIMEOUT_SECONDS) as http:
        assert http.post("/services/echo", content=b"x").status_code == 200
        response = http.get("/metrics")
    assert "text/plain" in response.headers["content-type"]
    lines = response.text.splitlines()
    for line in (
        "mdp_gateway_requests_total 1.0", "mdp_gateway_outstanding_requests 0.0", "mdp_gateway_memory_bytes 0.0",
    ):  # fmt: skip
        assert line in lines
