"""Package zmdp itself as a zip for executors, which the driver ships; it is pure Python, and needs only pyzmq."""

import importlib.util
import zipfile
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

PACKAGE: Final = "zmdp.zip"
TOP_LEVEL_MODULES: Final = ("pyspark_titanic",)
"""Modules that belong to zmdp but are not in its package: where Spark looks for the data source."""


def write_package(target: Path) -> None:
    """Write the zip for `addPyFile`, which contains zmdp's own files."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in _sources(files("zmdp"), "zmdp/"):
            archive.writestr(name, content)
        for module in TOP_LEVEL_MODULES:
            found = importlib.util.find_spec(module)
            read = getattr(found.loader, "get_source", None) if found is not None else None
            if read is not None:
                archive.writestr(f"{module}.py", read(module))


def _sources(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        if each.is_dir():
            if each.name != "__pycache__":
                yield from _sources(each, f"{prefix}{each.name}/")
        elif not each.name.endswith(tuple(EXTENSION_SUFFIXES)):  # zipimport cannot load extension modules
            yield prefix + each.name, each.read_bytes()
