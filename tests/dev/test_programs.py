"""Which programs `zmdp dev` runs, and how it shows what they say."""

import os
import socket
import sys

import pytest

from zmdp.dev.programs import BROKER_PORT, HOST, MAX_PORTS, Choice, plan, procfile
from zmdp.dev.runner import Log


def words(made):
    return {each.name: each.words[1:] for each in made.programs}


def test_each_program_can_be_left_out():
    made = plan(Choice(["a:b"], titanic=False, gateway=False, dashboard=False))
    assert [*words(made)] == ["broker", "worker"]
    assert "--http" not in words(made)["broker"]
    made = plan(Choice(["a:b", "c:d"], broker=False))
    assert [*words(made)] == ["worker", "titanic", "gateway"]
    assert made.endpoint is None
    assert [name for name, given in words(made).items() if "--broker" in given] == []
    assert words(made)["worker"][:2] == ["a:b", "c:d"]


def test_without_the_extras(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    made = plan(Choice(["a:b"]))
    assert [*words(made)] == ["broker", "worker", "titanic"]
    assert not {"--http", "--reload"} & {*words(made)["broker"], *words(made)["worker"]}
    told = "\n".join(made.missing)
    assert "[web]" in told
    assert "[reload]" in told


def test_a_port_that_is_taken_is_passed_over():
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for port in range(BROKER_PORT, BROKER_PORT + MAX_PORTS):
            try:
                taken.bind((HOST, port))
                taken.listen()
            except OSError:
                continue
            break
        assert int(plan(Choice(["a:b"])).endpoint.rpartition(":")[2]) > port


def test_arguments_are_quoted_for_a_shell():
    assert procfile(plan(Choice(["a b:c"])).programs).splitlines()[1].count("'a b:c'") == 1


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, "\x1b[36mzmdp   |\x1b[0m one\r\n\x1b[32mworker |\x1b[0m two"),
        ({"NO_COLOR": "1"}, "zmdp   | one\r\nworker | two"),
    ],
)
def test_names_have_colours_on_a_terminal(environment, shown, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream, os.fdopen(master, "rb", buffering=0) as terminal:
        log = Log(["worker"], stream)
        log.say("zmdp", "one")
        log.say("worker", "two")
        assert (terminal.readline() + terminal.readline()).decode().rstrip() == shown
