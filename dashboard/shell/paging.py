"""Search, sorting and paging of tables with thousands of rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from .formats import link

PAGE_ROWS: Final = 50


@dataclass(frozen=True)
class Column:
    """A column: its name in the URL, its heading, and what it is sorted by; None if it cannot be."""

    name: str
    title: str
    key: Callable[[Any], Any] | None = None
    number: bool = True
    descending: bool = True
    """Whether the largest come first at the first click."""

    @classmethod
    def text(cls, name: str, title: str, key: Callable[[Any], Any] | None = None) -> Self:
        """Return a column of text, whose first click sorts it upwards."""
        return cls(name, title, key, number=False, descending=False)


@dataclass(frozen=True)
class Heading:
    """The heading of a column, as the template shows it."""

    column: Column
    url: str
    direction: str
    """`ascending` or `descending` if the table is sorted by it; otherwise empty."""


@dataclass(frozen=True)
class Table:
    """The rows on one page of a table, and the links to the others."""

    path: str
    query: Mapping[str, str]
    rows: Sequence[Any]
    headings: Sequence[Heading]
    total: int
    matching: int
    page: int
    pages: int
    search: str
    more: int = 0
    """Rows that the broker left out of its answer."""

    @property
    def first(self) -> int:
        """The number of the first row on the page."""
        return (self.page - 1) * PAGE_ROWS + 1 if self.rows else 0

    @property
    def last(self) -> int:
        """The number of the last row on the page."""
        return self.first + len(self.rows) - 1 if self.rows else 0

    def url(self, page: int) -> str:
        """Return the URL of another page."""
        return link(self.path, **{**self.query, "page": page if page > 1 else ""})


def table(
    rows: Iterable[Any],
    columns: Sequence[Column],
    path: str,
    query: Mapping[str, str],
    *,
    text: Callable[[Any], str],
    default: str,
    more: int = 0,
    shown: Callable[[Any], Any] = lambda row: row,
) -> Table:
    """Return the page that a query asks for: `q` is searched for in the `text` of each row.

    `shown` turns the rows on that page into what the template needs.
    """
    found = list(rows)
    total = len(found)
    search = query.get("q", "").strip()
    if search:
        wanted = search.casefold()
        found = [row for row in found if wanted in text(row).casefold()]
    by_name = {column.name: column for column in columns if column.key is not None}
    asked = query.get("sort", "")
    column = by_name.get(asked.removeprefix("-")) or by_name[default.removeprefix("-")]
    descending = (asked if asked.removeprefix("-") in by_name else default).startswith("-")
    assert column.key is not None  # noqa: S101 - those without are not in by_name
    found.sort(key=column.key, reverse=descending)
    pages = max(1, -(-len(found) // PAGE_ROWS))
    asked_page = query.get("page", "1")
    page = min(max(int(asked_page), 1), pages) if asked_page.isascii() and asked_page.isdigit() else 1
    headings = [
        Heading(
            each,
            "" if each.key is None else link(path, **{**query, "page": "", "sort": _sort(each, column, descending)}),
            "" if each is not column else "descending" if descending else "ascending",
        )
        for each in columns
    ]
    on_page = [shown(row) for row in found[(page - 1) * PAGE_ROWS : page * PAGE_ROWS]]
    return Table(path, dict(query), on_page, headings, total, len(found), page, pages, search, more=more)


def _sort(column: Column, current: Column, descending: bool) -> str:
    """Return what sorts by `column`: in the other direction if the table is sorted by it already."""
    down = not descending if column is current else column.descending
    return f"-{column.name}" if down else column.name
