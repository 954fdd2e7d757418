"""What the wheel takes along: every folder of the product, and the marker that it is typed."""

import tomllib
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
PRODUCT = ["mdp", "mmi", "clients", "workers", "titanic", "spark", "migrations"]
FOLDERS = sorted(init.parent.relative_to(ROOT) for top in PRODUCT for init in (ROOT / top).rglob("__init__.py"))


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_a_folder_of_the_product_is_packaged(folder):
    name = ".".join(["zmdp", *folder.parts])
    assert name in SETUPTOOLS["packages"]
    assert SETUPTOOLS["package-dir"][name] == folder.as_posix()


def test_every_package_says_where_it_is():
    folders = {name for name in SETUPTOOLS["package-dir"] if name}  # "" is where the modules by themselves are
    assert sorted(folders) == sorted(SETUPTOOLS["packages"])


def test_the_marker_for_type_checkers_is_installed():
    assert resources.files("zmdp").joinpath("py.typed").is_file()
