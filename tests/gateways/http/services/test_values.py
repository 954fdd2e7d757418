"""Values over HTTP, by the codec that the workers of a service tell, and the page on which people try services."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from enum import Enum

import httpx
import pytest
from support import browser as browsers
from support.http_gateways import http_gateway
from support.offered import offered
from support.processes import TIMEOUT_SECONDS, eventually, free_endpoint

from zmdp import Services
from zmdp.gateways import descriptions
from zmdp.testing import running_broker

JSON = {"content-type": "application/json; charset=utf-8"}
services = Services()
PIECES = ("pieces.broken", "pieces.bytes", "pieces.texts", "pieces.tree")


@dataclass
class Pair:
    first: int
    second: int = 2


@services.service("packed", codec="msgpack")
def packed(pair: Pair) -> Pair:
    """Swap <b>both</b>."""
    return Pair(pair.second, pair.first)


@services.service("plain")
def plain(pair: Pair) -> Pair:
    return packed(pair)


@services.service("parts", codec="msgpack")
async def parts(count: int) -> AsyncIterator[Pair]:
    for number in range(count):
        yield Pair(number)


@services.service("pieces.broken")
def broken(count: int) -> Iterator[Pair]:
    for number in range(count):
        yield Pair(number)
    raise ValueError("no more")


@services.service("pieces.bytes")
def pieces() -> Iterator[bytes]:
    yield b"a"


@services.service("pieces.texts")
def texts() -> Iterator[str]:
    yield "a\r\nb\u2028"
    yield ""


class Color(Enum):
    RED = "red"


@dataclass
class Cell:
    text: str
    number: int | None = None
    share: float = 0.5
    fresh: bool = False
    color: Color = Color.RED


@dataclass
class Tree:
    below: list[Cell]


@services.service("cells", codec="msgpack")
def cells(texts: list[str]) -> Iterator[Cell]:
    for number, text in enumerate(texts):
        yield Cell(text, number or None, fresh=bool(number))


@services.service("pieces.tree")
def tree() -> Iterator[Tree]:
    yield Tree([])


@services.service("raw", codec="msgpack")
def raw(data: bytes) -> bytes:
    return data


@pytest.fixture(scope="module")
def gateway():
    with (
        running_broker(drain_timeout=0.0) as server,
        offered(services, at := server.endpoints[0]),
        http_gateway(at) as gateway,
    ):
        yield gateway


def post(gateway, service, content, **headers):
    url = f"{gateway.url}/services/{service}"
    return httpx.post(url, content=content, headers=headers or JSON, timeout=TIMEOUT_SECONDS)


@pytest.mark.parametrize("service", ["packed", "plain"])
def test_who_sends_json_gets_json(gateway, service):
    answer = post(gateway, service, b'{"first": 1}')
    assert answer.json() == {"first": 2, "second": 1}
    assert answer.headers["content-type"] == "application/json"
    assert post(gateway, service, b'{"first": "x"}').json()["detail"] == "$.first: expected int, got str"


def test_what_is_not_json_is_refused(gateway):
    for service in ("packed", "plain", "raw"):
        answer = post(gateway, service, b"{first: 1}")
        assert answer.status_code == 400
        assert answer.json()["detail"].startswith("the Content-Type is JSON, but the body is not: ")


@pytest.mark.parametrize("service", ["packed", "plain"])
def test_of_equal_keys_the_last_one_counts(gateway, service):
    """JSON leaves it open; here the gateway and both codecs agree."""
    assert post(gateway, service, b'{"first": 1, "first": 2}').json() == {"first": 2, "second": 2}


def test_who_sends_something_else_gets_frames(gateway):
    answer = post(gateway, "packed", b"\x81\xa5first\x05", accept="application/msgpack")
    assert answer.content == b"\x82\xa5first\x02\xa6second\x05"
    assert post(gateway, "packed", b'{"first": 1}', accept="*/*").status_code == 422, "it is no MessagePack"


def test_bytes_are_not_translated(gateway):
    for kind, content in (("application/json", b'{ "a": 1 }'), ("application/octet-stream", b"{\xff")):
        answer = post(gateway, "raw", content, **{"content-type": kind})
        assert (answer.content, answer.headers["content-type"]) == (content, kind)


def test_a_stream_of_values(gateway):
    answer = post(gateway, "parts", b"2", **JSON, accept="text/event-stream")
    assert answer.text.splitlines()[1::3] == [
        'data: {"first":0,"second":2}',
        'data: {"first":1,"second":2}',
        "data: null",
    ]


@pytest.mark.parametrize("accept", ["*/*", "application/x-ndjson", "application/jsonl", "text/html, */*;q=0.1"])
def test_a_stream_of_values_is_lines_of_json(gateway, accept):
    answer = post(gateway, "parts", b"2", **JSON, accept=accept)
    assert answer.text == '{"first":0,"second":2}\n{"first":1,"second":2}\n'
    assert answer.headers["content-type"] == (accept if "jsonl" in accept else "application/x-ndjson")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert post(gateway, "parts", b"0", **JSON, accept=accept).content == b""


def test_a_stream_of_values_is_an_array(gateway):
    for service, sent, expected in (("parts", b"2", [0, 1]), ("parts", b"0", [])):
        answer = post(gateway, service, sent, **JSON, accept="application/json")
        assert [each["first"] for each in answer.json()] == expected
        assert answer.headers["content-type"] == "application/json"


def test_a_stream_of_flat_values_is_csv(gateway):
    """Texts are quoted where CSV needs it, and nothing is told from an empty text by nobody."""
    answer = post(gateway, "cells", '["a,\\"b\\"", "ü\\nx"]'.encode(), **JSON, accept="text/csv, */*;q=0.1")
    assert answer.content.decode() == (
        'text,number,share,fresh,color\n"a,""b""",,0.5,false,red\n"ü\nx",1,0.5,true,red\n'
    )
    assert answer.headers["content-type"] == "text/csv"
    none = post(gateway, "cells", b"[]", **JSON, accept="text/csv")
    assert none.text == "text,number,share,fresh,color\n"


