"""Three tools: a short one, one that tells its progress, and one whose calls outlive everybody."""

import time
from collections.abc import Iterator

from zmdp import Services, Tool

services = Services()


@services.service("words.count", tool=True)
def count(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


@services.service("pages.read", tool=Tool(read_only=True))
def read(pages: int) -> Iterator[str]:
    """Read a book, page by page."""
    for page in range(1, pages + 1):
        time.sleep(0.1)
        yield f"page {page}"


@services.service("report.build", tool=Tool(durable=True))
def build(month: str) -> dict[str, str]:
    """Build the report of a month."""
    time.sleep(2)
    return {"month": month, "result": "a profit"}
