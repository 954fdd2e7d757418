"""What the client commands show, without Spark."""

import json
from contextlib import closing
from pathlib import Path

from support.processes import process, run
from support.sparks import BEATS
from support.titanics import serving

from zmdp.spark.batch import fetching
from zmdp.spark.batch.job_history import History
from zmdp.spark.command import status
from zmdp.spark.drivers import control_service
from zmdp.workers import Worker


def test_the_status_of_a_slot_that_has_not_started():
    slot = {"slot": 0, "state": "starting", "host": None, "pid": None, "executor": None, "served": 0}
    fleet = {
        "kind": "fleet", "name": "f", "master": "local[2]", "service": "s", "handler": "m:f", "min": 1, "max": 2,
        "queued": None, "slots": [slot, slot | {"state": "serving", "host": "a", "pid": 7}],
    }  # fmt: skip
    assert list(status._status_lines(fleet)) == [
        "fleet f on local[2]: s by m:f; 2 slots of 1 to 2, the broker does not tell its queue",
        "  slot 0  starting  not started  0 served",
        "  slot 0  serving  on a pid 7  0 served",
    ]
    job = {
        "job": "1",
        "what": None,
        "user": "",
        "tasks": 2,
        "tasks_done": 1,
        "stages": 1,
        "stages_done": 0,
        "seconds": 3,
        "state": "cancelling",
    }
    batch = {"kind": "batch", "name": "b", "master": "m", "services": [], "done": 0, "failed": 0, "cancelled": 0}
    _, line = status._status_lines(batch | {"running": [job]})
    assert line.endswith("3 s  cancelled, but still runs: a job")


def test_submit_waits_for_a_batch_that_starts(endpoint):
    def reply(request):
        return [b'{"format": "value", "path": null}', request[0]]

    with process("mdp-spark", "submit", "sql", "SELECT 1", "--wait", "--broker", endpoint) as waiting:
        waiting.line(f"no batch offers 'spark.sql' at {endpoint} yet; waiting for one")
        with Worker("spark.sql", reply, broker=endpoint, **BEATS):
            waiting.line("SELECT 1", "stdout")
            assert waiting.wait() == 0
    done = run("mdp-spark", "submit", "sql", "SELECT 1", "--broker", endpoint)
    assert done.returncode == 4
    assert b"start one with `mdp-spark batch`, or use --wait" in done.stderr


def test_arguments_are_json_and_otherwise_strings(endpoint):
    def reply(request):
        return [b'{"format": "value", "path": null}', request[1]]

    given = {"i": "123456789012345678901", "n": "NaN", "f": "-Infinity", "l": "[1.5, null]", "s": "{", "q": '"1"'}
    options = [each for name, text in given.items() for each in ("--arg", f"{name}={text}")]
    with Worker("spark.job", reply, broker=endpoint, **BEATS):
        done = run("mdp-spark", "submit", "job", "x", *options, "--broker", endpoint)
        assert json.loads(done.stdout) == {
            "i": 123456789012345678901, "n": "NaN", "f": "-Infinity", "l": [1.5, None], "s": "{", "q": "1"
        }  # fmt: skip


def test_a_key_belongs_to_one_request(endpoint, tmp_path):
    options = ("--durable", "--detach", "--idempotency-key", "k", "--broker", endpoint)
    with serving(endpoint, str(tmp_path / "t.db"), **BEATS):
        first = run("mdp-spark", "submit", "job", "older", "--arg", "than=3", *options)
        again = run("mdp-spark", "submit", "job", "older", "--arg", "than=3", *options)
        assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
        other = run("mdp-spark", "submit", "job", "older", "--arg", "than=4", "--arg", "limit=1", *options)
        uuid = first.stdout.decode().strip()
        assert (other.returncode, other.stdout) == (2, b"")
        assert other.stderr.decode().splitlines() == [
            f"mdp-spark: --idempotency-key k: it belongs to request {uuid}, which differs: than is 4, and was 3; "
            "limit is 1, and was None"
        ]


def test_a_large_value_is_fetched_as_json_only(endpoint, tmp_path):
    (tmp_path / "value.json").write_text('{"a": 1}')
    output = tmp_path / "out"
    with closing(History(Path(":memory:"), "batch")) as records:
        records.begin("a", user="", service="job", what="value()")
        records.end("a", "done", format="value", path=str(tmp_path / "value.json"))
        operations = {"history": lambda arguments, request: {"jobs": records.rows(request, arguments["job"])}}
        fetch = Worker("spark.fetch.batch", lambda request: fetching.handle(request, records), broker=endpoint, **BEATS)
        with control_service("batch", operations, broker=endpoint), fetch:
            for format_ in ("csv", "arrow"):
                options = ("--format", format_, "--output", str(output), "--broker", endpoint)
                done = run("mdp-spark", "fetch", "a", *options)
                assert (done.returncode, done.stderr) == (2, b"mdp-spark: job a returned a value: use --format json\n")
                assert not output.exists()
            done = run("mdp-spark", "fetch", "a", "--output", str(output), "--broker", endpoint)
            assert done.stderr.decode() == f"wrote a value to {output}\n"
    assert output.read_text() == '{"a": 1}'
