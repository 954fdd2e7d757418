"""A real browser: Chromium, without a window, driven over its DevTools protocol."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.processes import TIMEOUT_SECONDS, eventually
from websockets.sync.client import ClientConnection, connect

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-sync",
)  # fmt: skip


class Navigated(Exception):
    """The document was replaced while a command was carried out."""


class Page:
    """A page in the browser."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._last = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        """What has happened, by the domains that were enabled, in the order of its arrival."""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command, and return its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._connection.send(json.dumps(message))
        while True:  # events arrive in between
            answer = json.loads(self._connection.recv(TIMEOUT_SECONDS))
            if answer.get("id") == self._last:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise Navigated
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript; if a link is just being followed, in the next document."""
        while True:
            with suppress(Navigated):
                found = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
                break
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, url: str) -> None:
        """Open a page, and wait until its scripts have run."""
        self.command("Page.navigate", url=url)
        eventually(lambda: self.evaluate("location.href") == url and self.evaluate("document.readyState") == "complete")


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Run the browser, which keeps its files in `folder`."""
    assert PROGRAM is not None
    command = [PROGRAM, *OPTIONS, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            where = folder / "DevToolsActivePort"
            eventually(lambda: where.exists() and where.read_text().count("\n") == 1)
            port, path = where.read_text().split()
            with connect(
                f"ws://127.0.0.1:{port}{path}", max_size=None, compression=None, open_timeout=TIMEOUT_SECONDS
            ) as connection:
                yield Page(connection)
        finally:
            running.kill()
