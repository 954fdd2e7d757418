"""`ZMDP_PURE=1`: zmdp's modules come from their sources, whether or not they have been compiled as well."""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

PURE: Final = os.environ.get("ZMDP_PURE", "") not in {"", "0"}
"""Python alone was asked for."""


class _Sources:
    """A finder that sees Python files only."""

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
    """From now on compiled modules of zmdp are passed by."""
    sys.meta_path.insert(0, _Sources)
