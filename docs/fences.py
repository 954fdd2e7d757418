"""An extension of Python-Markdown: a code block may have a name after its language, as the examples of X1 have.

GitHub ignores such a name; Python-Markdown would not take the block for code.
"""

import re
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

NAMED = re.compile(r"^(\s*```\w+) .*")
BEFORE_FENCES = 100
"""The priority: before the code blocks are found."""


class WithoutNames(Preprocessor):
    """Removes the names of code blocks."""

    def run(self, lines: list[str]) -> list[str]:
        """Return the page without them."""
        return [NAMED.sub(r"\1", line) for line in lines]


class Fences(Extension):
    """Installs it."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - Python-Markdown's name
        """Add the preprocessor."""
        md.preprocessors.register(WithoutNames(md), "without-names", BEFORE_FENCES)


def makeExtension(**settings: Any) -> Fences:  # noqa: N802 - Python-Markdown's name
    """Return the extension."""
    return Fences(**settings)
