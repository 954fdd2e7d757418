"""What `make test` says of what it cannot run."""

import json
import os
import subprocess
import sys

import suites
from support.results import MAX_REASON


def test_a_reason_for_skipping_is_one_line(tmp_path):
    program = "import pytest\ndef test_it(): pytest.skip('first\\n\\n  second ' + 'long ' * 100)\n"
    (tmp_path / "test_it.py").write_text(program)
    results = tmp_path / "results.jsonl"
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "support.results", "-c", os.devnull, str(tmp_path)],
        check=True,
        capture_output=True,
        env={**environment, "ZMDP_TEST_RESULTS": str(results), "PYTHONPATH": str(suites.ROOT / "tests")},
    )
    (reason,) = [json.loads(line)["reason"] for line in results.read_text().splitlines() if "skipped" in line]
    assert reason.startswith("first second long")
    assert len(reason) <= MAX_REASON


def test_what_is_not_compiled_is_said(monkeypatch):
    monkeypatch.setenv("ZMDP_PURE", "1")
    assert suites.build().startswith("zmdp is NOT compiled: it runs in pure Python")


def test_output_that_is_not_utf_8_does_not_end_a_run(tmp_path):
    program = "import logging\ndef test_it(): logging.getLogger().warning('\\udcff')\n"
    (tmp_path / "test_it.py").write_text(program)
    options = ("-n", "1", "-q", "-p", "support.results", "-c", os.devnull, "--rootdir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(suites.ROOT / "tests")},
    )  # fmt: skip
    assert "1 passed" in done.stdout
