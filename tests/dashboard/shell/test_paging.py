import pytest

from zmdp.dashboard.shell.paging import PAGE_ROWS, Column, table

COLUMNS = [
    Column("name", "Name", lambda row: row["name"], descending=False),
    Column("size", "Size", lambda row: row["size"]),
    Column("note", "Note"),
]
ROWS = [{"name": f"row {number:03}", "size": number % 7} for number in range(120)]


def shown(**query):
    return table(ROWS, COLUMNS, "/rows", query, text=lambda row: row["name"], default="name")


def test_a_page_has_the_first_rows_in_the_default_order():
    found = shown()
    assert [row["name"] for row in found.rows] == [row["name"] for row in ROWS[:PAGE_ROWS]]
    assert (found.first, found.last, found.matching, found.total, found.page, found.pages) == (1, 50, 120, 120, 1, 3)
    assert found.url(2) == "/rows?page=2"


def test_search_ignores_case_and_keeps_the_order():
    found = shown(q="ROW 11", sort="-name")
    assert [row["name"] for row in found.rows] == [f"row {number}" for number in range(119, 109, -1)]
    assert (found.matching, found.total, found.pages) == (10, 120, 1)


def test_a_heading_sorts_and_then_turns_the_order():
    headings = {each.column.name: each for each in shown().headings}
    assert headings["size"].url == "/rows?sort=-size"
    assert headings["name"].direction == "ascending"
    assert headings["name"].url == "/rows?sort=-name"
    assert headings["note"].url == ""
    by_size = shown(sort="-size", q="row", page="2")
    assert {row["size"] for row in by_size.rows} == {4, 3, 2, 1}
    assert next(each for each in by_size.headings if each.column.name == "size").url == "/rows?sort=size&q=row"


@pytest.mark.parametrize(
    ("page", "expected"), [("0", 1), ("-1", 1), ("two", 1), ("²", 1), ("3", 3), ("4", 3), ("9" * 4000, 3)]
)
def test_a_page_that_does_not_exist_is_the_nearest_or_the_first(page, expected):
    assert shown(page=page).page == expected


def test_an_unknown_order_is_the_default():
    assert shown(sort="__class__").rows == shown().rows
    assert shown(sort="note").rows == shown().rows


def test_no_rows():
    found = shown(q="nothing like that")
    assert (found.first, found.last, found.pages) == (0, 0, 1)
