"""The description of the gateway."""

import json

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from support.http_gateways import http_gateway
from support.processes import TIMEOUT_SECONDS

from zmdp.gateways import access as http_access
from zmdp.gateways.http.jobs.query import QUERY
from zmdp.gateways.http.openapi import components
from zmdp.gateways.http.openapi.document import document
from zmdp.mdp.security.access import digest_of
from zmdp.mdp.services import About
from zmdp.mdp.services.json_schemas import RAW
from zmdp.workers import Worker

ABOUTS = dict.fromkeys(["echo", "a/b c", "{x}", "ümlaut", "titanic.request"], About())


@pytest.mark.parametrize("secured", [False, True])
def test_the_document_is_valid(secured):
    OpenAPIV31SpecValidator(document(ABOUTS, secured=secured)).validate()


def test_a_document_that_is_not_valid_is_noticed():
    wrong = json.loads(json.dumps(document(ABOUTS, secured=False)))
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
        assert {"/services/a%2Fb%20c", "/jobs/a%2Fb%20c", "/jobs/{uuid}"} <= found["paths"].keys()
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
        assert found["security"] == [{"token": []}]


def test_the_address_of_the_gateway_leads_to_its_page(endpoint):
    with http_gateway(endpoint) as gateway:
        page = httpx.get(gateway.url + "/", timeout=TIMEOUT_SECONDS, follow_redirects=True)
    assert (page.url.path, page.headers["content-type"]) == ("/docs", "text/html; charset=utf-8")


# ── what workers say ─────────────────────────────────────────────────────────────────────────────────────────────────

SIZE = {"$ref": "#/$defs/Size", "$defs": {"Size": {"type": "object", "properties": {"$ref": {"$ref": "#/$defs/Size"}}}}}
RESIZE = {
    "$ref": "#/$defs/Re size",
    "$defs": {"Re size": {"type": "object", "required": ["path"], "properties": {
        "path": {"type": "string", "examples": ["a.png"]},
        "width": {"type": "integer", "default": 80},
        "next": {"anyOf": [{"$ref": "#/$defs/Re size"}, {"type": "null"}], "default": None},
    }}},
}  # fmt: skip


def described(**about):
    return document({"images.resize": About.read({"codec": "json", **about})}, secured=False)


def test_a_service_is_documented_as_its_workers_describe_it():
    found = described(description="Scale it.", request=RESIZE, reply=SIZE)
    OpenAPIV31SpecValidator(found).validate()
    call = found["paths"]["/services/images.resize"]["post"]
    assert call["description"] == "Scale it."
    content = call["requestBody"]["content"]["application/json"]
    assert content["example"] == {"path": "a.png", "width": 80, "next": None}
    assert content["schema"] == {"$ref": "#/components/schemas/images.resize.Re_size"}
    reply = call["responses"]["200"]["content"]["application/json"]
    assert reply["schema"] == {"$ref": "#/components/schemas/images.resize.Size"}
    assert (
        found["components"]["schemas"]["images.resize.Re_size"]["properties"]["next"]["anyOf"][0] == content["schema"]
    )
    assert found["components"]["schemas"]["images.resize.Size"]["properties"] == {"$ref": reply["schema"]}
    assert found["paths"]["/jobs/images.resize"]["post"]["requestBody"] == call["requestBody"]


def test_a_stream_of_bytes_is_documented():
    found = described(request=RAW, part=RAW, codec="msgpack")
    OpenAPIV31SpecValidator(found).validate()
    call = found["paths"]["/services/images.resize"]["post"]
    assert call["requestBody"]["content"] == {"application/octet-stream": {}}
    assert call["responses"]["200"]["content"] == {"text/event-stream": {}}


def test_a_stream_of_values_is_documented():
    found = described(request=RESIZE, part=SIZE)
    OpenAPIV31SpecValidator(found).validate()
    responses = found["paths"]["/services/images.resize"]["post"]["responses"]
    schema = {"$ref": "#/components/schemas/images.resize.Size"}
    assert responses["200"]["content"] == {
        "text/event-stream": {}, "application/x-ndjson": {"schema": schema}, "application/jsonl": {"schema": schema},
        "application/json": {"schema": {"type": "array", "items": schema}},
    }  # fmt: skip
    assert responses["406"]["description"] == "The reply has no type that is accepted"


def test_different_types_of_the_same_name_are_different_components():
    found = described(request=RESIZE, reply={"$ref": "#/$defs/Re size", "$defs": {"Re size": {"type": "string"}}})
    schemas = found["components"]["schemas"]
    assert schemas["images.resize.Re_size"]["type"] == "object"
    assert schemas["images.resize.Re_size_"]["type"] == "string"


def test_references_of_workers_lead_nowhere_else():
    hostile = {
        "$ref": "http://evil.example/schema", "$id": "x", "items": {"$ref": "#/components/schemas/Problem"},
        "discriminator": {
            "propertyName": "a", "mapping": {"b": "http://evil.example", "c": "#/$defs/none", "d": ["#/$defs/none"]},
        },
    }  # fmt: skip
    found = described(request=hostile, reply={})
    content = found["paths"]["/services/images.resize"]["post"]["requestBody"]["content"]["application/json"]
    assert content["schema"] == {"items": {}, "discriminator": {"propertyName": "a", "mapping": {}}}


def test_the_schemas_of_a_document_have_a_limit(monkeypatch):
    monkeypatch.setattr(components, "MAX_BYTES", 300)
    found = described(request={"description": "x" * 200}, reply={"description": "x" * 200})
    call = found["paths"]["/services/images.resize"]["post"]
    assert call["requestBody"]["content"]["application/json"]["schema"]["description"]
    assert call["responses"]["200"]["content"]["application/json"]["schema"] == {}


def test_the_page_for_people_needs_no_network(endpoint):
    with http_gateway(endpoint) as gateway:
        for name in ("docs", "docs.js", "docs.css"):
            found = httpx.get(f"{gateway.url}/{name}", timeout=TIMEOUT_SECONDS).raise_for_status()
            assert "default-src 'none'" in found.headers["content-security-policy"]
            assert "://" not in found.text


def test_it_does_not_show_control_services(endpoint):
    names = ("apples", "spark.control.batch")
    with Worker(names[0], list, broker=endpoint), Worker(names[1], list, broker=endpoint), http_gateway(endpoint) as at:
        for name in names:
            waits = {"Prefer": "wait=20"}
            httpx.post(f"{at.url}/services/{name}", headers=waits, timeout=TIMEOUT_SECONDS).raise_for_status()
        paths = httpx.get(at.url + "/openapi.json", timeout=TIMEOUT_SECONDS).json()["paths"]
        assert [path for path in paths if path.startswith("/services/")] == ["/services/apples"]
