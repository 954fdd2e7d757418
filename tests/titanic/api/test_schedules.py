"""Schedules: how they are given, and which occurrences are due."""

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmdp.titanic.api.schedules import (
    DEFAULT_RESULT_TTL,
    KEY_SECONDS,
    MAX_OCCURRENCES,
    MISSED_SECONDS,
    POLICIES,
    SCHEDULE_OPTIONS,
    Due,
    due,
    parse_schedule,
)
from zmdp.titanic.api.submission import MalformedRequest, encode_options, unpack

NOW = 1_800_000_000.0
"""A Friday, 8:00 UTC."""


def schedule(*frames, owner="", **options):
    return parse_schedule(frames or (b"nightly", b"report", b"body"), options, NOW, owner)


def every(seconds, **options):
    return schedule(every=seconds * 1000, **options)


# ── how they are given ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_defaults():
    made = schedule(cron="0 2 * * *")
    assert made._replace(body=b"") == (
        "nightly", "", "report", b"", None, 0, 0, None, DEFAULT_RESULT_TTL, "0 2 * * *", None, "UTC", "once", NOW,
        NOW + 18 * 3600, "",
    )  # fmt: skip
    assert unpack(made.body) == [b"body"]


def test_all_options():
    python = {
        "cron": "0 2 * * *", "timezone": "Europe/Berlin", "missed": "skip", "priority": 3, "retries": 2, "backoff": 0.5,
        "ttl": 60.0, "group": "tenant-7",
    }  # fmt: skip
    wire = encode_options(python, SCHEDULE_OPTIONS, "a schedule")
    made = schedule(b"a/b-c.d_e:f", b"report", b"one", b"two", owner="shop", headers={"a": "b"}, **wire)
    assert made._replace(body=b"") == (
        "a/b-c.d_e:f", "shop", "report", b"", '{"a": "b"}', 3, 2, 0.5, 60.0, "0 2 * * *", None, "Europe/Berlin", "skip",
        NOW, NOW + 17 * 3600, "tenant-7",
    )  # fmt: skip
    assert unpack(made.body) == [b"one", b"two"]


def test_an_interval():
    made = every(90)
    assert (made.every, made.cron, made.next) == (90, None, NOW + 90)


@pytest.mark.parametrize(
    ("frames", "options", "problem"),
    [
        ((b"name", b"report"), {"every": 1000}, "needs a name, the name of a service, and a body"),
        ((b"", b"report", b""), {"every": 1000}, "the schedule's name must be"),
        ((b"x" * 101, b"report", b""), {"every": 1000}, "the schedule's name must be"),
        ((b"a@b", b"report", b""), {"every": 1000}, "the schedule's name must be"),
        ((b"\xff", b"report", b""), {"every": 1000}, "the schedule's name must be"),
        ((b"name", b"titanic.close", b""), {"every": 1000}, "cannot be called through Titanic"),
        ((b"name", b"mmi.service", b""), {"every": 1000}, "cannot be called through Titanic"),
        ((), {}, "needs either cron or every"),
        ((), {"cron": "* * * * *", "every": 1000}, "needs either cron or every"),
        ((), {"every": 1000, "timezone": "Europe/Berlin"}, "timezone needs cron"),
        ((), {"every": 1500}, "whole number of seconds"),
        ((), {"every": 0}, "every must be a number of milliseconds, above 0"),
        ((), {"every": True}, "every must be a number"),
        ((), {"every": 1000, "missed": "never"}, "missed must be skip, once or all"),
        ((), {"cron": "nonsense"}, "wrong number of fields"),
        ((), {"cron": "* * * * *", "timezone": "Mars"}, "must be a name such as Europe/Berlin"),
        ((), {"cron": "0 0 */31 * MON#5"}, "that never occurs"),
        ((), {"cron": 5}, "cron must be text"),
        ((), {"every": 1000, "priority": 10}, "priority must be"),
        *(((), {"every": 1000, name: 5}, f"no option {name!r}") for name in ("key", "delay", "at", "uuid", "ttl")),
    ],
)
def test_what_is_invalid_is_rejected(frames, options, problem):
    with pytest.raises(MalformedRequest, match=problem):
        schedule(*frames, **options)


@given(
    st.dictionaries(
        st.sampled_from(["cron", "every", "timezone", "missed", "priority", "headers", "result_ttl", "x"]),
        st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=20), st.lists(st.none())),
    )
)
def test_any_options_are_either_valid_or_rejected(options):
    try:
        made = schedule(**options)
    except MalformedRequest:
        return
    assert made.next > NOW


