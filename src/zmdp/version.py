"""Which zmdp this is: its version, and which of its modules are compiled.

With `ZMDP_PURE=1` in the environment, none are: modules are imported from their Python sources, even if compiled
modules are installed.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final

__version__ = "0.1.0"
PURE: Final = os.environ.get("ZMDP_PURE", "") not in {"", "0"}
"""Whether the environment asks for pure Python."""


class _Sources:
    """An import finder that finds Python files only."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        del target
        if path is None or not name.startswith("zmdp."):
            return None
        for folder in path:
            source = Path(folder, f"{name.rpartition('.')[2]}.py")
            if source.is_file():
                return spec_from_file_location(name, source)
        return None


def prefer_sources() -> None:
    """Ignore compiled modules of zmdp in all further imports."""
    sys.meta_path.insert(0, _Sources)


def compiled_parts() -> dict[str, bool]:
    """Return which parts are compiled: moving messages, packing batches, and the protocol's state machines.

    This reports what is in use: an extension module that was built but cannot be imported does not count.
    """
    names = ("broker.machine", "transport.multipart", "wire.batch")
    machine, multipart, batch = (_imported(f"zmdp.mdp.{name}") for name in names)
    return {
        "multipart": multipart.COMPILED,
        "batch": not str(batch.__file__).endswith(".py"),
        "machines": not str(machine.__file__).endswith(".py"),
    }


def _imported(name: str) -> Any:
    return import_module(name)  # when asked: all of them import this module


def build() -> str:
    """Return the same in words, for `--version`."""
    have = compiled_parts()
    if all(have.values()):
        return "compiled"
    if not any(have.values()):
        return "pure Python, as ZMDP_PURE asks" if PURE else "pure Python"
    return ", ".join(f"{name} {'compiled' if there else 'pure Python'}" for name, there in have.items())
