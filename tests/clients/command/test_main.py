"""`mdclient` with several brokers, with third-party brokers, and what it says when something goes wrong."""

import threading
from contextlib import contextmanager

import pytest
from click.testing import CliRunner
from support.processes import TIMEOUT_SECONDS, eventually
from support.router import Router

from zmdp.clients import Client
from zmdp.clients.command.main import cli
from zmdp.mdp.errors import RequestTimeout, WorkerLost
from zmdp.mdp.limits import Limits
from zmdp.testing import running_broker
from zmdp.workers import Worker


@contextmanager
def without_mmi():
    """A 0.2 broker that answers only `echo` and keeps the envelope.  Yields its endpoint and the messages received."""
    with Router() as router:
        asked, ended = [], threading.Event()

        def serve():
            while not ended.is_set():
                try:
                    message = router.recv(0.05)
                except AssertionError:
                    continue
                asked.append(message[1:])
                at = message.index(b"MDPC02")
                if message[at + 2] == b"echo":
                    router.send(*message[:at], b"MDPC02", b"\x02", b"echo", b"part")
                    router.send(*message[:at], b"MDPC02", b"\x03", b"echo", *message[at + 3 :])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield router.endpoint, asked
        finally:
            ended.set()
            thread.join()


def run(*arguments, **env):
    result = CliRunner().invoke(cli, arguments, standalone_mode=False, env=env)
    if result.exception is not None:
        raise result.exception
    return result.stdout_bytes


@pytest.mark.parametrize("command", ["call", "stream"])
@pytest.mark.parametrize("wait", [(), ("--wait",)], ids=["", "wait"])
def test_a_broker_that_does_not_implement_mmi(command, wait):
    # C38
    with without_mmi() as (at, asked):
        printed = run(command, "echo", "hello", "--broker", at, "--protocol", "0.2", "--timeout", "20", *wait)
        assert printed == b"part\nhello\n"
        assert [message[:3] for message in asked if message[2] == b"echo"] == [[b"MDPC02", b"\x01", b"echo"]]


def test_a_benchmark_of_a_broker_that_does_not_implement_mmi():
    # C38
    with without_mmi() as (at, _):
        speak = ("--broker", at, "--protocol", "0.2")
        assert b"errors: none" in run("bench", "echo", "hello", *speak, "--load", "sync", "--seconds", "0.1")


def test_with_an_envelope():
    # C36
    with without_mmi() as (at, asked):
        assert run("call", "echo", "hello", "--broker", at, "--protocol", "0.2", "--envelope") == b"part\nhello\n"
        assert {message[0] for message in asked} == {b""}


NOBODY = "tcp://127.0.0.1:1"


@pytest.mark.parametrize("protocol", ["X1", "0.2"])
@pytest.mark.parametrize("given", ["options", "commas", "environment", "environment with commas"])
def test_the_broker_that_answers_is_named(given, protocol):
    with running_broker() as server:
        at = server.endpoints[0]
        arguments, env = {
            "options": (["--broker", NOBODY, "--broker", at], {}),
            "commas": (["--broker", f"{NOBODY},{at}"], {}),
            "environment": ([], {"MDP_BROKER": f"{NOBODY} {at}"}),
            "environment with commas": ([], {"MDP_BROKER": f"{NOBODY}, {at}"}),
        }[given]
        limits = ["--protocol", protocol, "--timeout", "0.5", "--retries", "200"]
        assert run("services", "--json", "--broker", f"ipc:///no/such/broker,{at}") == b"[]\n"
        pings = run("ping", "--count", "2", "--interval", "0.01", *arguments, *limits, **env).decode()
        assert [line.split(": ")[0] for line in pings.splitlines() if "min" not in line] == [at, at]
        assert at in run("top", "--count", "1", *arguments, *limits, **env).decode().splitlines()[0]


@pytest.mark.parametrize(
    ("attempts", "waits", "hint"),
    [
        (1, True, "the logs of the service's workers say what they died of"),
        (1, False, "the logs of the service's workers say what they died of"),
        (2, False, "without --wait, a request does not wait for a worker to be started"),
    ],
)
def test_a_request_whose_worker_is_lost(attempts, waits, hint):
    with (
        running_broker(limits=Limits(max_attempts=attempts)) as server,
        Worker("held", broker=server.endpoints[0]) as worker,
    ):

        def lose():
            worker.recv()
            worker.close()

        thread = threading.Thread(target=lose)
        thread.start()
        with Client(server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
            eventually(lambda: client.available("held"))
        with pytest.raises(WorkerLost, match=rf"\(502\); {hint}$") as caught:
            run("call", "held", "--broker", server.endpoints[0], *(["--wait"] if waits else []))
        assert caught.value.code == 502
        thread.join()


@pytest.mark.parametrize("command", [[], *([name] for name in cli.commands)], ids=str)
def test_help_fits_a_terminal(command):
    assert max(map(len, run(*command, "--help").decode().splitlines())) <= 80


@pytest.mark.parametrize("command", ["call", "stream"])
@pytest.mark.parametrize("protocol", ["X1", "0.2"])
def test_a_timeout_says_which_options_set_it(command, protocol):
    limits = ("--timeout", "0.25", "--retries", "1")
    with running_broker() as server:
        with pytest.raises(RequestTimeout, match=r"--timeout 0\.25 × \(1 \+ --retries 1\) = 0\.5 s$") as caught:
            run(command, "nobody", "--wait", "--broker", server.endpoints[0], "--protocol", protocol, *limits)
        assert caught.value.service == "nobody"
