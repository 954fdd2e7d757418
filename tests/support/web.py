"""A broker with `--http` as a process, and what tests do with its pages."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from zmdp.workers import Worker

from .processes import TIMEOUT_SECONDS, Process, eventually, process


@dataclass
class WebBroker:
    """A running broker that serves HTTP."""

    process: Process
    endpoint: str
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    def client(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=TIMEOUT_SECONDS, **settings)

    def get(self, path: str, **settings: Any) -> httpx.Response:
        return httpx.get(self.url + path.removeprefix("/"), timeout=TIMEOUT_SECONDS, **settings)

    def post(self, path: str, **settings: Any) -> httpx.Response:
        return httpx.post(self.url + path.removeprefix("/"), timeout=TIMEOUT_SECONDS, **settings)

    def text_of(self, path: str) -> str:
        """Return the text of a page, without markup."""
        return re.sub(r"<[^>]+>|\s+", " ", self.get(path).text)

    def shows(self, path: str, *parts: str) -> str:
        """Wait until the text of a page contains all `parts`, and return it.

        A page shows what has been answered by then, and the rest when it is loaded again.
        """

        def shown() -> str:
            text = " ".join(self.text_of(path).split())
            return text if all(part in text for part in parts) else ""

        found: str = eventually(shown)
        return found


@contextmanager
def web_broker(*options: str, **env: str) -> Iterator[WebBroker]:
    """Run a broker with a web server, and wait until it is ready and has something to show."""
    command = ("mdp-broker", "--bind", "tcp://127.0.0.1:*", "--http", "127.0.0.1:0", *options)
    with process(*command, **env) as running:
        url = running.line("http://", "stdout")
        found = WebBroker(running, running.line("tcp://", "stdout"), url)
        eventually(lambda: found.get("/readyz").status_code == 200)
        # With access control, only a visitor with a token would see it.
        eventually(lambda: (metrics := found.get("/metrics")).status_code == 401 or "mdp_up 1" in metrics.text)
        yield found


def web_server_of(pid: int) -> int | None:
    """Return the process id of a broker's web server, which one of the broker's threads has started."""
    tasks = Path(f"/proc/{pid}/task")
    found = [child for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    return int(found[0]) if found else None


def form_token(page: str) -> str:
    """Return the token that the forms of a page contain."""
    found = re.search(r'name="form_token" value="([0-9a-f]+)"', page)
    assert found, page
    return found[1]


@contextmanager
def serving(endpoint: str, service: str, handler: Callable[[Any], Any]) -> Iterator[Worker]:
    """Offer a service from a thread."""
    worker = Worker(service, handler, broker=endpoint)
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join()
