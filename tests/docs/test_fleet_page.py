"""The commands of the page about fleets run in order and print what it shows."""

import shlex
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.fleets import SMALL, SPARK_TIMEOUT_SECONDS
from support.pages import blocks
from support.processes import broker, process, run
from support.sparks import skip_without_java

from zmdp.mdp import backoff
from zmdp.spark.fleet import executor
from zmdp.spark.fleet.driver import SILENCE_SECONDS
from zmdp.spark.fleet.settings import DEFAULT_IDLE_SECONDS, DEFAULT_LEASE_SECONDS

PAGE = (Path(__file__).parents[2] / "docs" / "spark" / "fleet.md").read_text()


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_the_commands_of_the_page(tmp_path):
    skip_without_java()
    (module,) = blocks(PAGE, "python")
    (tmp_path / "words.py").write_text(module)
    (session_lines,) = blocks(PAGE, "console")
    commands = [shlex.split(line[2:]) for line in session_lines.splitlines() if line.startswith("$ ")]
    assert [command[0] for command in commands] == ["mdp-broker", "mdp-spark", "mdclient", "mdp-spark"]
    with ExitStack() as stack:
        _, at = stack.enter_context(broker())
        fleet = stack.enter_context(process(*commands[1], *SMALL, cwd=tmp_path, MDP_BROKER=at))
        fleet.line("fleet words serves words", timeout=SPARK_TIMEOUT_SECONDS)
        answer = run(*commands[2], MDP_BROKER=at)
        assert answer.stdout.decode().strip() == "5", answer.stderr
        assert "$ mdclient" in session_lines.split("5\n")[0]
        shown = run("mdp-spark", "status", MDP_BROKER=at).stdout.decode()
        assert "words on local[2]" in shown
        assert run(*commands[3], MDP_BROKER=at).returncode == 0
        assert fleet.wait() == 0


def test_numbers_in_the_text_match_the_code():
    assert f"`--lease`, {DEFAULT_LEASE_SECONDS:g} s, randomly varied by {backoff.RESTART_JITTER * 100:g} %" in PAGE
    assert DEFAULT_IDLE_SECONDS == 60
    assert backoff.RESTART_SECONDS == (1, 32)
    assert f"within {backoff.EARLY_DEATH_SECONDS:g} s, after 1 to 32 s" in PAGE
    assert f"after {SILENCE_SECONDS:g} s the driver logs this" in PAGE
    assert executor.REPORT_SECONDS == 1
