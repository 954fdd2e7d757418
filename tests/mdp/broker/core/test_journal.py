"""Counts for JSON, and log lines at a bounded rate."""

import json
import logging
import math

import pytest

from zmdp.mdp.broker.core.drops import Drop
from zmdp.mdp.broker.core.journal import LINES, PERIOD, Journal, Loss, Refusal, Stats
from zmdp.mdp.timers import Alarms
from zmdp.mdp.wire.names import show


@pytest.fixture
def alarms():
    return Alarms()


@pytest.fixture
def journal(caplog, alarms):
    caplog.set_level(logging.DEBUG, "zmdp.test")
    return Journal(logging.getLogger("zmdp.test"), alarms)


def test_a_line_shows_bytes_as_text(journal, caplog):
    journal.note(0, logging.WARNING, "kind", "worker %s of %s: %s", b"\x00\xff", b"echo", Loss.SILENT)
    assert caplog.record_tuples == [("zmdp.test", logging.WARNING, "worker 00ff of echo: silent")]


def test_what_was_left_out_is_summarised_at_the_end_of_the_period(journal, alarms, caplog):
    assert alarms.due == math.inf
    for _ in range(LINES + 3):
        journal.note(1, logging.INFO, "kind", "line")
    journal.note(3, logging.INFO, "other", "line")
    assert alarms.due == 1 + PERIOD
    journal.flush(1 + PERIOD - 0.001)
    assert caplog.messages == ["line"] * (LINES + 1)
    journal.flush(1 + PERIOD)
    assert caplog.record_tuples[-1] == ("zmdp.test", logging.INFO, "kind: 3 more in the last 10 s")
    assert alarms.due == math.inf
    journal.flush(5 * PERIOD)
    assert len(caplog.messages) == LINES + 2


def test_a_line_in_the_next_period_comes_after_the_summary(journal, caplog):
    for _ in range(LINES + 3):
        journal.note(1, logging.INFO, "kind", "line")
    journal.note(1 + PERIOD, logging.INFO, "kind", "again")
    assert caplog.messages[LINES:] == ["kind: 3 more in the last 10 s", "again"]


def test_a_kind_can_have_a_bound_of_its_own(journal, caplog):
    for _ in range(LINES + 3):
        journal.note(1, logging.INFO, "kind", "line", lines=LINES + 2)
    assert len(caplog.messages) == LINES + 2


def test_every_period_has_its_own_lines(journal, caplog):
    for start in (0, PERIOD, 2 * PERIOD):
        for _ in range(LINES + 1):
            journal.note(start, logging.INFO, "kind", "line")
    told = "kind: 1 more in the last 10 s"
    assert caplog.messages == ["line"] * LINES + ([told] + ["line"] * LINES) * 2


@pytest.mark.parametrize(
    ("name", "text"),
    [(b"echo", "echo"), ("größe".encode(), "größe"), (b"\xff\x00", "ff00"), (b"a\nb", "610a62"), (b"", "")],
)
def test_bytes_are_shown_safely(name, text):
    assert show(name) == text


def test_counts_are_ready_for_json():
    stats = Stats(requests=3)
    stats.invalid["no-header"] += 2
    stats.dropped[Drop.EXPIRED] += 1
    stats.disconnected[Refusal.NO_REQUEST] += 1
    stats.lost[Loss.SILENT] += 4
    assert json.loads(json.dumps(stats.as_dict())) == {
        "requests": 3,
        "dispatched": 0,
        "redispatched": 0,
        "partials": 0,
        "replies": 0,
        "errors": 0,
        "late": 0,
        "other_role": 0,
        "mmi": 0,
        "heartbeats": 0,
        "internal_errors": 0,
        "invalid": {"no-header": 2},
        "dropped": {"expired": 1},
        "disconnected": {"reply-without-request": 1},
        "lost": {"silent": 4},
        "connections": {},
    }
