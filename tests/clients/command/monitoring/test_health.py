"""What `mdclient health` says of brokers, and its exit codes."""

import json
import threading
from contextlib import ExitStack
from functools import partial

import pytest
from click.testing import CliRunner
from support.access import ROLES, Folder
from support.processes import TIMEOUT_SECONDS, broker, eventually, process, run
from support.router import Router

from zmdp.clients import Client
from zmdp.clients.command.main import cli
from zmdp.clients.command.monitoring.health import Check, Thresholds, checks
from zmdp.mdp.broker.io.dialer import LinkTo
from zmdp.mdp.errors import RequestTimeout
from zmdp.mdp.limits import Limits
from zmdp.testing import running_broker
from zmdp.workers import Worker


def invoke(*arguments):
    """Return the exit code and the lines that the command printed."""
    result = CliRunner().invoke(cli, ("health", *arguments), standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output.splitlines()


@pytest.fixture
def stuck():
    """A broker with a worker for `stuck` that is busy, and three requests that wait for it; yields its endpoint."""
    entered, leave = threading.Event(), threading.Event()

    def handler(request):
        entered.set()
        leave.wait()
        return b"done"

    with running_broker(limits=Limits(max_queue=100)) as server, ExitStack() as stack:
        at = server.endpoints[0]
        stack.enter_context(Worker("stuck", handler, broker=at))
        stack.callback(leave.set)
        client = stack.enter_context(Client(at, timeout=TIMEOUT_SECONDS))
        futures = [client.submit("stuck") for _ in range(4)]
        assert entered.wait(TIMEOUT_SECONDS)
        eventually(lambda: server.broker.registry.queued == 3)
        yield at
        leave.set()
        for each in futures:
            each.result()


@pytest.mark.parametrize("protocol", ["X1", "0.2", "0.1"])
def test_a_healthy_and_an_unhealthy_service(stuck, protocol):
    at = partial(invoke, "--broker", stuck, "--protocol", protocol)
    code, lines = at("stuck", "--min-workers", "1", "--max-queue", "3", "--max-age", "3600")
    assert (code, [line.split()[:3] for line in lines]) == (
        0, [["ok", "broker", "up"], ["ok", "workers", "stuck:"], ["ok", "queue", "stuck:"], ["ok", "age", "stuck:"]]
    )  # fmt: skip
    code, lines = at("stuck", "nobody", "--min-workers", "2", "--max-queue", "2", "--max-age", "0")
    assert code == 1
    assert lines[1:3] == ["FAILED  workers  stuck: 1 (at least 2)", "FAILED  queue    stuck: 3 (at most 2)"]
    assert lines[3].startswith("FAILED  age      stuck: ")
    assert lines[4:] == [
        "FAILED  workers  nobody: 0 (at least 2)",
        "ok      queue    nobody: 0 (at most 2)",
        "ok      age      nobody: 0 s (at most 0 s)",
    ]


def test_the_queues_of_all_services(stuck):
    assert invoke("--broker", stuck)[0] == 0
    assert invoke("--broker", stuck, "--max-queue", "3", "--max-age", "3600")[0] == 0
    code, lines = invoke("--broker", stuck, "--max-queue", "2")
    assert (code, lines[1:]) == (1, ["FAILED  queue    stuck: 3 (at most 2)"])
    code, lines = invoke("--broker", stuck, "--max-age", "0")
    assert (code, lines[1].split()[:3]) == (1, ["FAILED", "age", "stuck:"])


def test_as_json(stuck):
    code, (line,) = invoke("stuck", "--broker", stuck, "--max-queue", "2", "--json")
    found = json.loads(line)
    assert (code, found["ok"], found["broker"]) == (1, False, stuck)
    assert found["checks"][1:] == [
        {"check": "workers", "service": "stuck", "ok": True, "value": 1, "limit": 1, "text": "stuck: 1 (at least 1)"},
        {"check": "queue", "service": "stuck", "ok": False, "value": 3, "limit": 2, "text": "stuck: 3 (at most 2)"},
    ]


def test_a_broker_without_services():
    with running_broker() as server:
        code, lines = invoke("--broker", server.endpoints[0], "--max-queue", "0", "--max-age", "0")
        assert (code, lines[1:]) == (
            0, ["ok      queue    no services (at most 0)", "ok      age      no services (at most 0)"]
        )  # fmt: skip


def test_a_service_at_a_linked_broker():
    with running_broker(name="there") as there, Worker("echo", list, broker=there.endpoints[0]):
        with running_broker(name="here", links=[LinkTo("peer", there.endpoints[0])]) as here:
            with Client(here.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
                eventually(lambda: client.available("echo"))
            code, lines = invoke("echo", "--broker", here.endpoints[0])
            assert (code, lines[1:]) == (0, ["ok      workers  echo: at another broker, 1 hop"])
            assert invoke("echo", "--broker", here.endpoints[0], "--min-workers", "1")[0] == 1
            assert invoke("echo", "--broker", here.endpoints[0], "--min-workers", "1", "--on", "there")[0] == 0


def test_a_draining_broker():
    with broker("--drain-timeout", "60") as (running, at), Worker("held", broker=at) as worker:
        with Client(at, timeout=TIMEOUT_SECONDS) as client:
            future = client.submit("held")
            worker.recv()
            with process("mdclient", "health", "--broker", at) as early:
                assert early.wait() == 0
            running.send_signal(15)
            running.line("draining: no new requests")
            code, lines = invoke("held", "--broker", at)
            assert (code, lines) == (1, [
                "FAILED  broker   is draining: it takes no more requests", "ok      workers  held: 1 (at least 1)"
            ])  # fmt: skip
            worker.recv([b"done"], timeout=0)
            future.result()


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--broker", "tcp://127.0.0.1:1", "--timeout", "0.3"], 5, "within 0.3 s: nothing is listening there"),
        (["--min-workers", "2"], 2, "--min-workers needs a SERVICE"),
        (["--max-age", "-1"], 2, "expected a number of seconds (0 or more)"),
    ],
)
def test_exit_codes(arguments, code, told):
    def ended():
        result = run("mdclient", "health", *arguments)
        *_, line = result.stderr.decode().splitlines()
        assert (result.returncode, result.stdout) == (code, b"")
        return told in line  # the time may be over before it knows that

    eventually(ended)


