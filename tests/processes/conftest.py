"""Fixtures for the tests of the commands."""

import io
import sys
from importlib.metadata import entry_points
from subprocess import CompletedProcess

import pytest


@pytest.fixture
def in_this_process(monkeypatch, capsysbinary):
    """`in_this_process(command, *arguments, **env)` runs an installed command without the cost of a new process."""

    def call(command, *arguments, stdin=b"", **env):
        (entry_point,) = entry_points(group="console_scripts", name=command)
        main = entry_point.load()
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", [command, *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsysbinary.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return CompletedProcess([command, *arguments], ended.value.code, *capsysbinary.readouterr())

    return call
