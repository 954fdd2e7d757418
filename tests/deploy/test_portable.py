"""Clients and workers do without what Windows does not have."""

import os
import subprocess
import sys
from pathlib import Path

from support.processes import broker


def test_clients_and_workers_over_tcp(tmp_path):
    with broker() as (_, endpoint):
        script = Path(__file__).with_name("portable.py")
        environment = {**os.environ, "ZMDP_PURE": "1"}  # as on Windows
        done = subprocess.run(
            [sys.executable, script, endpoint], check=False, capture_output=True, text=True, cwd=tmp_path,
            env=environment,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "clients and workers work" in done.stdout
