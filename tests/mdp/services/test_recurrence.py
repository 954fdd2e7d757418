"""When something recurs, also while clocks change."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from zmdp.mdp.services.recurrence import RecurrenceError, cron, every

HOUR, DAY = 3600, 86400
SPRING = datetime(2026, 3, 29, 1, tzinfo=UTC).timestamp()
"""When clocks in Berlin go from 2:00 to 3:00."""
AUTUMN = datetime(2026, 10, 25, 1, tzinfo=UTC).timestamp()
"""When clocks in Berlin go from 3:00 back to 2:00."""
CHANGES = {
    "Europe/Berlin": (SPRING, AUTUMN),
    "America/New_York": (
        datetime(2026, 3, 8, 7, tzinfo=UTC).timestamp(), datetime(2026, 11, 1, 6, tzinfo=UTC).timestamp(),
    ),
    "Australia/Lord_Howe": (  # where clocks change by half an hour
        datetime(2026, 10, 3, 15, 30, tzinfo=UTC).timestamp(), datetime(2026, 4, 4, 15, tzinfo=UTC).timestamp(),
    ),
    "Asia/Beirut": (  # at midnight
        datetime(2026, 3, 28, 22, tzinfo=UTC).timestamp(), datetime(2026, 10, 24, 21, tzinfo=UTC).timestamp(),
    ),
}  # fmt: skip


def occurrences(rule, after, until):
    """Return the occurrences after one moment, until another one or at it."""
    found = []
    while (after := rule.after(after)) is not None and after <= until:
        found.append(after)
    return found


def clock(moments, zone):
    """Return what the clocks show at these moments."""
    return [datetime.fromtimestamp(moment, ZoneInfo(zone)).strftime("%H:%M %Z") for moment in moments]


# ── intervals ────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    st.integers(1, 10**7),
    st.floats(0, 4e9),
    st.one_of(st.floats(0, 4e9), st.integers(0, 4 * 10**9).map(float)),
)
@example(5, 100.9, 100.0)
@example(5, 100.9, 105.0)
@example(5, 100.9, 104.999)
def test_an_interval_recurs_by_its_start_and_before_it_too(seconds, start, moment):
    """A start in the future is of a clock that was ahead."""
    found = every(seconds, start).after(moment)
    assert (found - int(start)) % seconds == 0
    assert found - seconds <= moment < found


@pytest.mark.parametrize("seconds", [0, 0.5, 1.5, -1])
def test_an_interval_is_a_whole_number_of_seconds(seconds):
    with pytest.raises(RecurrenceError, match="whole number of seconds"):
        every(seconds, 0)


# ── cron ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def utc(*when):
    return datetime(*when, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("expression", "after", "found"),
    [
        ("* * * * *", utc(2026, 1, 1), utc(2026, 1, 1, 0, 1)),
        ("0 0 1 1 *", utc(2026, 1, 1), utc(2027, 1, 1)),
        ("*/15 9-17 * * MON-FRI", utc(2026, 11, 27, 17, 45), utc(2026, 11, 30, 9)),
        ("0 12 1 * MON", utc(2026, 11, 25), utc(2026, 11, 30, 12)),  # the first or a Monday
        ("0 0 29 2 *", utc(2026, 1, 1), utc(2028, 2, 29)),
        ("0 0 L * *", utc(2026, 2, 1), utc(2026, 2, 28)),
        ("*/10 * * * * *", utc(2026, 1, 1, 0, 0, 11), utc(2026, 1, 1, 0, 0, 20)),
        ("* * * * *", utc(2026, 1, 1) + 0.5, utc(2026, 1, 1, 0, 1)),
        ("* * * * *", utc(2026, 1, 1) - 0.5, utc(2026, 1, 1)),
    ],
)
def test_a_cron_expression(expression, after, found):
    assert cron(expression).after(after) == found


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("@hourly", (2026, 11, 25, 14)), ("@daily", (2026, 11, 26)), ("@midnight", (2026, 11, 26)),
        ("@weekly", (2026, 11, 29)), ("@monthly", (2026, 12, 1)), ("@yearly", (2027, 1, 1)),
        ("@annually", (2027, 1, 1)),
    ],
)  # fmt: skip
def test_the_names_of_expressions(name, found):
    assert cron(name).after(utc(2026, 11, 25, 13, 30)) == utc(*found)


def test_the_name_of_an_expression_in_a_time_zone():
    assert cron("@daily", "Asia/Tokyo").after(utc(2026, 11, 25)) == utc(2026, 11, 25, 15)


def test_a_time_zone():
    rule = cron("30 2 * * *", "Europe/Berlin")
    assert rule.after(utc(2026, 1, 10)) == utc(2026, 1, 10, 1, 30)
    assert rule.after(utc(2026, 7, 10)) == utc(2026, 7, 10, 0, 30)


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("30 2 * * *", ["03:00 CEST"]),
        ("0,30 2 * * *", ["03:00 CEST"]),
        ("30 * * * *", ["00:30 CET", "01:30 CET", "03:30 CEST", "04:30 CEST"]),
        ("*/30 1-3 * * *", ["01:00 CET", "01:30 CET", "03:00 CEST", "03:30 CEST"]),
    ],
)
def test_clocks_that_go_forward(expression, shown):
    rule = cron(expression, "Europe/Berlin")
    assert clock(occurrences(rule, SPRING - 2 * HOUR + 1, SPRING + 2 * HOUR - 1), "Europe/Berlin") == shown


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("30 2 * * *", ["02:30 CEST"]),
        ("30 * * * *", ["01:30 CEST", "02:30 CEST", "02:30 CET", "03:30 CET"]),
        ("*/30 2 * * *", ["02:00 CEST", "02:30 CEST", "02:00 CET", "02:30 CET"]),
    ],
)
def test_clocks_that_go_back(expression, shown):
    rule = cron(expression, "Europe/Berlin")
    assert clock(occurrences(rule, AUTUMN - 2 * HOUR + 1, AUTUMN + 2 * HOUR - 1), "Europe/Berlin") == shown


def wall_times(hours, minutes):
    return st.tuples(st.lists(hours, min_size=1, max_size=3), st.lists(minutes, min_size=1, max_size=3))


around_changes = st.sampled_from(sorted(CHANGES)).flatmap(
    lambda zone: st.tuples(st.just(zone), st.sampled_from(CHANGES[zone]), st.floats(-2 * DAY, 2 * DAY, width=32))
)


@given(around_changes, wall_times(st.integers(0, 4), st.integers(0, 59)), st.sampled_from(["", "0 "]))
def test_a_time_on_the_clock_occurs_once_a_day(place, times, seconds):
    """If it is skipped, as soon as clocks have changed; if it comes twice, the first time."""
    zone, change, offset = place
    hours, minutes = times
    start, end = change + offset, change + offset + 2 * DAY
    expected = set()
    day = datetime.fromtimestamp(start, ZoneInfo(zone)).date() - timedelta(days=1)
    for _ in range(5):
        for hour in hours:
            for minute in minutes:
                wall = datetime(day.year, day.month, day.day, hour, minute, tzinfo=ZoneInfo(zone))
                moment = wall.timestamp()
                skipped = datetime.fromtimestamp(moment, ZoneInfo(zone)).replace(fold=0) != wall
                expected.add(change if skipped else moment)
        day += timedelta(days=1)
    rule = cron(f"{seconds}{','.join(map(str, minutes))} {','.join(map(str, hours))} * * *", zone)
    assert occurrences(rule, start, end) == sorted(each for each in expected if start < each <= end)


MINUTES = {"*": range(60), "*/7": range(0, 60, 7), "5": [5], "1-3,30": [1, 2, 3, 30]}
HOURS = {"*": range(24), "*/2": range(0, 24, 2), "0": [0], "1,2": [1, 2], "5": [5]}


@given(around_changes, st.sampled_from(sorted(MINUTES)), st.sampled_from(sorted(HOURS)), st.booleans())
@example(("Asia/Beirut", CHANGES["Asia/Beirut"][0], -HOUR), "*/7", "1,2", True)
@example(("Asia/Beirut", CHANGES["Asia/Beirut"][0], -HOUR), "*", "0", True)
@example(("Australia/Lord_Howe", CHANGES["Australia/Lord_Howe"][0], -HOUR), "*/7", "5", False)
def test_with_a_star_it_goes_by_the_time_that_passes(place, minutes, hours, only_on_that_day):
    """Also where clocks change at midnight, or by half an hour."""
    assume("*" in minutes + hours)
    zone, change, offset = place
    start, end = change + offset, change + offset + DAY

    def shown(moment):
        return datetime.fromtimestamp(moment, ZoneInfo(zone))

    days = [shown(change).isoweekday()] if only_on_that_day else range(1, 8)
    rule = cron(f"{minutes} {hours} * * {days[0] if only_on_that_day else '*'}", zone)
    passing = range(int(start // 60) * 60, int(end) + 60, 60)
    assert occurrences(rule, start, end) == [
        each
        for each in passing
        if start < each <= end
        and shown(each).minute in MINUTES[minutes]
        and shown(each).hour in HOURS[hours]
        and shown(each).isoweekday() in days
    ]


@given(
    around_changes,
    st.sampled_from(
        [
            "* * * * *",
            "*/20 2 * * *",
            "10,50 1-3 * * *",
            "0 0 * * SUN",
            "30 */2 * * *",
            "*/5 * * * * *",
            "0 30 0,2 * * *",
        ]
    ),
    st.floats(0, 1),
)
def test_the_series_does_not_depend_on_where_it_is_entered(place, expression, fraction):
    """So that nothing is submitted twice or never after a Titanic has died."""
    zone, change, offset = place
    rule, moment = cron(expression, zone), change + offset
    series = []
    for _ in range(12):
        moment = rule.after(moment)
        series.append(moment)
    assert all(earlier < later for earlier, later in pairwise(series))
    between = series[0] + fraction * (series[-1] - series[0])
    assert rule.after(between) == next((each for each in series if each > between), rule.after(series[-1]))


@pytest.mark.parametrize(
    ("expression", "zone", "problem"),
    [
        ("", "UTC", "wrong number of fields"),
        ("* * * *", "UTC", "wrong number of fields"),
        ("60 * * * *", "UTC", "bad minute"),
        ("* * 30 2 *", "UTC", "bad day-of-month"),
        (
            "@reboot",
            "UTC",
            "'@reboot': of the names, there are @yearly, .*, @hourly; otherwise it has",
        ),
        ("@Daily", "UTC", "of the names, there are"),
        ("@daily 5", "UTC", "of the names, there are"),
        ("* * * * *", "Mars/Olympus", "'Mars/Olympus': it must be a name such as Europe/Berlin"),
        ("* * * * *", "../../etc/passwd", "timezone is"),
        ("* * * * *", "Europe", "timezone is"),
        ("* * * * *", "x" * 90, "timezone is"),
        ("* * * * *", "", "timezone is"),
    ],
)
def test_what_is_invalid_is_rejected(expression, zone, problem):
    with pytest.raises(RecurrenceError, match=problem):
        cron(expression, zone)


@given(st.text(st.sampled_from("0123456789*/,-#LWSUNMON ²\t\n"), max_size=30))
def test_any_text_is_either_an_expression_or_rejected(text):
    try:
        found = cron(text).after(0)
    except RecurrenceError:
        return
    assert found is None or found > 0
