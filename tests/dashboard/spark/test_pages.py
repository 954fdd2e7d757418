"""The pages of Spark, with the control services of real drivers, whose answers the tests choose."""

import json
import time
from contextlib import ExitStack
from dataclasses import asdict

import pytest
from support import browser as browsers
from support.processes import eventually
from support.screen import Screen
from support.web import form_token, serving, web_broker

from zmdp.dashboard.spark.drivers import MAX_ANSWER_BYTES, url
from zmdp.mdp.errors import ServiceError
from zmdp.mdp.program.control_services import SPARK
from zmdp.spark.batch.progress import Progress
from zmdp.spark.drivers import control_service

MARKUP = "<b>bold</b> & <script>document.title='x'</script>"


def job(name, **more):
    progress = Progress(stages=4, stages_done=1, tasks=200, tasks_done=50, tasks_running=4, rows_read=12345)
    return {
        "job": name, "user": "shop", "what": "SELECT 1", "seconds": 12.5, "state": "running",
        **asdict(progress), **more,
    }  # fmt: skip


def slot(number, state="serving"):
    return {
        "slot": number, "state": state, "host": f"node-{number}", "pid": 100 + number, "executor": str(number),
        "served": 10, "since": 1.0,
    }  # fmt: skip


class Drivers:
    """A batch and a fleet, and what was asked of them."""

    def __init__(self, broker):
        self.broker = broker
        self.asked = 0
        self.begin()

    def begin(self):
        """Begin anew, for another test."""
        self.cancelled = []
        self.batch = {
            "kind": "batch", "name": "nightly", "version": "1", "master": "spark://one:7077", "draining": False,
            "services": ["spark.sql", "spark.job"], "tables": ["people"], "jobs": ["older"], "done": 7, "failed": 2,
            "running": [job("job-1"), job("job-2", what=MARKUP, tasks_done=199)], "cancelled": 1,
            "ui": "http://one:4040",
        }  # fmt: skip
        self.fleet = {
            "kind": "fleet", "name": "resizers", "service": "images.resize", "handler": "images:resize",
            "master": "local[4]", "draining": False, "slots": [slot(1), slot(2, "starting")], "wanted": 3, "min": 1,
            "max": 8, "queued": 40, "failures": 1, "last_error": None, "ui": "javascript:alert(1)",
        }  # fmt: skip

    def _status(self, arguments, request):
        self.asked += 1
        return self.batch

    def _cancel(self, arguments, request):
        if arguments["job"] == "refused":
            raise ServiceError(403, "it belongs to somebody else")
        self.cancelled.append((arguments["job"], request.user, request.admin))
        self.batch["running"] = [each for each in self.batch["running"] if each["job"] != arguments["job"]]
        return {"cancelled": True}

    def __enter__(self):
        with ExitStack() as stack:
            catalogue = {
                "tables": [{"name": "people", "format": "parquet"}], "catalogs": ["lake"],
                "jobs": [
                    {"name": "older", "description": f"{MARKUP}\nmore", "parameters": "than: int, limit: int = 10"}
                ],
            }  # fmt: skip
            operations = {"status": self._status, "cancel": self._cancel, "catalogue": lambda *_: catalogue}
            stack.enter_context(control_service("nightly", operations, broker=self.broker.endpoint))
            stack.enter_context(
                control_service("resizers", {"status": lambda *_: self.fleet}, broker=self.broker.endpoint)
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception):
        self._stack.close()


@pytest.fixture(scope="module")
def broker():
    with web_broker() as broker:
        yield broker


@pytest.fixture(scope="module")
def running(broker):
    with Drivers(broker) as drivers:
        yield drivers


@pytest.fixture
def drivers(broker, running):
    running.begin()
    eventually(lambda: {"nightly", "resizers", "job-1"} <= set(broker.text_of("/spark").split()))
    return running


def test_without_drivers_the_page_names_the_next_step(broker):
    eventually(lambda: "mdp-spark batch" in broker.get("/spark").text)


def test_batches_fleets_and_jobs(broker, drivers):
    broker.shows(
        "/spark", "job-1", "SELECT 1", "50 / 200", "1 / 4", "spark://one:7077", "images:resize", "3 of 1–8", "local[4]"
    )
    link = '<a href="http://one:4040" target="_blank" rel="noopener noreferrer">Open</a>'
    html = eventually(lambda: link in (page := broker.get("/spark").text) and page)
    assert "javascript:" not in html
    assert "<b>" not in html
    assert "<script>document" not in html
    found = eventually(lambda: "job-2" in (page := broker.get("/spark?q=BOLD").text) and page)
    assert "job-1" not in found
    broker.shows("/spark/fleet?name=resizers", "node-1", "101", "serving", "starting", "20")
    assert broker.get("/spark/fleet?name=none").status_code == 404


def test_the_catalogue_of_a_batch(broker, drivers):
    assert 'href="/spark/batch?name=nightly"' in broker.get("/spark").text
    broker.shows(
        "/spark/batch?name=nightly", "people", "parquet", "lake.NAMESPACE", "older", "than: int, limit: int = 10"
    )
    html = broker.get("/spark/batch?name=nightly").text
    assert "&lt;b&gt;bold" in html
    assert "more" not in html
    broker.shows("/spark/batch?name=resizers", "does not tell its catalogue")
    assert broker.get("/spark/batch?name=none").status_code == 404


