import pytest

from zmdp.dashboard.shell.formats import link, number, percent, seconds, size, span


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (0, "0"), (7, "7"), (0.034, "0.03"), (3.14, "3.1"), (42.4, "42"), (1234567, "1 234 567")],
)
def test_numbers(value, shown):
    assert number(value).replace("\N{THIN SPACE}", " ") == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0, "0 ms"),
        (0.00002, "20 µs"),
        (0.0042, "4.2 ms"),
        (0.9996, "1 s"),
        (12.34, "12.3 s"),
        (90, "1 min 30 s"),
    ],
)
def test_times(value, shown):
    assert seconds(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (59, "59 s"), (3599, "59 min 59 s"), (7260, "2 h 1 min"), (200_000, "2 d 7 h")],
)
def test_long_times(value, shown):
    assert span(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(None, "–"), (999, "999 B"), (1500, "1.5 kB"), (2.5e17, "250000 TB")])
def test_sizes(value, shown):
    assert size(value) == shown


def test_shares():
    assert [percent(each) for each in (None, 0, 0.012, 0.5, 1)] == ["–", "0 %", "1.2 %", "50 %", "100 %"]


def test_links_leave_out_what_is_empty_and_quote_the_rest():
    assert link("/service", name="a&b <c>/ä", page="", sort=None) == "/service?name=a%26b+%3Cc%3E%2F%C3%A4"
    assert link("/") == "/"
