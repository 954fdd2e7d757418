"""The page of a service: what its workers say of it, and the form with which admins try it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from support import browser as browsers
from support.access import ROLES, Folder
from support.offered import offered
from support.processes import TIMEOUT_SECONDS, eventually
from support.screen import Screen
from support.web import form_token, web_broker

from zmdp import Client, Services
from zmdp.mdp.tokens import new_token
from zmdp.workers import current_request

services = Services(version="1.4")


@dataclass
class Job:
    path: str
    width: int = 80


@services.service("images.resize", codec="msgpack", retries=3, ttl=60.0)
def resize(job: Job) -> list[str]:
    """Scale an image, <b>quickly</b>."""
    return [job.path, str(job.width), str(current_request().user)]


@services.service("endless")
def endless() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


@services.service("raw")
def raw(data: bytes) -> bytes:
    return data + b"\x1b"


def answered(endpoint, **settings):
    """Call the services once, so that the broker counts them."""
    with Client(endpoint, timeout=TIMEOUT_SECONDS, **settings) as client:
        client.call(resize, Job("a.png"))
        next(client.stream(endless))
        client.call(raw, b"")


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A broker with access control and the services, and the tokens of two roles."""
    folder, tokens, roles = Folder(tmp_path_factory.mktemp("access")), {}, ROLES
    for name in ("driver", "operator"):
        tokens[name], digest = new_token()
        roles = roles.replace(f'["{name}.key"]', f'["{name}.key"]\ntokens = ["{digest}"]')
    folder.write(roles.replace('call = ["*"]\nadmin', 'call = ["images.*", "endless", "raw"]\nadmin'))
    with (
        web_broker("--access", str(folder.access)) as broker,
        offered(services, broker.endpoint, **folder.settings("driver")),
    ):
        answered(broker.endpoint, **folder.settings("driver"))
        yield SimpleNamespace(broker=broker, tokens=tokens)


@contextmanager
def logged_in(there, role):
    with there.broker.client(follow_redirects=True) as http:
        http.post("/login", data={"token": there.tokens[role]})
        yield http


def page_of(http, name):
    return eventually(lambda: (found := http.get("/service", params={"name": name})).status_code == 200 and found.text)


def tried(http, name, body, token=None):
    """Return what the page shows after the form was sent."""
    token = form_token(page_of(http, name)) if token is None else token
    return http.post("/service/try", data={"form_token": token, "service": name, "body": body})


def test_who_may_look_sees_what_workers_say_but_no_form(there):
    with logged_in(there, "driver") as http:
        page = page_of(http, "images.resize")
        assert "Version 1.4, 1 worker" in page
        assert "Scale an image, &lt;b&gt;quickly&lt;/b&gt;." in page
        assert "class Job:\n    path: str\n    width: int = 80" in page
        assert "<code>retries=3, ttl=60.0</code>" in page
        assert "Try it" not in page
        assert tried(http, "images.resize", "{}", token="1").status_code == 403


def test_an_admin_tries_a_service_in_their_own_name(there):
    with logged_in(there, "operator") as http:
        page = page_of(http, "images.resize")
        assert "{\n  &#34;path&#34;: &#34;&#34;,\n  &#34;width&#34;: 80\n}</textarea>" in page
        shown = tried(http, "images.resize", '{"path":\r\n "a.png"}').text
        assert "[\n  &#34;a.png&#34;,\n  &#34;80&#34;,\n  &#34;operator&#34;\n]" in shown
        assert "notice good" in shown


@pytest.mark.parametrize(
    ("name", "body", "kind", "text"),
    [
        ("images.resize", '{"path": 5}', "bad", "$.path: expected str, got int"),
        ("endless", "", "good", "0\n1\n2\n"),
        ("raw", "<i>", "good", "&lt;i&gt;?"),
    ],
)
def test_what_comes_of_a_trial_is_shown_safely(there, name, body, kind, text):
    with logged_in(there, "operator") as http:
        shown = tried(http, name, body).text
        assert f"notice {kind}" in shown
        assert text in shown


def test_an_admin_cannot_call_what_their_role_may_not(there):
    with logged_in(there, "operator") as http:
        token = form_token(page_of(http, "raw"))
        sent = http.post(
            "/service/try", data={"form_token": token, "service": "secret", "body": "", "visitor": "driver"},
            follow_redirects=False,
        )  # fmt: skip
        shown = http.get(
            "/service",
            params={"name": "raw", "tried": sent.headers["location"].rpartition("=")[2].removesuffix("#about")},
        )
        assert "operator" in shown.text
        assert "403" in shown.text


@pytest.mark.skipif(browsers.PROGRAM is None, reason="needs the browser Chromium: apt-get install chromium")
def test_a_browser_tries_a_service(plain, tmp_path):
    with browsers.browser(tmp_path) as page, offered(services, plain.endpoint), plain.client() as http:
        answered(plain.endpoint)
        screen = Screen(page, tmp_path)
        page_of(http, "images.resize")
        screen.open(f"{plain.url}service?name=images.resize")
        for selector in ("#try summary", "#try button"):  # wherever they are: the page may be about to move them
            screen.script("document.querySelector(arguments[0]).click()", selector)
        eventually(lambda: '"80"' in "".join(screen.texts("#about .notice")))
        assert screen.count("#try[open]") == 1
        assert screen.complaints() == []