def test_cancelling_a_job(broker, drivers):
    with broker.client(follow_redirects=True) as http:
        token = form_token(http.get("/spark").text)
        shown = http.post("/spark/cancel", data={"form_token": token, "batch": "nightly", "job": "job-1"})
        assert "The job was cancelled" in shown.text
        assert drivers.cancelled == [("job-1", "", False)]
        eventually(lambda: "job-1" not in http.get("/spark").text)
        for batch, name in (("nightly", "refused"), ("resizers", "job-2"), ("none", "job-2")):
            shown = http.post("/spark/cancel", data={"form_token": token, "batch": batch, "job": name})
            assert "may still run" in shown.text
        assert http.post("/spark/cancel", data={"batch": "nightly", "job": "job-2"}).status_code == 403
        assert len(drivers.cancelled) == 1


def test_drivers_are_asked_only_while_somebody_looks(broker, drivers):
    asked = drivers.asked
    for _ in range(3):
        last = broker.get("/metrics").text
        eventually(lambda last=last: broker.get("/metrics").text != last)  # another snapshot was taken
    assert drivers.asked <= asked + 1  # a question may have been on its way
    asked, began = drivers.asked, time.monotonic()
    for number in range(20):
        broker.get(f"/spark?q={number}")
    eventually(lambda: drivers.asked > asked)
    assert drivers.asked <= asked + 2 + 2 * (time.monotonic() - began)


HOSTILE = [
    b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"kind": 1}', b'{"kind": "other"}',
    b'{"a": "' + b"x" * MAX_ANSWER_BYTES + b'"}',
    json.dumps({"kind": "batch", "running": [None, 1, {"job": {}}, {"seconds": "x", "tasks": -1, "user": []}],
                "services": 7, "done": "many", "failed": 1e999, "ui": ["http://x"], "master": MARKUP}).encode(),
    json.dumps({"kind": "batch", "name": "\ud800\u202e\x00" + MARKUP, "master": "\ud800\u202e\x00",
                "running": [{"job": MARKUP * 10, "what": "\ud800", "rows_read": 10**300, "tasks": True}] * 1100}
               ).encode(),
    json.dumps({"kind": "fleet", "slots": {"a": 1}, "service": None, "queued": -5, "last_error": MARKUP}).encode(),
    json.dumps({"kind": "fleet", "slots": [{"slot": "1", "host": 5, "executor": MARKUP}], "ui": "http://[x"}).encode(),
]  # fmt: skip


def test_hostile_answers_are_shown_as_text_or_not_at_all(broker):
    with ExitStack() as stack:
        for number, answer in enumerate(HOSTILE):
            stack.enter_context(serving(broker.endpoint, f"{SPARK}hostile-{number}", lambda request, it=answer: it))
        names = {f"hostile-{number}" for number in range(len(HOSTILE))}
        eventually(
            lambda: names <= set((page := broker.text_of("/spark")).split()) and "it has not answered yet" not in page
        )
        page = eventually(lambda: "&lt;b&gt;bold" in (page := broker.get("/spark")).text and page)
        assert page.status_code == 200
        assert "its answer is not a JSON object" in page.text
        assert "<b>bold" not in page.text
        assert "\u202e" not in page.text
        for name in names:
            assert broker.get(f"/spark/fleet?name={name}").status_code == 200
            assert broker.get(f"/spark/batch?name={name}").status_code == 200
    assert "Traceback" not in broker.process.stderr


def endless(request):
    while not request.cancelled:
        yield bytes(1000)


def test_a_stream_without_end_is_not_followed(broker):
    with serving(broker.endpoint, f"{SPARK}endless", endless):
        eventually(lambda: "not one frame of JSON" in broker.text_of("/spark"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://one:4040/jobs?id=1", True),
        ("https://one", True),
        ("HTTP://one", True),
        ("javascript:alert(1)//http://one", False),
        ("http://", False),
        ("//one", False),
        ("http://user:secret@one", False),
        ("http://one two", False),
        ("http://one/\n", False),
        ("http://[one", False),
        ("http://" + "x" * 3000, False),
        (["http://one"], False),
        (None, False),
    ],
)
def test_links_go_to_http_only(given, expected):
    assert url(given) == (given if expected else "")


@pytest.mark.skipif(browsers.PROGRAM is None, reason="needs the browser Chromium: apt-get install chromium")
def test_in_a_browser(broker, drivers, tmp_path):
    with browsers.browser(tmp_path) as page:
        screen = Screen(page, tmp_path)
        screen.open(f"{broker.url}spark")
        eventually(lambda: screen.texts("#live") == ["live"] and len(screen.texts("tr[id^=job-]")) == 2)
        screen.script("window.loaded = 'once'")
        drivers.batch["running"][0]["tasks_done"] = 150
        eventually(lambda: screen.script("return document.querySelector('tr[id$=job-1] progress').value") == 150)
        assert screen.script("return window.loaded") == "once"
        assert MARKUP in screen.text
        screen.screenshot("spark-light")
        screen.scheme("dark")
        screen.screenshot("spark-dark")
        screen.size(390, 844)
        for path in ("spark", "spark/fleet?name=resizers", "spark/batch?name=nightly"):
            screen.open(broker.url + path)
            eventually(lambda: screen.texts("#live") == ["live"])
            assert screen.script("return document.documentElement.scrollWidth <= 390"), path
            screen.screenshot(f"{path.partition('?')[0].replace('/', '-')}-narrow-dark")
        screen.size(1280, 900)
        screen.open(f"{broker.url}spark")
        eventually(lambda: screen.texts("#live") == ["live"])
        screen.click("tr[id$=job-1] summary")
        screen.click("tr[id$=job-1] button.danger")
        eventually(lambda: "The job was cancelled" in screen.text)
        assert drivers.cancelled[0][0] == "job-1"
        assert screen.complaints() == []
