"""The dashboard in a real browser."""

import asyncio

import pytest
from support.browser import running_browser
from support.processes import eventually
from support.web import serving, web_broker

from zmdp.clients import AsyncClient, Client
from zmdp.mdp.errors import RequestCancelled

SERVICES = 10_000
HOSTILE = '<img src=x onerror="document.title=1">&amp;<script>document.title=2</script>'


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with running_browser(tmp_path_factory.mktemp("screenshots")) as running:
        yield running


@pytest.fixture(scope="module")
def broker():
    with web_broker() as running:
        yield running


@pytest.fixture
def client(broker):
    with Client(broker.endpoint, timeout=60) as client:
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
    assert "No workers yet" in browser.text
    assert "mdworker zmdp.workers.echo:worker" in browser.text
    eventually(lambda: is_live(browser))


def test_what_happens_appears_without_loading_the_page_again(browser, broker, client):
    browser.open(f"{broker.url}services")
    eventually(lambda: is_live(browser))
    browser.script("window.loaded = 'once'")
    with serving(broker.endpoint, "images.resize", echo):
        eventually(lambda: browser.texts("tbody td:first-child") == ["images.resize"])
        for _ in range(20):
            client.request("images.resize", b"x")
        eventually(lambda: float(browser.texts("tbody td:nth-child(6)")[0]) > 0)
        browser.find("tbody a").click()
        eventually(lambda: "20 requests" in browser.text)
        browser.find("nav a[data-key=s]").click()
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
        browser.find(f"tbody tr[id='service-{HOSTILE}'] a").click()
        eventually(lambda: HOSTILE in browser.text and is_live(browser))
        for page in ("", "workers", "requests"):
            browser.open(broker.url + page)
            eventually(lambda: HOSTILE in browser.text and is_live(browser))
        browser.open(f"{broker.url}services?q=%3Cscript%3Edocument.title%3D2%3C/script%3E&sort=%22%3E%3Cb%3E")
        eventually(lambda: HOSTILE in browser.text and is_live(browser))
        assert browser.script("return document.title").startswith("Services")
        assert browser.all("main img, main script, main b") == []
        waiting.cancel()


def test_cancelling_a_request(browser, broker, client):
    waiting = client.submit("nobody.offers.this", b"x")
    browser.open(f"{broker.url}requests")
    eventually(lambda: browser.texts("tbody td:nth-child(2)") == ["nobody.offers.this"] and is_live(browser))
    browser.find("tbody summary").click()
    age = browser.texts("tbody td:first-child")
    eventually(lambda: browser.texts("tbody td:first-child") != age)  # the page has changed meanwhile
    assert browser.all("tbody details[open]")
    browser.find("tbody button.danger").click()
    eventually(lambda: "The request was cancelled" in browser.text)
    with pytest.raises(RequestCancelled):
        waiting.result(20)
    eventually(lambda: "Nothing in flight" in browser.text)


def test_the_keyboard_is_enough(browser, broker):
    from selenium.webdriver import ActionChains, Keys

    def press(*keys):
        ActionChains(browser.driver).send_keys(*keys).perform()

    browser.open(broker.url)
    press("g", "s")
    eventually(lambda: browser.script("return location.pathname") == "/services" and is_live(browser))
    press("/", "abc")
    eventually(lambda: browser.script("return location.search") == "?q=abc")
    press(Keys.ESCAPE, "g", "b")
    eventually(lambda: browser.script("return location.pathname") == "/brokers")
    assert "This broker is alone" in browser.text


def test_what_is_open_and_focused_stays_while_the_page_changes(browser, broker, client):
    waiting = [client.submit(f"nobody.{number}", b"x") for number in range(3)]
    browser.open(f"{broker.url}requests")
    eventually(lambda: len(browser.texts("tbody tr")) == 3 and is_live(browser))
    browser.script("document.querySelectorAll('main *').forEach(each => { each.seen = true; })")
    browser.find("tbody summary").click()
    browser.find("#search").send_keys("nob")
    age = browser.texts("tbody td:first-child")
    waiting.append(client.submit("nobody.3", b"x"))
    eventually(lambda: len(browser.texts("tbody tr")) == 4)
    assert browser.texts("tbody td:first-child")[0] != age[0]
    assert browser.script("return document.activeElement.id + document.activeElement.value") == "searchnob"
    new = "return [...document.querySelectorAll('tbody tr, #search, h1')].filter(each => !each.seen).length"
    assert browser.script(new) == 1
    assert len(browser.all("tbody details[open]")) == 1
    for each in waiting:
        each.cancel()


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
            browser.screenshot(f"service-narrow-{scheme}")
        finally:
            browser.size(1280, 900)
            browser.scheme("light")


def bright(browser, name):
    colour = browser.script("return getComputedStyle(document.body)[arguments[0]]", name)
    return sum(int(each) for each in colour.strip("rgb()").split(",")[:3]) > 3 * 128


class Ignored:
    """Takes what a request results in."""

    def put(self, outcome):
        pass


def test_ten_thousand_services(browser):
    """Each has a request that waits for its first worker."""

    async def main(endpoint):
        async with AsyncClient(endpoint) as client:
            for number in range(SERVICES):
                client.begin(Ignored(), f"tenant.{number:05}.sync", b"x", timeout=None)
            await asyncio.to_thread(look, browser, broker)

    with web_broker("--max-unserved", "20000", "--max-services", "20000") as broker:
        asyncio.run(main(broker.endpoint))


def look(browser, broker):
    browser.open(f"{broker.url}services")
    eventually(lambda: "of 10\N{THIN SPACE}000 services" in browser.text)
    assert len(browser.all("tbody tr")) == 50
    browser.find("a[rel=next]").click()
    eventually(lambda: browser.texts("tbody td:first-child")[:1] == ["tenant.00050.sync"])
    browser.find("#search").send_keys("0777")
    eventually(lambda: len(browser.texts("tbody tr")) == 11)
    browser.find("th a[data-sort=name]").click()
    eventually(lambda: browser.texts("tbody td:first-child")[0] == "tenant.07779.sync")
    browser.screenshot("services-10000")
    browser.open("about:blank")
    metrics = broker.get("/metrics").text
    assert metrics.count("mdp_queue_depth{") == 501
    assert 'mdp_queue_depth{service="_other"} 9500.0' in metrics
