"""The command `mdp-gateway` in this process."""

import sys

import pytest


@pytest.fixture
def in_process(monkeypatch, capsys):
    """Run the command without the cost of a new process; return exit code, stdout and stderr."""
    from zmdp.clients.gateways.cli import main

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["mdp-gateway", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return call
