"""Titanic's pages in a real browser."""

import pytest
from support.browser import running_browser
from support.processes import eventually
from support.titanics import LIMITS, state, titanic_at

from zmdp.clients import Client
from zmdp.mdp.testing import running_broker
from zmdp.titanic import Titanic
from zmdp.workers import ServiceError, Worker


def resize(request):
    if request[0] == b"broken.png":
        raise ServiceError(422, "not an <image>")
    yield b"50%"
    return b"done"


def test_follow_search_and_retry(tmp_path):
    db = tmp_path / "titanic.db"
    with (
        running_browser(tmp_path) as browser, running_broker(limits=LIMITS) as server,
        Client(server.endpoints[0], timeout=20) as client, titanic_at(server.endpoints[0], db) as there,
    ):  # fmt: skip
        titanic = Titanic(client)
        browser.open(there.url)
        eventually(lambda: browser.texts("#live") == ["live"])
        assert "No requests yet" in browser.text
        browser.script("window.loaded = 'once'")
        with Worker("images.resize", resize, broker=server.endpoints[0]):
            for ticket in [titanic.submit("images.resize", b"%d.png" % number) for number in range(20)]:
                ticket.result(timeout=20)
            failed = titanic.submit("images.resize", b"broken.png", key="upload-17")
            with pytest.raises(ServiceError):
                failed.result(timeout=20)
        waits = titanic.submit("mail.send", b"hello", headers={"language": "en"})
        eventually(lambda: browser.texts("tbody td:first-child") == ["images.resize", "mail.send"])
        eventually(lambda: "Done\n20" in browser.text)
        assert browser.script("return window.loaded") == "once"  # all this came without loading the page again
        browser.screenshot("titanic-overview")

        browser.find("nav a[data-key=r]").click()
        browser.find("#search").send_keys("upload-1")
        eventually(lambda: browser.texts("tbody code") == [failed.uuid])
        browser.find("tbody code").click()
        eventually(lambda: "422: not an <image>" in browser.text)
        assert "broken.png" in browser.text
        browser.screenshot("titanic-request")
        browser.find("main form button").click()
        eventually(lambda: "Done: the request is now pending" in browser.text)
        assert state(str(db), failed.uuid) == "pending"

        browser.open(f"{there.url}request?uuid={waits.uuid}")
        browser.find("main form button.danger").click()
        eventually(lambda: "499: cancelled by an operator" in browser.text)
        browser.scheme("dark")
        browser.find("nav a[data-key=d]").click()
        eventually(lambda: browser.texts("tbody code") == [waits.uuid])
        browser.screenshot("titanic-dead-dark")
        assert browser.complaints() == []
