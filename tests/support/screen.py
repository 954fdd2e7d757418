"""A browser as a person uses it: keys, clicks, what is visible, screenshots."""

import base64
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .browser import Page
from .processes import SHORT_TIMEOUTS, eventually

KEYS = {"Escape": {"key": "Escape", "code": "Escape", "windowsVirtualKeyCode": 27}}


class Screen:
    """One page of a browser, and what it complains about."""

    def __init__(self, page: Page, folder: Path) -> None:
        self._page = page
        self._folder = Path(os.environ.get("ZMDP_SCREENSHOTS", folder))
        for domain in ("Page", "Log", "Runtime"):
            page.command(f"{domain}.enable")
        page.command("Emulation.setScrollbarsHidden", hidden=True)
        self.size(1280, 900)

    def open(self, url: str) -> None:
        self._page.open(url)

    def script(self, text: str, *arguments: Any) -> Any:
        """Run the body of a function of JavaScript, and return its result."""
        return self._page.evaluate(f"(function () {{ {text} }}).apply(null, {json.dumps(arguments)})")

    @property
    def text(self) -> str:
        """The visible text of the page."""
        return str(self.script("return document.body ? document.body.innerText : ''"))

    def texts(self, selector: str) -> list[str]:
        """Return the text of each element, all read at the same moment."""
        return list(self.script("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", selector))

    def count(self, selector: str) -> int:
        return int(self.script("return document.querySelectorAll(arguments[0]).length", selector))

    def click(self, selector: str) -> None:
        """Click in the middle of the first such element."""
        middle = """
            const element = document.querySelector(arguments[0]);
            element.scrollIntoView({block: "center", behavior: "instant"});
            const box = element.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        """
        x, y = self.script(middle, selector)
        for kind in ("mousePressed", "mouseReleased"):
            self._page.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, *keys: str) -> None:
        """Press keys one after the other; text of several characters is a key each."""
        for key in keys:
            if key in KEYS:
                self._key(KEYS[key])
            else:
                for each in key:
                    self._key({"key": each, "text": each})

    def shortcut(self, keys: str, shows: Callable[[], Any]) -> None:
        """Press the keys until the page shows what they lead to: the second counts only within 1.5 s of the first."""
        for seconds in SHORT_TIMEOUTS:
            self.press(keys)
            with suppress(AssertionError):
                eventually(shows, seconds)
                return
        raise AssertionError(f"the keys {keys!r} did not lead there")

    def _key(self, key: dict[str, Any]) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {} if kind == "keyDown" else {"text": ""}
            self._page.command("Input.dispatchKeyEvent", **{**key, **text, "type": kind})

    def size(self, width: int, height: int) -> None:
        self._page.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def scheme(self, name: str) -> None:
        """Prefer `dark` or `light`."""
        self._page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def screenshot(self, name: str) -> None:
        """Save a screenshot, in the folder $ZMDP_SCREENSHOTS or a temporary one."""
        data = self._page.command("Page.captureScreenshot", format="png")["data"]
        (self._folder / f"{name}.png").write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Return what the browser has logged since it was last asked: violations of a policy, failures, exceptions."""
        self.script("return 0")  # what was logged before arrives before the answer
        events, self._page.events = self._page.events, []
        logged = [each["params"]["entry"]["text"] for each in events if each["method"] == "Log.entryAdded"]
        thrown = [str(each["params"]) for each in events if each["method"] == "Runtime.exceptionThrown"]
        return logged + thrown
