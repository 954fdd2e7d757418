"""`mdclient limit` with a real broker."""

import click
import pytest
from click.testing import CliRunner
from support.processes import TIMEOUT_SECONDS, eventually

from zmdp import Client
from zmdp.clients import SettingError
from zmdp.clients.command.main import cli
from zmdp.testing import running_broker
from zmdp.workers import Worker


def limit(at, *arguments):
    """Return what `mdclient limit echo` prints."""
    result = CliRunner().invoke(cli, ["limit", "echo", "--broker", at, *arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_limits_are_shown_set_and_lifted():
    with running_broker() as server, Client(at := server.endpoints[0], timeout=TIMEOUT_SECONDS) as client:
        assert limit(at) == "echo: no limit\n"
        said = "echo: 4 at once, 200/min; per group 1 at once (set by the operator)\n"
        assert limit(at, "--concurrency", "4", "--rate", "200/min", "--group-concurrency", "1") == said
        with pytest.raises(click.UsageError, match="leave out the others, or --lift"):
            limit(at, "--lift", "--rate", "1/s")
        with pytest.raises(SettingError, match="rate is 'fast'"):
            limit(at, "--rate", "fast")
        waiting = [client.submit("echo", b"x", options={"group": group}) for group in ("", "b", "b")]
        groups = "  b: 2 waiting, 0 running\n  (no group): 1 waiting, 0 running\n"
        eventually(lambda: limit(at) == said + groups)
        assert limit(at, "--lift") == f"echo: no limit\n{groups}"
        with Worker("echo", list, broker=at):
            assert [each.result(TIMEOUT_SECONDS) for each in waiting] == [[b"x"]] * 3
