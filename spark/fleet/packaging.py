"""Package zmdp itself as a zip for executors, which the driver ships: pure Python that needs pyzmq and msgspec."""

import zipfile
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

PACKAGE: Final = "zmdp.zip"


def write_package(target: Path) -> None:
    """Write the zip for `addPyFile`, which contains zmdp's own files."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in _sources(files("zmdp"), "zmdp/"):
            archive.writestr(name, content)


def _sources(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        if each.is_dir():
            if each.name != "__pycache__":
                yield from _sources(each, f"{prefix}{each.name}/")
        elif not each.name.endswith(tuple(EXTENSION_SUFFIXES)):  # zipimport cannot load extension modules
            yield prefix + each.name, each.read_bytes()
