"""The commands with keys, at a broker with an access file."""

import re
import signal
from functools import partial

import pytest
from support.access import Folder
from support.processes import broker, process

BEATS = ("--heartbeat", "0.2", "--liveness", "50")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("access"))


@pytest.fixture(scope="module")
def endpoint(folder):
    with (
        broker("--access", str(folder.access), *BEATS) as (_, endpoint),
        process("mdworker", "zmdp.workers.examples:echo", "--processes", "2", *BEATS, *folder.options("resizer"),
                MDP_BROKER=endpoint) as worker,
        process("titanic", "serve", "--db", str(folder.path / "titanic.db"), *BEATS,
                MDP_BROKER=endpoint, **folder.environment("titanic")) as titanic,
    ):  # fmt: skip
        worker.line("echo: serving at ", count=2)
        titanic.line("titanic.close: serving at ")
        yield endpoint
        titanic.end()
        worker.end()
        assert "ERROR" not in titanic.stderr + worker.stderr


@pytest.fixture
def call(in_this_process, endpoint):
    """Run a command in this process, with the broker in its environment."""
    return partial(in_this_process, MDP_BROKER=endpoint)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("call", "echo", "hello"), b"hello"),
        (("stream", "echo", "hello"), b"hello\n"),
        (("call", "echo", "hello", "--protocol", "0.2"), b"hello"),
        (("call", "echo", "hello", "--protocol", "0.1"), b"hello"),
        (("services",), b"echo"),
        (("info",), b"requests"),
        (("ping", "--count", "1"), b" ms\n"),
        (("bench", "echo", "--seconds", "0.1"), b"errors: none"),
        (("bench", "echo", "--seconds", "0.1", "--load", "sync"), b"errors: none"),
        (("top", "--count", "1"), b"echo"),
    ],
)
def test_mdclient(call, folder, arguments, expected):
    result = call("mdclient", *arguments, *folder.options("operator"))
    assert (result.returncode, expected in result.stdout) == (0, True), result


def test_titanic(call, folder):
    keys = folder.environment("shop")
    result = call("titanic", "request", "echo", "hello", "--idempotency-key", "once", **keys)
    uuid = result.stdout.decode().strip()
    assert re.fullmatch("[0-9a-f]{32}", uuid), result
    assert call("titanic", "reply", uuid, "--wait", **keys).stdout == b"hello\n"
    assert call("titanic", "close", uuid, *folder.options("shop")).returncode == 0
    assert call("titanic", "reply", uuid, **keys).returncode == 4


@pytest.mark.parametrize(
    "command",
    [
        ("mdclient", "call", "echo"),
        ("mdclient", "services"),
        ("mdclient", "bench", "echo"),
        ("titanic", "request", "echo"),
        ("mdp-spark", "status"),
        ("mdp-spark", "cancel", "x"),
        ("mdp-spark", "drain", "x"),
        ("mdp-spark", "submit", "sql", "SELECT 1"),
    ],
)
def test_a_refusal_is_explained_at_once(call, folder, command):
    for options, text in (
        ((), b"pass --key and --broker-key"),
        (folder.options("stranger"), b"the broker refuses this key"),
        (folder.options("shop", "stranger"), b"its public key is not"),
    ):
        result = call(*command, *options)
        assert (result.returncode, text in result.stderr, result.stdout) == (5, True, b""), result
        assert result.stderr.count(b"\n") == 1


def test_keys_that_cannot_be_used(call, folder):
    shop, public = str(folder.path / "shop.key_secret"), str(folder.path / "broker.key")
    for options, text in (
        (("--key", shop), b"add --broker-key"),
        (("--broker-key", public), b"add --key"),
        (("--key", public, "--broker-key", public), b"is a public certificate"),
        (("--key", shop, "--broker-key", "x"), b"nor is this a public key"),
    ):
        result = call("mdclient", "ping", *options)
        assert (result.returncode, text in result.stderr) == (2, True), result


def test_a_role_that_may_not_call_the_service(call, folder):
    result = call("mdclient", "call", "echo", *folder.options("resizer"))
    assert (result.returncode, result.stdout) == (1, b"")
    assert b"service 'echo': role resizer may not call it" in result.stderr


@pytest.mark.parametrize("command", [("mdworker", "zmdp.workers.examples:echo"), ("titanic", "serve", "--db")])
def test_a_service_that_is_refused_logs_why_and_keeps_trying(endpoint, folder, tmp_path, command):
    database = [str(tmp_path / "titanic.db")] if command[-1] == "--db" else []
    with process(*command, *database, *BEATS, *folder.options("stranger"), MDP_BROKER=endpoint) as running:
        running.line("the broker refuses this key", count=2)
        assert running.poll() is None
        assert running.end(signal.SIGTERM) == 0
