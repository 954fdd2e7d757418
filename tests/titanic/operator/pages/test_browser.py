"""Titanic's pages in a real browser."""

import pytest
from support import browser as browsers
from support.processes import TIMEOUT_SECONDS, eventually
from support.screen import Screen
from support.titanics import LIMITS, state, titanic_at

from zmdp.clients import Client
from zmdp.testing import running_broker
from zmdp.titanic import Titanic
from zmdp.workers import ServiceError, Worker

pytestmark = pytest.mark.skipif(browsers.PROGRAM is None, reason="needs the browser Chromium: apt-get install chromium")


def resize(request):
    if request[0] == b"broken.png":
        raise ServiceError(422, "not an <image>")
    yield b"50%"
    return b"done"


def test_follow_search_and_retry(tmp_path):
    db = tmp_path / "titanic.db"
    with (
        browsers.browser(tmp_path) as page, running_broker(limits=LIMITS) as server,
        Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client, titanic_at(server.endpoints[0], db) as there,
    ):  # fmt: skip
        browser, titanic = Screen(page, tmp_path), Titanic(client)
        browser.open(there.url)
        eventually(lambda: browser.texts("#live") == ["live"])
        assert "No requests yet" in browser.text
        browser.script("window.loaded = 'once'")
        with Worker("images.resize", resize, broker=server.endpoints[0]):
            for ticket in [titanic.submit("images.resize", b"%d.png" % number) for number in range(20)]:
                ticket.result(timeout=TIMEOUT_SECONDS)
            failed = titanic.submit("images.resize", b"broken.png", key="upload-17")
            with pytest.raises(ServiceError):
                failed.result(timeout=TIMEOUT_SECONDS)
        waits = titanic.submit("mail.send", b"hello", headers={"language": "en"})
        eventually(lambda: browser.texts("tbody td:first-child") == ["images.resize", "mail.send"])
        eventually(lambda: "Done\n20" in browser.text)
        assert browser.script("return window.loaded") == "once"  # all this came without loading the page again
        browser.screenshot("titanic-overview")

        browser.click("nav a[data-key=r]")
        eventually(lambda: browser.count("#search") and browser.texts("#live") == ["live"])
        browser.press("/", "upload-1")
        eventually(lambda: browser.texts("tbody code") == [failed.uuid])
        browser.click("tbody code")
        eventually(lambda: "422: not an <image>" in browser.text and "broken.png" in browser.text)
        browser.screenshot("titanic-request")
        browser.click("main form button")
        eventually(lambda: "Done: the request is now pending" in browser.text)
        eventually(lambda: state(str(db), failed.uuid) == "pending")  # unless Titanic is just trying once more

        browser.open(f"{there.url}request?uuid={waits.uuid}")
        browser.click("main form button.danger")
        eventually(lambda: "499: cancelled by an operator" in browser.text)
        browser.scheme("dark")
        browser.open(f"{there.url}requests?state=failed")
        eventually(lambda: browser.texts("tbody code") == [waits.uuid])
        browser.screenshot("titanic-failed-dark")
        assert browser.complaints() == []
