"""The package contains its data files and its metadata, and every module of it can be imported."""

import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PRODUCT = [init.parent.name for init in ROOT.glob("*/__init__.py")]
FOLDERS = sorted(init.parent.relative_to(ROOT) for top in PRODUCT for init in (ROOT / top).rglob("__init__.py"))


def test_the_marker_for_type_checkers_is_installed():
    assert resources.files("zmdp").joinpath("py.typed").is_file()


def test_a_source_distribution_has_the_cython_sources():
    rules = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    files = [path.relative_to(ROOT) for top in PRODUCT for path in (ROOT / top).rglob("*.p*")]
    sources = [path for path in files if path.suffix in {".pxd", ".pyx"}]
    assert sources
    for path in sources:
        assert any(
            rule == "recursive-include" and path.parts[0] == folder and fnmatch(path.name, pattern)
            for rule, folder, *patterns in rules
            for pattern in patterns
        )


def test_the_project_has_links():
    urls = PYPROJECT["project"]["urls"]
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= urls.keys()
    assert all(url.startswith("https://github.com/zmdp/zmdp") for url in urls.values())


def test_no_module_warns_when_it_is_compiled_or_imported(tmp_path):
    """With `-W error`, on this version of Python."""
    names = [
        ".".join(["zmdp", *path.relative_to(ROOT).with_suffix("").parts])
        for folder in FOLDERS
        for path in (ROOT / folder).glob("*.py")
        if path.stem not in {"__init__", "__main__", "env"} and "versions" not in path.parts
    ]
    assert len(names) > 200
    optional = [
        name
        for name in ("airflow", "django", "django_tasks", "numpy", "pandas", "pyarrow", "pyspark")
        if find_spec(name) is None
    ]
    script = f"""
import importlib, warnings
for name in {names!r}:
    with warnings.catch_warnings():
        # What other packages do when they are imported is theirs.
        warnings.simplefilter("default")
        warnings.filterwarnings("error", module=r"zmdp(\\.|$)")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in {optional!r}:
                raise
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for top in [*PRODUCT, "src", "examples"]:
        subprocess.run(
            [sys.executable, "-W", "error", "-m", "compileall", "-q", "-f", str(ROOT / top)],
            check=True,
            env={"PYTHONPYCACHEPREFIX": str(tmp_path)},
        )


def test_the_classifiers_name_the_versions_that_are_tested():
    makefile = (ROOT / "Makefile").read_text()
    (versions,) = [line for line in makefile.splitlines() if line.startswith("PYTHONS := ")]
    named = [each.rpartition(" :: ")[2] for each in PYPROJECT["project"]["classifiers"] if ":: Python :: 3." in each]
    assert named == ["3.11", "3.12", "3.13", "3.14"]
    assert versions == f"PYTHONS := {' '.join(named)}"
