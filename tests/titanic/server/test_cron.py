"""Schedules as programs use them: `Schedules`, the service `titanic.schedule`, and the requests that are submitted."""

import json
import time
from datetime import datetime

import pytest
from support.processes import eventually
from support.titanics import BEATS, answer, connected, serving, stored

from zmdp import Service
from zmdp.clients import ServiceNotFound
from zmdp.mdp.errors import SettingError
from zmdp.titanic import Schedules
from zmdp.titanic.api.schedules import occurrence_key, parse_schedule
from zmdp.titanic.db import store
from zmdp.workers import Worker


@pytest.fixture
def schedules(client, server):
    return Schedules(client)


def ask(bench, *frames, **options):
    """Ask `titanic.schedule` with frames written by hand, and return the frames of the answer."""
    client = bench.x1_client()
    client.request(b"titanic.schedule", *frames, options=json.dumps(options).encode() if options else b"")
    return client.recv()[4:]


def test_occurrences_are_submitted_and_executed(bench, schedules, url):
    called = []

    def report(request):
        called.append((request[0], request.headers["schedule"]))
        return b"reply"

    with Worker("report", report, broker=bench.endpoint, **BEATS):
        schedules.add("tick", "report", b"body", every=1, ttl=3600, headers={"a": "b"})
        eventually(lambda: len(called) >= 2)
        schedules.pause("tick")
        (row,) = eventually(lambda: [row for row in schedules.ls() if row["last_outcome"]["state"] == "done"])
    start = int(datetime.fromisoformat(row["created"]).timestamp())
    keys = [occurrence_key("tick", start + number) for number in (1, 2)]
    assert called[:2] == [(b"body", key) for key in keys]
    first, second, *_ = stored(url)["requests"]
    assert [first["key"], second["key"]] == keys
    assert (first["result_ttl"], json.loads(first["headers"])) == (3600, {"a": "b", "schedule": keys[0]})


def test_a_service_has_defaults_for_its_schedules(schedules):
    report = Service("report", int, int, retries=3, backoff=0.5, ttl=60.0, priority=7)
    schedules.add("a", report, 1, every=86400)
    schedules.add("b", report, 1, every=86400, retries=0, ttl=None)
    told = [(row["retries"], row["backoff"], row["result_ttl"], row["priority"]) for row in schedules.ls()]
    assert told == [(3, 0.5, 60.0, 7), (0, 0.5, 60.0, 7)]


def test_pause_resume_and_remove(schedules):
    schedules.add("nightly", "report", cron="0 2 * * *")
    schedules.pause("nightly")
    assert [(row["paused"], row["next"]) for row in schedules.ls()] == [(True, None)]
    schedules.resume("nightly")
    assert [row["paused"] for row in schedules.ls()] == [False]
    schedules.rm("nightly")
    assert schedules.ls() == []
    with pytest.raises(SettingError, match="there is no schedule nightly"):
        schedules.pause("nightly")


def test_run_submits_a_request_now(bench, schedules):
    worker = bench.x1_worker(b"report")
    schedules.add("nightly", "report", b"body", cron="0 2 * * *")
    uuid = schedules.run("nightly")
    assert answer(worker) == b"body"
    (row,) = eventually(lambda: [row for row in schedules.ls() if (row["last_outcome"] or {}).get("state") == "done"])
    assert row["last_uuid"] == uuid


def test_python_programs_are_told_what_is_invalid(schedules):
    with pytest.raises(TypeError, match="a schedule has no option 'delay'"):
        schedules.add("a", "report", every=5, delay=1)
    with pytest.raises(SettingError, match="missed must be skip, once or all"):
        schedules.add("a", "report", every=5, missed="never")
    with pytest.raises(SettingError, match="cron is 'x': wrong number of fields"):
        schedules.add("a", "report", cron="x")


@pytest.mark.parametrize(
    ("frames", "options", "problem"),
    [
        ((b"",), {}, b"the first frame must be one of add, ls, pause, resume, rm, run"),
        ((b"drop", b"a"), {}, b"the first frame must be one of"),
        ((b"add", b"a", b"report"), {"every": 1000}, b"a schedule needs a name, the name of a service, and a body"),
        ((b"add", b"a", b"report", b""), {"owner": "shop"}, b"titanic.schedule has no option 'owner'"),
        ((b"add", b"a", b"report", b""), {"every": 1000, "headers": {"a": "\ud800"}}, b"headers must map text to text"),
        ((b"ls", b"a"), {}, b"ls has no other frames"),
        ((b"ls",), {"name": "a"}, b"titanic.schedule has no option 'name': it has none"),
        ((b"rm",), {}, b"rm needs one more frame, the schedule's name"),
        ((b"rm", b"a", b"b"), {}, b"rm needs one more frame"),
        ((b"rm", b"a b"), {}, b"the schedule's name must be"),
        ((b"rm", b"a"), {"uuid": "0" * 32}, b"titanic.schedule has no option 'uuid'"),
        ((b"rm", b"a"), {"owner": 5}, b"owner must be text"),
        ((b"rm", b"a"), {"owner": "shop"}, b"only admins can change what belongs to others"),
        ((b"run", b"a"), {"uuid": "x"}, b"uuid must be 32 hex digits"),
    ],
)
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_malformed_requests(bench, server, frames, options, problem):
    status, reason = ask(bench, *frames, **options)
    assert status.startswith(b"400 " + problem)
    assert reason == b"malformed"


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_service_without_room_is_not_submitted_by_hand_either(bench, url, client):
    with serving(bench.endpoint, url, max_waiting=9, max_waiting_per_service=1):
        schedules = Schedules(client)
        for service in ("report", "other"):
            schedules.add(service, service, cron="0 2 * * *")
            schedules.run(service)
        assert ask(bench, b"run", b"report") == [
            b"429 full: 1 requests to report have not ended (--max-waiting-per-service); try again later",
            b"full",
        ]
    assert len(stored(url)["requests"]) == 2


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_schedules_go_on_when_a_clock_was_ahead(bench, url):
    ahead = time.time() + 10 * 365 * 86400
    with connected(url) as connection:
        for name, when in (("every", {"every": 1000}), ("cron", {"cron": "* * * * * *"})):
            added = parse_schedule([name.encode(), b"report", b""], when, ahead)
            store.edit_schedules(connection, [store.Edit("add", name, "", ahead, added)])
    with serving(bench.endpoint, url):
        eventually(lambda: {each["key"].partition("@")[0] for each in stored(url)["requests"]} == {"every", "cron"})


def test_without_a_titanic(client, monkeypatch):
    from zmdp.titanic.api import steps as conversation

    monkeypatch.setattr(conversation, "RESTART_SECONDS", 0.1)
    with pytest.raises(ServiceNotFound, match="nobody offers"):
        Schedules(client).ls()