def test_a_broker_that_does_not_answer():
    with Router() as router:
        with pytest.raises(RequestTimeout, match=r"the limit was --timeout 0\.2"):
            invoke("--broker", router.endpoint, "--protocol", "0.2", "--timeout", "0.2")


# ── brokers that tell less ───────────────────────────────────────────────────────────────────────────────────────────


def answering(**answers):
    return lambda service, body: answers.get(service.removeprefix("mmi."), b"501")


@pytest.mark.parametrize(
    ("answer", "minimum", "expected"),
    [
        (b"200", None, Check("workers", "echo", ok=True, value=None, limit=1, text="echo: offered")),
        (b"404", None, Check("workers", "echo", ok=False, value=0, limit=1, text="echo: no worker offers it")),
        (b"200", 2, Check("workers", "echo", ok=False, value=None, limit=2,
                          text="echo: unknown: the broker does not tell")),
        (b"501", None, Check("workers", "echo", ok=False, value=None, limit=1,
                             text="echo: unknown: the broker does not tell")),
    ],
)  # fmt: skip
def test_a_third_party_broker(answer, minimum, expected):
    found = list(checks(answering(service=answer), ["echo"], Thresholds(minimum)))
    assert found == [Check("broker", None, ok=True, value=None, limit=None, text="answers"), expected]


def test_what_a_broker_does_not_tell_fails():
    for services in ([], ["echo"]):
        found = list(checks(answering(service=b"200"), services, Thresholds(None, 1, 2.5)))
        assert [(each.check, each.limit) for each in found if not each.ok] == [("queue", 1), ("age", 2.5)]


def test_every_page_is_read():
    pages = {
        b"": {"services": [{"name": "a", "queued": 1, "oldest_seconds": 0.0}], "next": b"a".hex()},
        b"a": {"services": [{"name": "b", "queued": 2, "oldest_seconds": 0.0}], "next": None},
    }

    def question(service, body):
        return json.dumps(pages[body]).encode() if service == "mmi.metrics" else b"501"

    _, queue = checks(question, [], Thresholds(max_queue=1))
    assert queue == Check("queue", "b", ok=False, value=2, limit=1, text="b: 2 (at most 1)")


def test_a_role_that_may_ask_about_services_only(tmp_path):
    folder = Folder(tmp_path)
    folder.write(ROLES + '\n[roles.probe]\nkeys = ["stranger.key"]\ncall = ["echo"]\nmmi = "service"\n')
    with folder.broker() as server, Worker("echo", list, broker=server.endpoints[0], **folder.settings("resizer")):
        at = (server.endpoints[0], *folder.options("stranger"))
        eventually(lambda: invoke("echo", "--broker", *at)[0] == 0)
        assert invoke("echo", "--broker", *at)[1] == [
            "ok      broker   answers", "ok      workers  echo: 1 (at least 1)"
        ]  # fmt: skip
        assert invoke("echo", "--broker", *at, "--max-age", "1")[0] == 1
