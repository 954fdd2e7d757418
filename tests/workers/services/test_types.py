"""mypy and Pyright infer the types of calls, and find wrong ones."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.results import package

SOURCE = Path(__file__).parents[2] / "typing" / "services.py"
EXPECTED = {number for number, line in enumerate(SOURCE.read_text().splitlines(), 1) if line.endswith("# an error")}


def mypy(folder):
    """Return the numbers of the lines in which mypy finds errors."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(folder), str(SOURCE)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {int(number) for number in re.findall(r"^.*?:(\d+): error", done.stdout, re.MULTILINE)}, done.stdout


def pyright(folder):
    """Return the numbers of the lines in which Pyright finds errors."""
    package("pyright")
    # Elsewhere, since it would take the package from the folder `src`, which has only its top.
    copied = Path(shutil.copy(SOURCE, folder))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", str(copied)],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not done.stdout.startswith("{"):
        pytest.skip("Pyright cannot be run here: it needs Node (Debian: apt-get install nodejs)")
    found = [each for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    return {each["range"]["start"]["line"] + 1 for each in found}, done.stdout


@pytest.mark.parametrize("check", [mypy, pyright])
def test_type_checkers_accept_right_calls_and_reject_wrong_ones(check, tmp_path):
    found, output = check(tmp_path)
    assert found == EXPECTED, output
