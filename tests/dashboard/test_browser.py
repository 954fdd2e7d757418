"""The dashboard in a real browser."""

from itertools import pairwise

import pytest
from support import browser as browsers
from support.processes import TIMEOUT_SECONDS, eventually
from support.screen import Screen
from support.web import serving, web_broker

from zmdp.clients import Client
from zmdp.mdp.errors import RequestCancelled, ServiceError

pytestmark = pytest.mark.skipif(browsers.PROGRAM is None, reason="needs the browser Chromium: apt-get install chromium")
HOSTILE = '<img src=x onerror="document.title=1">&amp;<script>document.title=2</script>'

LABELS = """
    return [...document.querySelectorAll(".bounds")].map(each => [...each.querySelectorAll("span:not(.minor)")].map(
        label => {
            const text = document.createRange();
            text.selectNodeContents(label);
            const box = text.getBoundingClientRect();
            return [box.left, box.right, getComputedStyle(label).direction];
        }
    ));
"""
"""Where the labels of histograms begin and end, and in which direction they are written."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsers.browser(tmp_path_factory.mktemp("browser")) as page:
        yield Screen(page, tmp_path_factory.mktemp("screenshots"))


@pytest.fixture(scope="module")
def broker():
    with web_broker() as running:
        yield running


@pytest.fixture
def client(broker):
    with Client(broker.endpoint, timeout=TIMEOUT_SECONDS) as client:
        yield client


@pytest.fixture(autouse=True)
def no_complaints(browser, broker):
    """No page violates its security policy, or has errors."""
    yield
    assert browser.complaints() == []
    assert "Traceback" not in broker.process.stderr


def echo(request):
    return list(request)


def is_live(browser):
    return browser.texts("#live") == ["live"]


def test_the_first_visit_names_the_next_step(browser, broker):
    browser.open(broker.url)
    eventually(lambda: "No workers yet" in browser.text)  # before, it may wait for the broker
    assert "mdworker zmdp.workers.examples:echo" in browser.text
    eventually(lambda: is_live(browser))


def test_what_happens_appears_without_loading_the_page_again(browser, broker, client):
    browser.open(f"{broker.url}services")
    eventually(lambda: is_live(browser))
    browser.script("window.loaded = 'once'")
    with serving(broker.endpoint, "images.resize", echo):
        eventually(lambda: browser.texts("tbody td:first-child") == ["images.resize"])
        for _ in range(20):
            client.request("images.resize", b"x")
        eventually(lambda: browser.texts("tbody td:nth-child(6)") not in (["0"], []))
        browser.click("tbody a")
        eventually(lambda: "20 requests" in browser.text)
        browser.click("nav a[data-key=s]")
        eventually(lambda: browser.script("return location.pathname") == "/services")
        browser.script("window.loaded = 'once'")
        eventually(lambda: is_live(browser))
    eventually(lambda: browser.texts("tbody td:nth-child(2)") == ["0"])
    assert browser.script("return window.loaded") == "once"


def test_markup_in_a_name_is_text_everywhere(browser, broker, client):
    with serving(broker.endpoint, HOSTILE, echo):
        client.request(HOSTILE, b"x")
        waiting = client.submit(HOSTILE + " waits", b"x")
        browser.open(f"{broker.url}services")
        eventually(lambda: {HOSTILE, HOSTILE + " waits"} <= set(browser.texts("tbody td:first-child")))
        browser.click("tbody tr:first-child a")
        eventually(lambda: HOSTILE in browser.text and is_live(browser))
        for page in ("", "workers", "requests"):
            browser.open(broker.url + page)
            eventually(lambda: HOSTILE in browser.text and is_live(browser))
        browser.open(f"{broker.url}services?q=%3Cscript%3Edocument.title%3D2%3C/script%3E&sort=%22%3E%3Cb%3E")
        eventually(lambda: HOSTILE in browser.text and is_live(browser))
        assert browser.script("return document.title").startswith("Services")
        assert browser.count("main img, main script, main b") == 0
        waiting.cancel()


def test_cancelling_a_request(browser, broker, client):
    waiting = client.submit("nobody.offers.this", b"x")
    browser.open(f"{broker.url}requests")
    eventually(lambda: browser.texts("tbody td:nth-child(2)") == ["nobody.offers.this"] and is_live(browser))
    browser.click("tbody summary")
    age = browser.texts("tbody td:first-child")
    eventually(lambda: browser.texts("tbody td:first-child") != age)  # the page has changed meanwhile
    assert browser.count("tbody details[open]")
    browser.click("tbody button.danger")
    eventually(lambda: "The request was cancelled" in browser.text)
    with pytest.raises(RequestCancelled):
        waiting.result(TIMEOUT_SECONDS)
    eventually(lambda: "Nothing in flight" in browser.text)


def test_the_keyboard_is_enough(browser, broker):
    browser.open(broker.url)
    browser.shortcut("gs", lambda: browser.script("return location.pathname") == "/services")
    eventually(lambda: is_live(browser))
    browser.press("/", "abc")
    eventually(lambda: browser.script("return location.search") == "?q=abc")
    browser.press("Escape")
    browser.shortcut("gb", lambda: "This broker is alone" in browser.text)
    assert browser.script("return location.pathname") == "/brokers"


def test_what_is_open_and_focused_stays_while_the_page_changes(browser, broker, client):
    waiting = [client.submit(f"nobody.{number}", b"x") for number in range(3)]
    browser.open(f"{broker.url}requests")
    eventually(lambda: len(browser.texts("tbody tr")) == 3 and is_live(browser))
    browser.script("document.querySelectorAll('main *').forEach(each => { each.seen = true; })")
    browser.click("tbody summary")
    browser.press("/", "nob")
    age = browser.texts("tbody td:first-child")
    waiting.append(client.submit("nobody.3", b"x"))
    eventually(lambda: len(browser.texts("tbody tr")) == 4)
    eventually(lambda: browser.texts("tbody td:first-child")[:1] != age[:1])
    assert browser.script("return document.activeElement.id + document.activeElement.value") == "searchnob"
    new = "return [...document.querySelectorAll('tbody tr, #search, h1')].filter(each => !each.seen).length"
    assert browser.script(new) == 1
    assert browser.count("tbody details[open]") == 1
    for each in waiting:
        each.cancel()


def fail(request):
    raise ServiceError(422, f"no such colour: {request[0].decode()}")


def test_requests_that_failed_last_are_shown_with_their_errors(browser, broker, client):
    with serving(broker.endpoint, "images.colour", fail):
        with pytest.raises(ServiceError):
            client.request("images.colour", b"bleen", headers={"request-id": "order-7"})
        browser.open(f"{broker.url}services")
        eventually(lambda: "images.colour" in browser.text)
        for page in ("", "service?name=images.colour"):
            browser.open(broker.url + page)
            eventually(lambda: "no such colour: bleen" in browser.text and "order-7" in browser.text)
            browser.size(390, 844)
            assert browser.script("return document.documentElement.scrollWidth <= 390"), page
            browser.screenshot(f"failures-narrow-{'service' if page else 'overview'}")
            browser.size(1280, 900)
            browser.screenshot(f"failures-{'service' if page else 'overview'}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_dark_and_narrow(browser, broker, client, scheme):
    with serving(broker.endpoint, "images.resize", echo):
        client.request("images.resize", b"x")
        browser.scheme(scheme)
        try:
            browser.open(broker.url)
            eventually(lambda: is_live(browser) and "images.resize" in browser.text)
            assert bright(browser, "backgroundColor") == (scheme == "light")
            assert bright(browser, "color") == (scheme == "dark")
            browser.screenshot(f"overview-{scheme}")
            browser.size(390, 844)
            for page in ("", "services", "workers", "requests", "brokers", "service?name=images.resize"):
                browser.open(broker.url + page)
                eventually(lambda: is_live(browser))
                assert browser.script("return document.documentElement.scrollWidth <= 390"), page
            for labels in browser.script(LABELS):
                assert all(direction == "ltr" for _, _, direction in labels)  # not "ms 5"
                assert all(one[1] <= other[0] for one, other in pairwise(labels))
            browser.screenshot(f"service-narrow-{scheme}")
        finally:
            browser.size(1280, 900)
            browser.scheme("light")


def bright(browser, name):
    colour = browser.script("return getComputedStyle(document.body)[arguments[0]]", name)
    return sum(int(each) for each in colour.strip("rgb()").split(",")[:3]) > 3 * 128
