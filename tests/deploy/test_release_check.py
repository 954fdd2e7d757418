"""What `make release-check` finds, and the workflows that publish."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (GITHUB / "workflows").glob("*.yml")}
CHANGELOG = "# Changes\n\n## 1.2.0 - 2027-01-31\n\n### Added\n- Much.\n\n## 1.1.0 - 2027-01-01\n"


def load():
    spec = importlib.util.spec_from_file_location("release_check", ROOT / "deploy" / "release_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


problems = load().problems


def test_a_release_that_is_complete():
    assert problems('"""x"""\n__version__ = "1.2.0"\n', CHANGELOG, "v1.2.0") == []
    assert problems('__version__ = "1.2.0"\n', CHANGELOG) == []


@pytest.mark.parametrize(
    ("version", "tag", "problem"),
    [
        ("1.2.0.dev1", "", "not the version of a release"),
        ("1.2.0", "v1.2.1", "the tag must be v1.2.0"),
        ("1.3.0", "v1.3.0", "no section '## 1.3.0 - YYYY-MM-DD'"),
        ("1.1.0", "v1.1.0", "says nothing about 1.1.0"),
    ],
)
def test_a_release_that_is_not(version, tag, problem):
    assert any(problem in each for each in problems(f'__version__ = "{version}"\n', CHANGELOG, tag))


def steps(workflow):
    return [step for job in WORKFLOWS[workflow]["jobs"].values() for step in job.get("steps", [])]


def test_the_workflows_run_make_targets_that_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    run = [step["run"] for name in WORKFLOWS for step in steps(name) if "run" in step]
    named = {word for line in run for word in re.findall(r"make ([\w-]+)", line)}
    nightly = WORKFLOWS["nightly"]["jobs"]["at-length"]["strategy"]["matrix"]["target"]
    named |= {target.split()[0] for target in nightly}
    assert named >= {"lint", "test", "quick", "release-check", "compatibility", "test-long", "test-loaded", "soak"}
    assert named <= targets
    for script in re.findall(r"python (tests/\S+\.py)", "\n".join(run)):
        assert (ROOT / script).is_file()


def test_every_python_is_tested():
    matrix = WORKFLOWS["test"]["jobs"]["pythons"]["strategy"]["matrix"]
    makefile = (ROOT / "Makefile").read_text()
    assert matrix["python"] == re.search(r"^PYTHONS := (.*)$", makefile, re.MULTILINE)[1].split()


def test_only_what_is_tested_and_built_is_published_and_without_a_secret():
    jobs = WORKFLOWS["release"]["jobs"]
    publish = jobs["publish"]
    assert set(publish["needs"]) == set(jobs) - {"publish"}
    assert publish["permissions"] == {"id-token": "write"}
    assert not any("id-token" in job.get("permissions", {}) for name, job in jobs.items() if name != "publish")
    text = "".join(path.read_text() for path in GITHUB.rglob("*.yml"))
    assert "secrets." not in text
    assert not re.search(r"pypi\.org|pythonhosted", text)


def test_workflows_and_templates_are_valid():
    pytest.importorskip("check_jsonschema")
    for schema, files in {
        "vendor.github-workflows": (GITHUB / "workflows").glob("*.yml"),
        "vendor.dependabot": [GITHUB / "dependabot.yml"],
    }.items():
        names = [str(path) for path in files]
        subprocess.run([sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *names], check=True)


def test_wheels_are_built_and_tried_by_cibuildwheel_as_here():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    assert settings["environment"] == {"ZMDP_PURE": "0"}
    (script,) = re.findall(r"\{project\}/(\S+)", settings["test-command"])
    assert (ROOT / script).is_file()
    assert any("pypa/cibuildwheel@" in step.get("uses", "") for step in steps("release"))
