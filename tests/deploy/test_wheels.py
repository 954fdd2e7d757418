"""Each wheel in dist/ (`make dist`) installs without a compiler and runs a request; without dist/, a pure one.

The oldest releases that pyproject.toml admits of what zmdp needs are enough.
"""

import os
import re
import resource
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from deploy.first_reply import words_of_the_readme
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[2]
WHEELS = sorted((ROOT / "dist").glob("*.whl"))
UVX = ROOT / ".venv-dist" / "bin" / "uvx"
PYTHONS = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"

pytestmark = pytest.mark.long


def python_for(wheel: Path) -> str:
    """Return the interpreter for a wheel's tag."""
    tag = next(iter(parse_wheel_filename(wheel.name)[3]))
    if tag.interpreter in {"py3", f"cp3{sys.version_info.minor}"}:
        return sys._base_executable
    version = f"3.{tag.interpreter.removeprefix('cp3')}"
    for found in [*sorted(PYTHONS.glob(f"{version}.*/bin/python{version}"), reverse=True), f"/usr/bin/python{version}"]:
        if Path(found).exists():
            return str(found)
    pytest.skip(f"there is no Python {version}")


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


def install(wheel, folder, *requirements):
    """Install a wheel by its name, where there is no compiler and no index.

    Returns the Python that has it, and its environment.
    """
    subprocess.run([python_for(wheel), "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ZMDP_", "MDP_"))}
    env |= {"PATH": str(python.parent), "CC": "/nonexistent/cc"}
    found = str(folder / "found")
    words = ["download", "--quiet", "--only-binary", ":all:", "--dest", found, str(wheel), *requirements]
    subprocess.run([python, "-m", "pip", *words], check=True, env=env)
    words = ["install", "--quiet", "--no-index", "--find-links", found, "zmdp", *requirements]
    subprocess.run([python, "-m", "pip", *words], check=True, env=env)
    return python, env


def first_reply(python, env, folder, kind):
    """Return what the program prints."""
    script = Path(__file__).with_name("first_reply.py")
    done = subprocess.run([python, script, kind], check=False, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("wheel", WHEELS or [None], ids=lambda wheel: wheel.name if wheel else "pure")
def test_a_wheel_needs_no_compiler(wheel, request, tmp_path):
    wheel = wheel or request.getfixturevalue("pure_wheel")
    began, used = time.perf_counter(), processor_seconds()
    python, env = install(wheel, tmp_path / "clean")
    print(f"\n{wheel.name}: installed after {time.perf_counter() - began:.1f} s")
    said = first_reply(python, env, tmp_path, "pure" if wheel.name.endswith("-none-any.whl") else "compiled")
    took, used = time.perf_counter() - began, processor_seconds() - used
    print(f"{said}; {took:.1f} s since its environment was made, {used:.1f} s of processor time")


@pytest.mark.skipif(not UVX.exists(), reason="there is no uv (make dist)")
def test_the_first_minute_by_name_with_uvx(pure_wheel, tmp_path):
    _, env = install(pure_wheel, tmp_path / "clean")  # which leaves what it needs in `found`
    (tmp_path / "words.py").write_text(words_of_the_readme())
    env |= {"UV_CACHE_DIR": str(tmp_path / "cache"), "MDP_BROKER": "", "PATH": os.environ["PATH"]}
    zmdp = [UVX, "--python", sys._base_executable, "--offline", "--no-index"]
    zmdp += ["--find-links", tmp_path / "clean" / "found", "--from", "zmdp", "zmdp"]
    dev = subprocess.Popen([*zmdp, "dev", "words:services"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    try:
        env["MDP_BROKER"] = dev.stdout.readline().split()[-1]
        call = [*zmdp, "call", "words.count", '"hello big world"', "--wait", "--timeout", "60"]
        assert subprocess.check_output(call, cwd=tmp_path, env=env, text=True) == "3\n"
    finally:
        dev.terminate()
        dev.communicate()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there are no wheels of such old releases for newer Pythons")
def test_the_oldest_releases_that_are_admitted_do(pure_wheel, tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = [re.sub(r">=([^,]+).*", r"==\1", each) for each in project["dependencies"]]
    python, env = install(pure_wheel, tmp_path / "clean", *oldest)
    first_reply(python, env, tmp_path, "pure")
    for name in project["scripts"]:
        subprocess.run([python.with_name(name), "--help"], check=True, env=env, stdout=subprocess.DEVNULL)
