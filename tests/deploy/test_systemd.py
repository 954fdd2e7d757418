"""The units in deploy/systemd: systemd accepts them, finds them safe, and what they start is there."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zmdp.mdp.broker.io.loop import DEFAULT_DRAIN
from zmdp.titanic.server.program import DEFAULT_DRAIN_SECONDS as TITANIC_DRAIN_SECONDS
from zmdp.workers.command.cli import DEFAULT_DRAIN_SECONDS as WORKER_DRAIN_SECONDS
from zmdp.workers.command.cli import cli as worker_command

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
MAX_EXPOSURE = 2.5
"""Of 10, as `systemd-analyze security` counts."""


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("unit", sorted(UNITS.glob("*.service")), ids=lambda path: path.stem)
def test_systemd_accepts_a_unit_and_finds_it_safe_and_its_command(unit, tmp_path):
    """The scripts of this environment stand for those in /opt/zmdp."""
    shutil.copytree(UNITS / "zmdp-.service.d", tmp_path / "zmdp-.service.d")
    path = tmp_path / unit.name
    path.write_text(unit.read_text().replace("/opt/zmdp", sys.prefix))
    verified = subprocess.run(["systemd-analyze", "verify", path], check=False, capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
    subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={10 * MAX_EXPOSURE:.0f}", path],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def worker_options(**settings):
    """Return the options of a worker whose unit has such a settings file."""
    text = (UNITS / "zmdp-worker@.service").read_text()
    variables = dict(each.split("=", 1) for each in re.findall(r"^Environment=(.*)$", text, re.MULTILINE)) | settings
    (started,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    _, *words = re.sub(r"\$([A-Z]+)", lambda found: variables.get(found[1], ""), started).split()
    return worker_command.make_context("mdworker", words).params


def test_a_worker_is_supervised_whatever_other_options_it_has():
    """Otherwise, `systemctl reload` ends it."""
    target = {"TARGET": "zmdp.workers.examples:echo"}
    assert worker_options(**target)["processes"] is not None
    assert worker_options(**target, OPTIONS="--concurrency=8 --service=shout")["processes"] is not None
    assert worker_options(**target, OPTIONS="--freelance=tcp://server1:5555", PROCESSES="")["processes"] is None


def test_systemd_waits_longer_than_a_drain_takes():
    text = (UNITS / "zmdp-.service.d" / "common.conf").read_text()
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(seconds) > 2 + max(DEFAULT_DRAIN, TITANIC_DRAIN_SECONDS, WORKER_DRAIN_SECONDS)
