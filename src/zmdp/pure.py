"""`ZMDP_PURE=1`: import zmdp's modules from their Python sources, even if compiled modules are installed."""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

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