def test_a_stream_without_a_request_is_lines_too(gateway):
    answer = post(gateway, "pieces.texts", b"", accept="*/*")
    assert answer.text == '"a\\r\\nb\u2028"\n""\n'


@pytest.mark.parametrize(
    ("service", "accept"),
    [("parts", "text/html"), ("pieces.bytes", "*/*"), ("pieces.texts", "text/csv"), ("pieces.tree", "text/csv")],
)
def test_a_stream_that_no_accepted_type_can_carry(gateway, service, accept):
    answer = post(gateway, service, b"1", **JSON, accept=accept)
    assert answer.status_code == 406
    assert answer.json()["type"].endswith("#not-acceptable")
    assert "text/event-stream" in answer.json()["detail"]


def test_an_error_before_the_first_line_has_its_status(gateway):
    assert post(gateway, "pieces.broken", b"0", **JSON, accept="application/json").status_code == 500
    assert post(gateway, "pieces.broken", b"0").json()["detail"] == "ValueError: no more"
    assert post(gateway, "parts", b'"x"').status_code == 422


def test_an_error_after_a_line_breaks_off_the_response(gateway):
    received = b""
    url = f"{gateway.url}/services/pieces.broken"
    with httpx.stream("POST", url, content=b"2", headers=JSON, timeout=TIMEOUT_SECONDS) as answer:
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):  # noqa: PT012 - after a part
            for piece in answer.iter_bytes():
                received += piece
    assert received == b'{"first":0,"second":2}\n{"first":1,"second":2}\n'


def test_a_single_value_is_a_line_too(gateway):
    answer = post(gateway, "packed", b'{"first": 1}', **JSON, accept="application/x-ndjson")
    assert answer.content == b'{"first":2,"second":1}'
    assert answer.headers["content-type"] == "application/x-ndjson"


@pytest.mark.parametrize(
    ("origin", "is_own"),
    [("http://{host}", True), ("http://127.0.0.1:1", False), ("http://evil.example", False), ("null", False)],
)
def test_the_pages_of_the_gateway_may_use_it(gateway, origin, is_own):
    host = gateway.url.removeprefix("http://")
    answer = post(gateway, "plain", b'{"first": 1}', **JSON, origin=origin.format(host=host))
    assert (answer.status_code == 200) is is_own


def test_a_name_that_leads_to_this_computer_is_not_the_gateways_own(gateway):
    answer = post(gateway, "plain", b'{"first": 1}', **JSON, origin="http://evil.example", host="evil.example")
    assert answer.status_code == 403


@pytest.mark.skipif(browsers.PROGRAM is None, reason="needs the browser Chromium: apt-get install chromium")
def test_people_try_services_on_the_page(gateway, tmp_path):
    with browsers.browser(tmp_path) as page:
        page.open(gateway.url + "/docs")
        names = "Array.from(document.querySelectorAll('summary'), (each) => each.textContent)"
        eventually(lambda: page.evaluate(names) == ["cells", "packed", "parts", *PIECES, "plain", "raw"])
        page.evaluate("document.querySelectorAll('summary')[1].click()")
        eventually(lambda: page.evaluate("document.querySelectorAll('textarea').length") == 1)
        assert page.evaluate("document.querySelector('.description').innerHTML") == "Swap &lt;b&gt;both&lt;/b&gt;."
        page.evaluate("document.querySelector('details form button').click()")
        result = "document.querySelector('details form pre').textContent"
        eventually(lambda: page.evaluate(result) == '200\n{"first":2,"second":0}')


def test_a_client_that_disconnects_before_the_service_is_known(monkeypatch):
    """Its request is not made."""
    monkeypatch.setattr(descriptions, "TIMEOUT_SECONDS", 0.5)
    with http_gateway(free_endpoint()) as gateway:
        with gateway.connect() as client:
            client.send(
                b"POST /services/packed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"request-timeout: 3600\r\ncontent-length: 2\r\n\r\n{}"
            )
            eventually(lambda: gateway.gateway.outstanding == 1)
        eventually(lambda: gateway.gateway.outstanding == 0)


@pytest.mark.parametrize("accept", ["*/*", "text/event-stream"])
def test_the_time_for_a_request_passes_while_its_service_is_asked_about(monkeypatch, accept):
    monkeypatch.setattr(descriptions, "TIMEOUT_SECONDS", 10 * TIMEOUT_SECONDS)
    with http_gateway(free_endpoint()) as gateway:
        answer = post(gateway, "packed", b"{}", **JSON, accept=accept, **{"request-timeout": "0.1"})
        assert answer.status_code in {503, 504}