def test_the_request_of_an_occurrence():
    made = every(90, priority=3, group="tenant-7", owner="shop", headers={"a": "b"}, result_ttl=1000)
    submitted = made.submission(NOW + 90, NOW + 91)
    assert (submitted.key, submitted.key_expires) == ("nightly@2027-01-15T08:01:30Z", NOW + 91 + KEY_SECONDS)
    assert (submitted.service, submitted.body, submitted.owner) == ("report", made.body, "shop")
    assert submitted.group_name == "tenant-7"
    assert (submitted.created, submitted.due, submitted.priority, submitted.result_ttl) == (NOW + 91, NOW + 91, 3, 1.0)
    assert json.loads(submitted.headers) == {"a": "b", "schedule": "nightly@2027-01-15T08:01:30Z"}
    assert submitted.uuid != made.submission(NOW + 90, NOW + 91).uuid


# ── what is due ──────────────────────────────────────────────────────────────────────────────────────────────────────


def times(*offsets):
    return [NOW + each for each in offsets]


@pytest.mark.parametrize("missed", POLICIES)
def test_nothing_is_due_before_its_time(missed):
    assert due(every(90, missed=missed), NOW + 89.9) == Due([], NOW + 90)


@pytest.mark.parametrize("missed", POLICIES)
@pytest.mark.parametrize("late", [0, 0.5, MISSED_SECONDS - 0.1])
def test_an_occurrence_on_time(missed, late):
    assert due(every(90, missed=missed), NOW + 90 + late) == Due(times(90), NOW + 180)


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        ("skip", Due(times(270, 300), NOW + 330)),
        ("once", Due(times(30, 270, 300), NOW + 330)),
        ("all", Due(times(*range(30, 330, 30)), NOW + 330)),
    ],
)
def test_missed_occurrences(missed, expected):
    """Those of the last minute are not missed."""
    assert due(every(30, missed=missed), NOW + 300) == expected


@pytest.mark.parametrize(("missed", "expected"), [("skip", []), ("once", [90]), ("all", [90])])
def test_a_single_missed_occurrence(missed, expected):
    assert due(every(90, missed=missed), NOW + 90 + MISSED_SECONDS) == Due(times(*expected), NOW + 180)


def test_many_missed_occurrences_are_submitted_bit_by_bit():
    made, found = every(1, missed="all"), []
    while (step := due(made, NOW + 250)).occurrences:
        assert len(step.occurrences) <= MAX_OCCURRENCES
        found += step.occurrences
        made = made._replace(next=step.next)
    assert found == times(*range(1, 251))


@pytest.mark.parametrize("missed", ["skip", "once"])
def test_a_century_of_missed_occurrences_takes_no_time(missed):
    now = NOW + 100 * 365 * 86400
    found = due(schedule(cron="* * * * * *", missed=missed), now)
    assert found.occurrences[-60:] == [now - at for at in reversed(range(60))]
    assert len(found.occurrences) <= 62


def test_what_is_paused_is_never_due():
    assert due(every(1)._replace(next=None), NOW + 1000) == Due([], None)


rules = st.one_of(
    st.builds(lambda seconds: {"every": seconds * 1000}, st.integers(1, 200)),
    st.builds(
        lambda cron, zone: {"cron": cron, "timezone": zone},
        st.sampled_from(["* * * * *", "*/7 * * * *", "*/20 * * * * *", "30 9 * * *"]),
        st.sampled_from(["UTC", "Europe/Berlin"]),
    ),
)


@given(rules, st.sampled_from(POLICIES), st.lists(st.floats(0, 500), max_size=12))
def test_whenever_titanic_looks_each_occurrence_is_handled_once(rule, missed, pauses):
    made, now = schedule(missed=missed, **rule), NOW
    recurrence, submitted, handled = made.recurrence, [], NOW
    for pause in pauses:
        now += pause
        expected = []
        while (handled_next := recurrence.after(handled)) <= now:
            handled = handled_next
            expected.append(handled)
        late = [each for each in expected if each <= now - MISSED_SECONDS]
        kept = {"skip": 0, "once": 1, "all": len(late)}[missed]
        found = []
        while (step := due(made, now)).occurrences:
            found += step.occurrences
            made = made._replace(next=step.next)
        made = made._replace(next=step.next)
        assert found == late[:kept] + expected[len(late) :]
        assert made.next == handled_next
        submitted += found
    assert all(earlier < later for earlier, later in pairwise(submitted))
    assert len({made.submission(each, now).key for each in submitted}) == len(submitted)


def test_keys_are_short_enough():
    assert re.fullmatch(r"x{100}@.{20}", schedule(b"x" * 100, b"s", b"", every=1000).submission(NOW, NOW).key)
