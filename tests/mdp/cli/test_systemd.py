"""The units that `--systemd` prints: systemd accepts them, and what they start is there."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from zmdp.mdp.broker.server import DEFAULT_DRAIN
from zmdp.mdp.cli.systemd import unit
from zmdp.titanic.server import DEFAULT_DRAIN_SECONDS as TITANIC_DRAIN_SECONDS
from zmdp.workers.cli.main import DEFAULT_DRAIN_SECONDS as WORKER_DRAIN_SECONDS
from zmdp.workers.cli.main import cli as worker_command

COMMANDS = {
    "mdp-broker": "mdp-broker.service",
    "mdworker": "mdworker@.service",
    "titanic serve": "titanic.service",
    "mdp-gateway http": "mdp-gateway.service",
}
MAX_EXPOSURE = 2.5
"""Of 10, as `systemd-analyze security` counts."""

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_its_unit(command, in_this_process):
    done = in_this_process(*command.split(), "--systemd")
    assert done.returncode == 0
    assert done.stdout.decode() == unit(command)


@pytest.mark.parametrize(("command", "file"), COMMANDS.items())
@needs_systemd
def test_systemd_accepts_a_unit_and_finds_it_safe(command, file, tmp_path):
    path = tmp_path / file
    path.write_text(unit(command))
    verified = subprocess.run(["systemd-analyze", "verify", path], check=False, capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
    subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={10 * MAX_EXPOSURE:.0f}", path],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_unit_starts_what_is_installed(command):
    (started,) = re.findall(r"^ExecStart=(.*)$", unit(command), re.MULTILINE)
    path, *words = started.split()
    assert Path(path).is_file()
    assert [Path(path).name, *(word for word in words if not word.startswith("$"))] == command.split()


def worker_options(**settings):
    """Return the options of a worker whose unit has such a settings file."""
    text = unit("mdworker")
    variables = dict(each.split("=", 1) for each in re.findall(r"^Environment=(.*)$", text, re.MULTILINE)) | settings
    (started,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    _, *words = re.sub(r"\$([A-Z]+)", lambda found: variables.get(found[1], ""), started).split()
    return worker_command.make_context("mdworker", words).params


def test_a_worker_is_supervised_whatever_other_options_it_has():
    """Otherwise, `systemctl reload` ends it."""
    target = {"TARGET": "zmdp.workers.echo:worker"}
    assert worker_options(**target)["processes"] == (1, 1)
    assert worker_options(**target, OPTIONS="--concurrency=8 --service=shout")["processes"] == (1, 1)
    assert worker_options(**target, OPTIONS="--processes=4")["processes"] == (4, 4)
    assert worker_options(**target, OPTIONS="--freelance=tcp://server1:5555", PROCESSES="")["processes"] is None


def test_systemd_waits_longer_than_a_drain_takes():
    (seconds,) = {int(re.findall(r"^TimeoutStopSec=(\d+)$", unit(each), re.MULTILINE)[0]) for each in COMMANDS}
    assert seconds > 2 + max(DEFAULT_DRAIN, TITANIC_DRAIN_SECONDS, WORKER_DRAIN_SECONDS)
