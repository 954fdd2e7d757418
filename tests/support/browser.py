"""A headless Chromium for tests of pages; without one, they are skipped."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--force-color-profile=srgb", "--window-size=1280,900",
)  # fmt: skip


class Browser:
    """A browser with one page."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver = driver
        self._folder = Path(os.environ.get("ZMDP_SCREENSHOTS", folder))

    def open(self, url: str) -> None:
        self.driver.get(url)

    def script(self, text: str, *arguments: Any) -> Any:
        return self.driver.execute_script(text, *arguments)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    @property
    def text(self) -> str:
        """The visible text of the page."""
        return str(self.script("return document.body.innerText"))

    def texts(self, selector: str) -> list[str]:
        """Return the text of each element, all read at the same moment."""
        return list(self.script("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", selector))

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        """Prefer `dark` or `light`."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def screenshot(self, name: str) -> Path:
        """Save a screenshot, in the folder $ZMDP_SCREENSHOTS or a temporary one."""
        path = self._folder / f"{name}.png"
        assert self.driver.save_screenshot(str(path))
        return path

    def complaints(self) -> list[str]:
        """Return what the browser has logged since it was last asked, such as violations of a security policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """Run a browser; skip the test if there is none."""
    chromium, chromedriver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("needs Chromium and its driver; on Debian: apt-get install chromium chromium-driver")
    selenium = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = chromium
    for argument in ARGUMENTS:
        options.add_argument(argument)
    driver = selenium.Chrome(options=options, service=Service(chromedriver))
    try:
        driver.set_page_load_timeout(20)
        yield Browser(driver, folder)
    finally:
        driver.quit()
