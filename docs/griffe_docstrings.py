"""An extension of Griffe, which reads docstrings for the API: cited pages become links, examples are highlighted."""

import re
from textwrap import dedent
from typing import Any

from griffe import Extension, Object

CITED = re.compile(r"\bdocs/([\w/-]+)\.md\b")
SECTIONS = re.compile(r"^(?=(?:Args|Returns|Yields|Raises):$)", re.MULTILINE)
EXAMPLE = re.compile(r"(?<=\n\n)(?: {4}.*(?:\n+(?= {4})|$))+", re.MULTILINE)
ROOT = "../.."
"""The folder of the pages, as seen from those about the API."""


class Docstrings(Extension):
    """Prepares docstrings, which are written for people who read the source, for the site."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of an object that was read."""
        if obj.docstring is not None:
            text = CITED.sub(link, obj.docstring.value)
            if not obj.is_module:  # their indented lines may be drawings
                description, *sections = SECTIONS.split(text, maxsplit=1)
                text = "".join([EXAMPLE.sub(block, description), *sections])
            obj.docstring.value = text


def link(cited: re.Match[str]) -> str:
    """Return a link to a page that a docstring cites, such as docs/reference/x1.md."""
    page = cited[1].removesuffix("index").rstrip("/")
    return f"[{page.rpartition('/')[2]}]({ROOT}/{page}/)"


def block(example: re.Match[str]) -> str:
    """Return an indented example as a block of Python."""
    return f"```python\n{dedent(example[0])}\n```"
