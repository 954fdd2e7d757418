"""Check that Markdown lines have at most 100 characters: `python docs/check_width.py`, as `make lint` does.

Exempt are code blocks, tables, the targets of links, and the pages that programs write.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH = 100
GENERATED = {"commands.md"}
LINK_TARGET = re.compile(r"(?<=\])\([^)]*\)|<?https?://\S+")


def pages() -> list[Path]:
    """Return the pages that people write."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(page for page in found if page.name not in GENERATED)


def long_lines(text: str) -> list[int]:
    """Return the numbers, from 1, of the lines that are too long."""
    found = []
    fenced = indented = False
    before = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            indented = line.startswith("    ") and (indented or not before.strip())
            table = line.lstrip().startswith("|")
            if not indented and not table and len(LINK_TARGET.sub("", line)) > WIDTH:
                found.append(number)
        before = line
    return found


def main() -> None:
    """Print the lines that are too long.  Exit with 1 if there are any."""
    wrong = [f"{page.relative_to(ROOT)}:{number}" for page in pages() for number in long_lines(page.read_text())]
    if wrong:
        sys.exit("\n".join([f"These lines have more than {WIDTH} characters:", *wrong]))


if __name__ == "__main__":
    main()
