"""The package contains every folder of the product, its data files and its metadata."""

import tomllib
from fnmatch import fnmatch
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
PRODUCT = ["mdp", "mmi", "clients", "workers", "titanic", "spark", "migrations"]
FOLDERS = sorted(init.parent.relative_to(ROOT) for top in PRODUCT for init in (ROOT / top).rglob("__init__.py"))


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_a_folder_of_the_product_is_packaged(folder):
    name = ".".join(["zmdp", *folder.parts])
    assert name in SETUPTOOLS["packages"]
    assert SETUPTOOLS["package-dir"][name] == folder.as_posix()


def test_every_package_has_its_folder():
    folders = {name for name in SETUPTOOLS["package-dir"] if name}  # "" is for modules outside of packages
    assert sorted(folders) == sorted(SETUPTOOLS["packages"])


def test_the_marker_for_type_checkers_is_installed():
    assert resources.files("zmdp").joinpath("py.typed").is_file()


def test_a_source_distribution_has_the_cython_sources():
    rules = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    sources = [path.relative_to(ROOT) for top in PRODUCT for path in (ROOT / top).rglob("*.pyx")]
    assert sources
    for path in sources:
        assert any(
            rule == "recursive-include" and path.parts[0] == folder and fnmatch(path.name, pattern)
            for rule, folder, pattern in rules
        )


def test_the_project_has_links():
    urls = PYPROJECT["project"]["urls"]
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= urls.keys()
    assert all(url.startswith("https://github.com/zmdp/zmdp") for url in urls.values())
