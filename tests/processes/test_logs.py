"""The lines about a request, from its client through the broker to its worker, and through Titanic."""

import json
import re
from contextlib import ExitStack

import pytest
from support.processes import TIMEOUT_SECONDS, broker, process, run

from zmdp.clients import Client
from zmdp.titanic import Titanic

HANDLERS = """
import logging
from zmdp.workers import ServiceError
log = logging.getLogger("shop")

def fail(request):
    log.warning("this will fail", extra={"tenant": "a"})
    raise ServiceError(422, "as it should")
"""


def lines(running):
    """Return what a process has logged in JSON, by message."""
    found = [json.loads(line) for line in running.stderr.splitlines()]
    return {line["message"]: line for line in found}


@pytest.fixture
def system(tmp_path):
    """A broker that finds every request slow, and a worker whose handler fails."""
    (tmp_path / "handlers.py").write_text(HANDLERS)
    with ExitStack() as stack:
        running, endpoint = stack.enter_context(broker("--log-format", "json", "--slow", "0.000001"))
        worker = stack.enter_context(
            process(
                "mdworker", "handlers:fail", "--service", "fail", "--broker", endpoint, cwd=tmp_path,
                MDP_LOG_FORMAT="json",
            )
        )  # fmt: skip
        worker.line("fail: serving at ")
        yield running, worker, endpoint


def test_lines_about_a_request_have_its_id(system):
    running, worker, endpoint = system
    called = run("mdclient", "call", "fail", "--verbose", "--broker", endpoint)
    told, error = called.stderr.decode().splitlines()
    assert called.returncode == 6
    assert "as it should" in error
    name = re.fullmatch("request-id: ([0-9a-f]{32})", told)[1]
    running.line("slow request for service fail")
    worker.line("the handler failed with 422")
    about = [
        line for process in (running, worker) for line in lines(process).values() if line.get("request_id") == name
    ]
    assert [(line["logger"], line["level"], line["service"]) for line in about] == [
        ("zmdp.broker", "WARNING", "fail"),
        ("shop", "WARNING", "fail"),
        ("zmdp.worker", "INFO", "fail"),
    ]
    assert [line["pid"] for line in about] == [running.pid, worker.pid, worker.pid]
    assert about[1]["tenant"] == "a"


def test_a_caller_names_its_request(system):
    running, worker, endpoint = system
    called = run("mdclient", "stream", "fail", "-v", "--header", "request-id=order 7", "--broker", endpoint)
    assert called.stderr.decode().splitlines()[0] == "request-id: order 7"
    assert json.loads(worker.line("this will fail"))["request_id"] == "order?7"
    assert json.loads(running.line("slow request"))["request_id"] == "order?7"


def test_without_a_name_the_broker_and_the_worker_show_the_same_id(system):
    running, worker, endpoint = system
    run("mdclient", "call", "fail", "--broker", endpoint)
    ids = {json.loads(line)["request_id"] for line in (worker.line("this will fail"), running.line("slow request"))}
    assert len(ids) == 1
    assert ids.pop().isdigit()


def test_titanic_names_a_request_by_its_uuid(system, tmp_path):
    running, worker, endpoint = system
    with process("titanic", "serve", "--db", f"{tmp_path}/titanic.db", "--broker", endpoint) as titanic:
        titanic.line("serving ")
        with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
            uuid = Titanic(client).submit("fail", retries=1, backoff=3600).uuid
        assert json.loads(worker.line("this will fail"))["request_id"] == uuid
        assert json.loads(running.line("slow request for service fail"))["request_id"] == uuid
        line = titanic.line("retrying in ")
    assert re.fullmatch(rf"\S+ INFO zmdp\.titanic\[{titanic.pid}\]: {uuid}: .*422.*; retrying in .*", line)


def test_older_protocols_carry_no_id():
    called = run("mdclient", "call", "echo", "-v", "--protocol", "0.2", "--broker", "tcp://127.0.0.1:1")
    assert called.returncode == 2
    assert "--verbose requires protocol X1" in called.stderr.decode()


@pytest.mark.parametrize(
    ("command", "environment", "code", "text"),
    [
        ("mdp-broker --bind tcp://0.0.0.0:5555 --log-format json", {}, 1, "refused to listen on tcp://0.0.0.0:5555"),
        ("mdp-broker --access nothing.toml", {"MDP_LOG_FORMAT": "json"}, 2, "nothing.toml"),
        ("mdworker nothing:worker --log-format json", {}, 2, "cannot use nothing:worker"),
    ],
)
def test_an_error_that_ends_a_command_has_the_format_of_its_log(in_this_process, command, environment, code, text):
    name, *arguments = command.split()
    ended = in_this_process(name, *arguments, **environment)
    (line,) = ended.stderr.splitlines()
    error = json.loads(line)
    assert (ended.returncode, error["level"], error["logger"]) == (code, "ERROR", name)
    assert text in error["message"]


def test_errors_in_the_usage_are_text(in_this_process):
    ended = in_this_process("mdp-broker", "--nonsense", MDP_LOG_FORMAT="json")
    assert b"\nError: No such option '--nonsense'" in ended.stderr
