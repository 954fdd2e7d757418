"""What a shell is told to complete."""

import subprocess
from contextlib import ExitStack

import pytest
from support.access import Folder
from support.processes import TIMEOUT_SECONDS, eventually

from zmdp.clients.console import completion
from zmdp.clients.console.completion import COMMANDS
from zmdp.testing import free_endpoint, running_broker
from zmdp.workers import Worker


@pytest.fixture
def completed(in_this_process, monkeypatch):
    """`completed(*words)` returns what may follow the words; the last one is incomplete."""
    monkeypatch.setattr(completion, "ANSWER_SECONDS", TIMEOUT_SECONDS)

    def ask(command, *words, **env):
        monkeypatch.setenv("COMP_WORDS", " ".join((command, *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        monkeypatch.setenv(f"_{command.upper()}_COMPLETE", "bash_complete")
        done = in_this_process(command, **env)
        monkeypatch.delenv(f"_{command.upper()}_COMPLETE")
        return [line.partition(",")[2] for line in done.stdout.decode().split()]

    return ask


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("mdclient", ("call",)),
        ("titanic", ("request",)),
    ],
)
def test_services_are_those_of_the_broker(command, words, completed):
    with ExitStack() as stack:
        (at,) = stack.enter_context(running_broker()).endpoints
        for name in ("echo", "etch", "other"):
            worker = stack.enter_context(Worker(name, list, broker=at))
            eventually(lambda worker=worker: worker.registered)
        assert set(completed(command, *words, "e", MDP_BROKER=at)) == {"echo", "etch"}
        assert set(completed(command, *words, "--broker", at, "ec", MDP_BROKER=free_endpoint())) == {"echo"}


def test_services_of_a_broker_that_admits_known_keys_only(completed, tmp_path):
    access = Folder(tmp_path)
    with access.broker() as server:
        (at,) = server.endpoints
        with Worker("echo", list, broker=at, **access.settings("resizer")) as worker:
            eventually(lambda: worker.registered)
            keys = {"MDP_BROKER": at, "MDP_BROKER_KEY": str(tmp_path / "broker.key")}
            assert completed("mdclient", "call", "", **keys, MDP_KEY=str(tmp_path / "driver.key_secret")) == ["echo"]
            assert completed("mdclient", "call", "", **keys, MDP_KEY=str(tmp_path / "missing")) == []


def test_without_a_broker_nothing_is_completed_and_nobody_waits(completed, monkeypatch):
    monkeypatch.setattr(completion, "ANSWER_SECONDS", 0.01)
    assert completed("mdclient", "call", "", MDP_BROKER=free_endpoint()) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_name_every_command(shell, in_this_process):
    script = in_this_process("mdclient", "completion", shell).stdout.decode()
    for command in COMMANDS:
        assert f"_{command.replace('-', '_').upper()}_COMPLETE={shell}_complete" in script


def test_bash_accepts_the_script_and_completes(in_this_process, tmp_path):
    script = in_this_process("mdclient", "completion", "bash").stdout.decode()
    done = subprocess.run(
        ["bash", "-c", f"{script}\ncomplete -p mdclient titanic"], check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [
        f"complete -o nosort -F _{name}_completion {name}" for name in ("mdclient", "titanic")
    ]


@pytest.mark.parametrize("command", ["mdclient", "mdworker"])
def test_a_command_without_arguments_teaches(command, in_this_process):
    done = in_this_process(command)
    told = done.stdout + done.stderr  # from Click 8.2 on, it is an error
    assert told == in_this_process(command, "--help").stdout
    for line in ("mdp-broker", "mdworker zmdp.workers.examples:echo", "mdclient call"):
        assert line in told.decode()
