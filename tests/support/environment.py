"""A Python environment for executors, made as docs/spark/fleet.md says."""

import subprocess
import sys
import tempfile
from pathlib import Path


def make(target: Path, *requirements: str) -> None:
    """Write an archive of an environment with pyzmq, msgspec, click and these packages."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "environment"
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        wanted = ("venv-pack", "pyzmq", "msgspec", "click", *requirements)
        subprocess.run([home / "bin" / "pip", "install", "--quiet", *wanted], check=True, capture_output=True)
        subprocess.run([home / "bin" / "venv-pack", "--quiet", "--prefix", home, "--output", target], check=True)
