"""An extension of Griffe, which reads docstrings for the API reference: what they cite becomes a link."""

import re
from typing import Any

from griffe import Extension, Object

CITED = re.compile(r"\bdocs/([\w/-]+)\.md\b")
ROOT = "../.."
"""The folder of the pages, as seen from those about the API."""


class Links(Extension):
    """Makes links of pages such as `docs/reference/x1.md`."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of an object that was read."""
        if obj.docstring is not None:
            obj.docstring.value = CITED.sub(link, obj.docstring.value)


def link(cited: re.Match[str]) -> str:
    """Return a link to a page that a docstring cites."""
    page = cited[1].removesuffix("index").rstrip("/")
    return f"[{page.rpartition('/')[2]}]({ROOT}/{page}/)"
