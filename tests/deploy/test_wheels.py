"""Each wheel in dist/ (`make dist`) installs without a compiler and runs a request; without dist/, a pure one."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[2]
WHEELS = sorted((ROOT / "dist").glob("*.whl"))
PYTHONS = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"

pytestmark = pytest.mark.long


def python_for(wheel: Path) -> str:
    """Return the interpreter for a wheel's tag."""
    tag = next(iter(parse_wheel_filename(wheel.name)[3]))
    if tag.interpreter in {"py3", f"cp3{sys.version_info.minor}"}:
        return sys._base_executable
    version = f"3.{tag.interpreter.removeprefix('cp3')}"
    found = sorted(PYTHONS.glob(f"{version}.*/bin/python{version}"))
    if not found:
        pytest.skip(f"there is no Python {version}")
    return str(found[-1])


def processor_seconds() -> float:
    """Return the time on a processor of all processes that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


@pytest.fixture
def pure_wheel(tmp_path):
    """A wheel that is built now."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)],
        check=True, env={**os.environ, "ZMDP_PURE": "1"},
    )  # fmt: skip
    (made,) = tmp_path.glob("*.whl")
    return made


@pytest.mark.parametrize("wheel", WHEELS or [None], ids=lambda wheel: wheel.name if wheel else "pure")
def test_a_wheel_needs_no_compiler(wheel, request, tmp_path):
    wheel = wheel or request.getfixturevalue("pure_wheel")
    subprocess.run([python_for(wheel), "-m", "venv", str(tmp_path / "clean")], check=True)
    python = tmp_path / "clean" / "bin" / "python"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ZMDP_"))}
    env |= {"PATH": str(python.parent), "CC": "/nonexistent/cc"}
    began, used = time.perf_counter(), processor_seconds()
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", str(wheel)], check=True, env=env
    )
    print(f"\n{wheel.name}: installed after {time.perf_counter() - began:.1f} s")
    kind = "pure" if wheel.name.endswith("-none-any.whl") else "compiled"
    first_reply = Path(__file__).with_name("first_reply.py")
    done = subprocess.run(
        [python, first_reply, kind], check=False, env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    took, used = time.perf_counter() - began, processor_seconds() - used
    print(f"{done.stdout.strip()}; {took:.1f} s since pip install, {used:.1f} s of processor time")
