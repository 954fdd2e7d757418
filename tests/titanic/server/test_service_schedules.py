"""Schedules that services declare, from the worker to the request that is executed."""

import logging
import time
from types import SimpleNamespace

import pytest
from support.processes import eventually
from support.titanics import BEATS, LIMITS, StoppedClock, connected, serving, stored

from zmdp import Services
from zmdp.clients.command import describing
from zmdp.mdp.errors import SettingError
from zmdp.mdp.services import Description
from zmdp.testing import running_broker
from zmdp.titanic import Schedules
from zmdp.titanic.api.schedules import parse_schedule
from zmdp.titanic.db import store
from zmdp.titanic.server import service_schedules
from zmdp.workers import Worker

NOW = 1_800_000_000.0


def declared(**settings):
    """Return what workers of a service with these settings say."""
    services = Services()

    @services.service("sweep", **settings)
    def sweep() -> str:
        return "swept"

    (offered,) = services
    return offered.about()


def test_a_schedule_is_told_with_the_interval_in_seconds():
    assert declared(every="5m").as_option()["schedule"] == {"every": 300.0}
    assert declared(every=90).schedule == {"every": 90}
    given = {"cron": "30 2 * * *", "timezone": "Europe/Berlin"}
    assert declared(**given).schedule == given
    assert "schedule" not in declared().as_option()
    assert "schedule: every=300.0" in describing._lines(Description("sweep", 1, (declared(every="5m"),)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": "5 minutes"}, "every is '5 minutes'"),
        ({"every": 0.5}, "every must be a whole number of seconds"),
        ({"every": True}, "every is True"),
        ({"every": float("inf")}, "every must be a whole number of seconds"),
        ({"every": float("nan")}, "every must be a whole number of seconds"),
        ({"every": "99999d"}, "every must be a whole number of seconds, 1 or more, at most a hundred years"),
        ({"every": 5, "cron": "* * * * *"}, "either every or cron"),
        ({"timezone": "UTC"}, "either every or cron"),
        ({"every": 5, "timezone": "UTC"}, "timezone needs cron"),
        ({"cron": "nonsense"}, "cron is 'nonsense'"),
        ({"cron": 5}, "cron is 5: it must be text"),
        ({"cron": "* * * * *", "timezone": 5}, "timezone is 5: it must be text"),
        ({"cron": "* * * * *", "timezone": "Mars"}, "timezone is 'Mars'"),
    ],
)
def test_an_invalid_schedule_is_rejected_where_it_is_declared(settings, message):
    with pytest.raises(SettingError, match=message):
        declared(**settings)


def test_a_service_with_a_schedule_needs_no_value():
    services = Services()
    with pytest.raises(SettingError, match="gets no value"):

        @services.service("resize", every=60)
        def resize(width: int) -> int:
            return width


def test_a_titanic_takes_up_changes_and_drops_what_workers_declare(bench, url, client, monkeypatch):
    monkeypatch.setattr(service_schedules, "REPEAT_SECONDS", 0.0)
    schedules = Schedules(client)
    called = []

    def sweep(request):
        called.append((list(request), request.headers["schedule"]))
        return b"{}"

    def rows():
        return [(row["name"], row["service"], row["every"], row["retries"], row["paused"]) for row in schedules.ls()]

    with serving(bench.endpoint, url):
        with Worker("sweep", sweep, broker=bench.endpoint, about=declared(every=1, retries=3).as_option(), **BEATS):
            eventually(lambda: len(called) >= 2)
            assert rows() == [("service:sweep", "sweep", 1.0, 3, False)]
            assert called[0][0] == [b""]
            assert called[0][1].startswith("service:sweep@")
        schedules.pause("service:sweep")
        with Worker("sweep", sweep, broker=bench.endpoint, about=declared(every=2).as_option(), **BEATS):
            eventually(lambda: rows() == [("service:sweep", "sweep", 2.0, 0, True)])  # what is paused stays so
        with Worker("sweep", sweep, broker=bench.endpoint, **BEATS):
            eventually(lambda: rows() == [])
    keys = [row["key"] for row in stored(url)["requests"]]
    assert len(keys) == len(set(keys)) >= 2


def test_what_is_not_taken_up_is_in_the_log(bench, url, client, caplog, monkeypatch):
    monkeypatch.setattr(service_schedules, "REPEAT_SECONDS", 0.0)
    monkeypatch.setattr(service_schedules, "INTERVAL_SECONDS", 0.01)
    caplog.set_level(logging.WARNING)
    told = "workers of sweep declare a schedule, which is not followed: `titanic serve --service-schedules`"
    asked = []
    about = declared(every=1).as_option()
    with (
        serving(bench.endpoint, url, service_schedules=False),
        Worker("sweep", asked.append, broker=bench.endpoint, about=about, **BEATS),
    ):
        eventually(lambda: client.available("sweep"))
        assert client.describe("sweep").about.schedule == {"every": 1}
        eventually(lambda: told in caplog.messages)
        Schedules(client).add("other", "sweep", every=1)
        eventually(lambda: asked)
        assert [row["name"] for row in Schedules(client).ls()] == ["other"]
    assert caplog.messages.count(told) == 1


def test_what_a_worker_says_is_checked(bench, url, client, caplog):
    caplog.set_level(logging.WARNING)
    about = {"schedule": {"every": "often"}, "submission": {"retries": 10**9}}
    good = declared(every=86400).as_option()
    with (
        serving(bench.endpoint, url),
        Worker("bad", lambda _: b"", broker=bench.endpoint, about=about, **BEATS),
        Worker("good", lambda _: b"", broker=bench.endpoint, about=good, **BEATS),
    ):
        eventually(lambda: [row["name"] for row in Schedules(client).ls()] == ["service:good"])
        eventually(lambda: any("ignored the schedule" in message for message in caplog.messages))


