"""The description of the gateway."""

import json
import re

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from support.http_gateways import http_gateway
from support.processes import TIMEOUT_SECONDS

from zmdp.clients.gateways.http import access as http_access
from zmdp.clients.gateways.http.job_options import QUERY
from zmdp.clients.gateways.http.openapi import document
from zmdp.mdp.testing import running_broker
from zmdp.mdp.tokens import digest_of
from zmdp.workers import Worker

NAMES = ["echo", "a/b c", "{x}", "ümlaut", "titanic.request"]


@pytest.fixture(scope="module")
def endpoint():
    with running_broker(drain_timeout=0.0) as server:
        yield server.endpoints[0]


@pytest.mark.parametrize("secured", [False, True])
def test_the_document_is_valid(secured):
    OpenAPIV31SpecValidator(document(NAMES, secured=secured)).validate()


def test_a_document_that_is_not_valid_is_noticed():
    wrong = json.loads(json.dumps(document(NAMES, secured=False)))
    wrong["paths"]["/services/echo"]["post"]["parameters"][0]["in"] = "nowhere"
    assert not OpenAPIV31SpecValidator(wrong).is_valid()


def test_the_document_names_the_services_that_exist(endpoint):
    with Worker("a/b c", list, broker=endpoint), http_gateway(endpoint) as gateway:
        answer = httpx.post(
            f"{gateway.url}/services/a%2Fb%20c", headers={"Prefer": "wait=20"}, content=b"hi", timeout=TIMEOUT_SECONDS
        )
        assert answer.content == b"hi"
        found = httpx.get(gateway.url + "/openapi.json", timeout=TIMEOUT_SECONDS).json()
        OpenAPIV31SpecValidator(found).validate()
        assert {"/services/a%2Fb%20c", "/jobs/a%2Fb%20c", "/jobs/{uuid}", "/ws"} <= found["paths"].keys()
        assert "/services/echo" not in found["paths"]
        parameters = found["paths"]["/jobs/a%2Fb%20c"]["post"]["parameters"]
        assert {each["name"] for each in parameters if each["in"] == "query"} == QUERY.keys()
        assert {"200", "403", "404", "413", "429", "502", "503", "504", "default"} <= found["paths"][
            "/services/a%2Fb%20c"
        ]["post"]["responses"].keys()


def test_it_shows_only_what_the_caller_may_call(endpoint, tmp_path):
    token = "sha256:" + digest_of(b"secret").hex()
    access = http_access.parse(f'[roles.shop]\ntokens = ["{token}"]\ncall = ["a*"]', tmp_path)
    with (
        Worker("apples", list, broker=endpoint),
        Worker("pears", list, broker=endpoint),
        http_gateway(endpoint) as everything,
        http_gateway(endpoint, access=access) as some,
    ):
        for name in ("apples", "pears"):
            httpx.post(
                f"{everything.url}/services/{name}", headers={"Prefer": "wait=20"}, timeout=TIMEOUT_SECONDS
            ).raise_for_status()
        assert httpx.get(some.url + "/openapi.json", timeout=TIMEOUT_SECONDS).status_code == 401
        found = httpx.get(
            some.url + "/openapi.json", headers={"Authorization": "Bearer secret"}, timeout=TIMEOUT_SECONDS
        ).json()
        assert "/services/apples" in found["paths"]
        assert "/services/pears" not in found["paths"]
        assert found["security"] == [{"token": []}, {"certificate": []}]


def test_the_links_of_the_page_work(endpoint):
    with http_gateway(endpoint) as gateway:
        page = httpx.get(gateway.url + "/", timeout=TIMEOUT_SECONDS)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        links = re.findall(r'href="([^"]+)"', page.text)
        assert {"/services", "/openapi.json"} <= set(links)
        assert {httpx.get(gateway.url + link, timeout=TIMEOUT_SECONDS).status_code for link in links} == {200}
