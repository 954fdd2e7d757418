"""A real browser opens a page that streams from the gateway."""

import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest
from support import browser as browsers
from support.http_gateways import TITANIC, await_services, http_gateway
from support.processes import eventually
from support.titanics import serving

from zmdp.testing import running_broker
from zmdp.workers import Worker

EXAMPLES = Path(__file__).parents[3] / "examples"

pytestmark = pytest.mark.skipif(browsers.PROGRAM is None, reason="needs the browser Chromium: apt-get install chromium")


class Files(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Say nothing."""


@contextmanager
def file_server():
    """Serve the examples, and yield the origin of their pages."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(EXAMPLES))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Words:
    """A service that sends one word after the other, each when it is told to."""

    def __init__(self):
        self.next = threading.Semaphore(0)

    def __call__(self, request):
        for word in request[0].split():
            self.next.acquire()
            yield word
        self.next.acquire()
        return b"that is all"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A browser with the page open, and the service that the page calls."""
    words = Words()
    with running_broker(drain_timeout=0.0) as server, file_server() as origin:
        at = server.endpoints[0]
        with (
            Worker("words", words, broker=at),
            serving(at, str(tmp_path_factory.mktemp("titanic") / "titanic.db")),
            http_gateway(at, allow_origins=(origin,)) as allowing,
            http_gateway(at) as refusing,
            browsers.browser(tmp_path_factory.mktemp("browser")) as page,
        ):
            await_services(at, "words", *TITANIC)

            def opened(gateway):
                page.open(f"{origin}/stream.html?service=words&gateway={quote(gateway.url)}")
                return page

            yield words, partial(opened, allowing), partial(opened, refusing)


def shown(page, how):
    return page.evaluate(f"Array.from(document.getElementById('{how}-parts').children, (each) => each.textContent)")


@pytest.mark.parametrize("how", ["fetch", "job"])
def test_the_page_shows_each_partial_as_it_arrives(site, how):
    """Each part is sent only after the page has shown the one before it."""
    words, opened, _ = site
    page = opened()
    page.evaluate(f"document.getElementById('{how}').click()")
    expected = []
    for part in ("partial: hello", "partial: big", "partial: world", "final: that is all"):
        assert shown(page, how) == expected
        words.next.release()
        expected.append(part)
        eventually(lambda: shown(page, how) == expected)


def test_a_page_of_an_origin_that_is_not_allowed_gets_nothing(site):
    _, _, opened = site
    page = opened()
    page.evaluate("document.getElementById('fetch').click()")
    eventually(lambda: shown(page, "fetch") == ["error: Failed to fetch"])