def test_what_cannot_be_read_changes_nothing(bench, url, client, caplog, monkeypatch):
    monkeypatch.setattr(service_schedules, "REPEAT_SECONDS", 0.0)
    caplog.set_level(logging.WARNING)
    schedules = Schedules(client)

    def rows():
        return [(row["name"], row["paused"]) for row in schedules.ls()]

    with serving(bench.endpoint, url):
        with Worker("sweep", lambda _: b"", broker=bench.endpoint, about=declared(every=60).as_option(), **BEATS):
            eventually(lambda: rows() == [("service:sweep", False)])
            schedules.pause("service:sweep")
        about = {"schedule": {"cron": "30 2 * * *", "timezone": "Mars/Olympus"}}
        with Worker("sweep", lambda _: b"", broker=bench.endpoint, about=about, **BEATS):
            eventually(lambda: sum("ignored the schedule" in message for message in caplog.messages) > 1)
            assert rows() == [("service:sweep", True)]


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_what_is_not_declared_because_the_broker_is_gone_stays(tmp_path, own_url, monkeypatch):
    endpoint, about = f"ipc://{tmp_path}/broker", declared(every=86400).as_option()
    steps = []

    def monotonic():
        steps.append(time.monotonic())
        return steps[-1]

    def known():
        with connected(own_url) as connection:
            return [row["name"] for row in store.list_schedules(connection, [store.Listing(None)])[0]]

    monkeypatch.setattr(service_schedules, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(service_schedules, "time", SimpleNamespace(monotonic=monotonic))
    with serving(endpoint, own_url, service_schedules=True) as server:
        with (
            running_broker(endpoint, limits=LIMITS, drain_timeout=0.1),
            Worker("sweep", lambda _: b"", broker=endpoint, about=about, **BEATS),
        ):
            eventually(known)
        eventually(lambda: not server.snapshot()["broker"])
        monkeypatch.setattr(service_schedules, "FORGET_SECONDS", 0.0)
        before = len(steps)
        eventually(lambda: len(steps) > before + 2)
        assert known() == ["service:sweep"]


# ── what is stored ───────────────────────────────────────────────────────────────────────────────────────────────────


def schedule(service, every=60, now=NOW):
    return parse_schedule([f"service:{service}".encode(), service.encode(), b""], {"every": 1000 * every}, now)


def names(tables):
    (found,) = tables.do(store.list_schedules, store.Listing(None))
    return {row["name"]: row["every"] for row in found}


def test_what_was_not_declared_for_long_is_removed(tables):
    tables.do(store.declare_service_schedules, store.Declared({"a": schedule("a"), "b": schedule("b")}, NOW, None))
    tables.do(store.edit_schedules, store.Edit("add", "c", "", NOW, schedule("c")._replace(name="c")))
    tables.do(store.declare_service_schedules, store.Declared({"a": schedule("a", 90)}, NOW + 50, NOW))
    assert names(tables) == {"service:a": 90.0, "c": 60.0}
    tables.do(store.declare_service_schedules, store.Declared({"c": None, "a": None}, NOW + 51, None))
    assert names(tables) == {"c": 60.0}


def test_what_has_not_changed_keeps_its_next_occurrence(tables):
    for now in (NOW, NOW + 30):
        assert tables.do(store.declare_service_schedules, store.Declared({"a": schedule("a", now=now)}, now, None)) == [
            []
        ]
    assert tables.do(store.next_occurrence, frozenset()) == [NOW + 60]


def test_workers_neither_take_the_name_of_another_schedule_nor_fill_the_database(tables, monkeypatch):
    monkeypatch.setattr("zmdp.titanic.db.store.schedules.MAX_SCHEDULES", 1)
    tables.do(store.edit_schedules, store.Edit("add", "service:a", "", NOW, schedule("a", 3600)))
    found = tables.do(
        store.declare_service_schedules, store.Declared({"a": schedule("a"), "b": schedule("b")}, NOW, None)
    )
    assert found == [[
        "the schedule of service a is ignored: there is another schedule service:a already: remove it first",
        "the schedule of service b is ignored: there are 1 schedules already: remove some first",
    ]]  # fmt: skip
    assert names(tables) == {"service:a": 3600.0}


def test_what_is_paused_stays_paused_when_it_changes(tables):
    tables.do(store.declare_service_schedules, store.Declared({"a": schedule("a")}, NOW, None))
    tables.do(store.edit_schedules, store.Edit("pause", "service:a", "", NOW))
    tables.do(store.declare_service_schedules, store.Declared({"a": schedule("a", 90)}, NOW + 1, None))
    (found,) = tables.do(store.list_schedules, store.Listing(None))
    assert (found[0]["every"], found[0]["next"]) == (90.0, None)


def test_what_was_missed_is_submitted_as_workers_now_declare_it(tables):
    def declare(retries, now):
        made = schedule("a", 3600, now)._replace(retries=retries)
        tables.do(store.declare_service_schedules, store.Declared({"a": made}, now, None))

    declare(0, NOW)
    declare(3, NOW + 3900)  # no Titanic ran meanwhile
    (fired,) = tables.do(store.fire, store.Firing(StoppedClock(NOW + 3900)))
    assert [each.retries for each in fired.submissions] == [3]
    declare(4, NOW + 7000)
    ((row,),) = tables.do(store.list_schedules, store.Listing(None))
    assert (row["retries"], row["created"], row["last"], row["next"]) == (4, NOW, NOW + 3600, NOW + 7200)
