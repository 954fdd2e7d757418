"""Write the table of rules and their tests at the end of docs/reference/conformance.md: `python tests/rules.py`.

A test names the rules that it proves in a comment of its own or on its `def` line: `# C14, C18: what it shows`.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "reference" / "conformance.md"
BEGIN, END = "<!-- Tests: written by tests/rules.py -->", "<!-- The end of what tests/rules.py writes -->"
RULE = re.compile(r"^- \*\*(C\d+)\*\* (.*?)(?=^- |^#|^<!--|\Z)", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (C\d+(?:, C\d+)*)\b")
FIRST = ("mdp", "mmi", "workers", "clients", "titanic", "conformance")
"""The folders of the tests that come first: those that show a rule at the lowest level."""
MAX_SHOWN = 3
"""Tests of a rule that the table names."""
MAX_TEXT = 60
"""Characters of a rule that it shows."""


def rules() -> dict[str, str]:
    """Return the rules on the page: number and text."""
    return dict(RULE.findall(PAGE.read_text()))


def tests_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the rules that the tests in a file name, each with the name of the test."""
    source = path.read_text()
    tests = [
        (min([node.lineno, *(each.lineno for each in node.decorator_list)]), node.end_lineno or 0, node.name)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        found = NAMED.match(token.string) if token.type == tokenize.COMMENT else None
        for first, last, name in tests if found else []:
            if found and first <= token.start[0] <= last:
                yield from ((rule, name) for rule in found[1].split(", "))


def proofs() -> dict[str, list[str]]:
    """Return the tests of each rule, those at the lowest level first."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py"), key=_order):
        for rule, test in tests_of(path):
            shown = f"{path.relative_to(TESTS)}::{test}"
            if shown not in found.setdefault(rule, []):
                found[rule].append(shown)
    return found


def _order(path: Path) -> tuple[int, str]:
    folder = path.relative_to(TESTS).parts[0]
    return FIRST.index(folder) if folder in FIRST else len(FIRST), str(path)


def table() -> str:
    """Return the table, as it stands between the two comments."""
    found = proofs()
    lines = ["| rule | | tests, of which there may be more |", "|---|---|---|"]
    for rule, text in rules().items():
        words = " ".join(text.split())
        shown = words if len(words) <= MAX_TEXT else f"{words[:MAX_TEXT].rpartition(' ')[0]} …"
        named = "<br>".join(f"`{each}`" for each in _chosen(found.get(rule, [])))
        lines.append(f"| {rule} | {_balanced(shown)} | {named} |")
    return "\n".join(lines)


def _chosen(tests: list[str]) -> list[str]:
    """Return the first test of each folder, and if these are few, others."""
    folders = {each.split("/")[0]: each for each in reversed(tests)}
    first = [each for each in tests if each in folders.values()]
    return [*first, *(each for each in tests if each not in first)][:MAX_SHOWN]


def _balanced(text: str) -> str:
    """Return `text` without the Markdown that was cut in half."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("|", r"\|")
    text = re.sub(r"\[([^\]]*)\]\([^)]*$|\[([^\]]*)$", r"\1\2", text)
    return f"{text[:-2]}` …" if text.count("`") % 2 else text


def page() -> str:
    """Return the page with the table as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
