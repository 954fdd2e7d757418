"""The operators' commands about failed requests, and `titanic export`."""

import json
import time
from contextlib import suppress

import pytest
from support.processes import eventually, run
from support.titanics import row, serving, state

from zmdp.titanic import Titanic
from zmdp.titanic.operator.command.operators import _completed
from zmdp.titanic.operator.command.parameter_types import ServiceExpiry
from zmdp.titanic.server.outcome import Retention


@pytest.fixture
def titanic(db, in_this_process):
    """Run a command of `titanic` with this database, and return its output."""

    def titanic(*arguments):
        done = in_this_process("titanic", *arguments, TITANIC_DB=db.url)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode()

    return titanic


@pytest.fixture
def failed(db):
    """Requests that have failed for two reasons, and one that has not."""
    found = [db.done("resize", code=500, error=f"{error}\nin line 5", reply=None) for error in ("no\tmemory", "lost")]
    db.done("echo", b"\xff", reply=(b"one", b"\xfe"))
    return [each.uuid.hex for each in found]


def test_why_requests_failed(titanic, failed):
    heading, first, second = titanic("failures").splitlines()
    assert heading.split() == ["SERVICE", "COUNT", "LAST", "ERROR"]
    assert {first.split()[1], second.split()[1]} == {"1"}
    (only,) = map(json.loads, titanic("failures", "--error", "lost", "--json").splitlines())
    assert (only["service"], only["code"], only["error"], only["count"]) == ("resize", 500, "lost\nin line 5", 1)
    assert only["first"].startswith("20")


def test_those_that_failed_for_one_reason_are_retried(titanic, failed, db):
    assert len(titanic("ls", "--error", "memory", "--code", "500").splitlines()) == 2
    assert titanic("retry", "--all", "--service", "resize", "--error", "memory") == "1 retried\n"
    assert [state(db.url, uuid) for uuid in failed] == ["pending", "failed"]
    assert titanic("retry", "--all", "--code", "501") == "0 retried\n"


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_everything_is_purged_although_a_clock_was_ahead(titanic, db):
    db.done(now=time.time() + 3600)
    assert titanic("purge", "--older-than", "1s") == "0 deleted\n"
    assert titanic("purge", "--older-than", "0") == "1 deleted\n"


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_reason_alone_selects_nothing(db, in_this_process):
    done = in_this_process("titanic", "retry", "--error", "lost", TITANIC_DB=db.url)
    assert done.returncode == 2
    assert b"expected UUIDs, or --all (optionally with options that select some)" in done.stderr


@pytest.mark.parametrize("option", ["--service", "--owner", "--error"])
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_text_that_no_request_has(db, option, in_this_process):
    done = in_this_process("titanic", "ls", option, b"\xff", TITANIC_DB=db.url)
    assert (done.returncode, done.stdout) == (2, b"")
    assert f"Invalid value for '{option}': '\\udcff' is not UTF-8".encode() in done.stderr


@pytest.mark.parametrize("code", ["-1", "1000", "40000", str(10**20)])
@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_code_that_no_request_has(db, code, in_this_process):
    done = in_this_process("titanic", "failures", "--code", code, TITANIC_DB=db.url)
    assert (done.returncode, b"0<=x<=999" in done.stderr) == (2, True)


def test_a_request_as_people_read_it(titanic, db):
    uuid = db.done("echo", b"\xfe" * 1000, "größe\n".encode(), reply=(b"\xfe" * 17,)).uuid.hex
    shown = dict(line.split(maxsplit=1) for line in titanic("show", uuid).splitlines())
    assert shown["body"] == f'1000 bytes, {" ".join(["fe"] * 16)} …, "größe\\n"'
    assert shown["reply"] == f"17 bytes, {' '.join(['fe'] * 16)} …"
    assert '{"base64": "/v7+' in titanic("show", uuid, "--full")
    assert json.loads(titanic("show", uuid, "--json"))["body"][1] == "größe\n"


def test_export_as_ndjson(titanic, failed, db, tmp_path):
    rows = [json.loads(line) for line in titanic("export").splitlines()]
    assert [row["service"] for row in rows] == ["resize", "resize", "echo"]
    assert rows[0]["uuid"] == failed[0]
    assert (rows[0]["state"], rows[0]["error"], rows[0]["reply"]) == ("failed", "no\tmemory\nin line 5", None)
    assert (rows[2]["body"], rows[2]["reply"]) == ([{"base64": "/w=="}], ["one", {"base64": "/g=="}])
    assert rows[2]["created"].endswith("+00:00")
    path = tmp_path / "größe.ndjson"
    assert titanic("export", "--state", "done", "--output", str(path)) == ""
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows[2:]


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_file_appears_once_it_is_complete(titanic, failed, db, tmp_path):
    path = tmp_path / "there.ndjson"
    path.write_text("before")
    with suppress(KeyboardInterrupt), _completed(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert [each.name for each in tmp_path.glob("there*")] == ["there.ndjson"]
    assert path.read_text() == "before"
    assert titanic("export", "--service", "resize", "-o", str(path)) == ""
    assert [each.name for each in tmp_path.glob("there*")] == ["there.ndjson"]
    shown = run("titanic", "export", "--service", "resize", "-o", "/dev/stdout", TITANIC_DB=db.url)
    assert shown.stdout.decode() == path.read_text()


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_export_does_not_replace_its_own_database(titanic, failed, db, in_this_process):
    file = db.url.removeprefix("sqlite:///")
    done = in_this_process("titanic", "export", "-o", file, TITANIC_DB=db.url)
    assert (done.returncode, b"is the database that is to be exported" in done.stderr) == (2, True)
    assert titanic("export")


# ── retention ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_results_are_kept_by_service_and_outcome(bench, url, client):
    retention = Retention(100, {"resize": 10}, 1000)
    with serving(bench.endpoint, url, ttl=retention):
        worker = bench.x1_worker(b"resize")
        kept = []
        for code in (None, b"500"):
            ticket = Titanic(client).submit("resize", b"body")
            address, _ = worker.request(b"body")
            worker.error(address, code, b"broken") if code else worker.final(address, b"reply")
            eventually(ticket.ready)
            found = row(url, ticket.uuid)
            kept.append(found["expires"] - found["finished"])
    assert kept == pytest.approx([10, 1000])


@pytest.mark.parametrize(
    ("given", "taken"), [("7d", ("", 604800.0)), ("resize=90s", ("resize", 90.0)), ("a=b=1m", ("a=b", 60.0))]
)
def test_a_ttl_of_a_service(given, taken):
    assert ServiceExpiry().convert(given, None, None) == taken


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
@pytest.mark.parametrize("given", ["7", "resize=7", "resize=", "=", "resize"])
def test_invalid_ttls(given, db, in_this_process):
    done = in_this_process("titanic", "serve", "--failed-ttl", given, TITANIC_DB=db.url)
    assert done.returncode == 2
    assert b"Invalid value for '--failed-ttl'" in done.stderr
