"""Load the object that MODULE:NAME on a command line names."""

import importlib
import inspect
import os
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Final

from ..errors import SettingError
from .logs import enable_again

MAX_NAMES: Final = 10
"""How many of a module's names are shown."""

_importing: str | None = None
"""The module that `load` is importing."""


def load(target: str, example: str) -> object:
    """Return the object that `target`, MODULE:NAME, names.  The current directory is searched first.

    Raises `SettingError` with a one-line explanation; if `target` has another form, it shows `example`.
    """
    module, colon, name = target.partition(":")
    if "/" in module or module.endswith(".py"):
        raise SettingError(
            f"{target!r} names a file instead of a module: {_as_module(Path(module), name or 'NAME')}"
            + ("" if name else ", with the NAME that the worker or function has in it")
        )
    if module and not name:
        raise SettingError(f"expected {example}, got {target!r}: add the name that is to be used, {module}:NAME")
    if not (module and colon):
        raise SettingError(f"expected {example}, got {target!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    global _importing  # noqa: PLW0603 - commands load one module, in their main thread
    _importing = module
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except SettingError as error:
        raise SettingError(f"cannot use {target}: {error}") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything, or exit
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if isinstance(error, AttributeError) and error.obj is sys.modules.get(module):
            reason = f"module {module} has no {error.name!r}{_hint(module, str(error.name))}"
        elif missing and f"{module}.".startswith(f"{missing}."):  # else a module that the user's module imports
            reason = f"{error} in {os.getcwd()} or among the installed packages"
        else:
            reason = _in_one_line(error)
        raise SettingError(f"cannot use {target}: {reason}") from None
    finally:
        _importing = None
        enable_again()
    return found


def check_not_importing() -> None:
    """Raise `SettingError` if a module that is being loaded starts a worker itself, and so would never be loaded."""
    if _importing is not None:
        raise SettingError(
            f'module {_importing} runs a worker when it is imported: move the call under `if __name__ == "__main__":`'
        )


def _as_module(path: Path, name: str) -> str:
    """Return how to name the object in the file `path` instead."""
    if path.is_absolute() or ".." in path.parts:
        return f"use {path.stem}:{name} with {path.parent} as the current directory"
    return f"use {'.'.join(path.with_suffix('').parts)}:{name}"


def _hint(module: str, name: str) -> str:
    """Return what to use instead of a name that the module lacks: its own functions, and what can be called or run."""
    found = [
        each
        for each, value in vars(sys.modules[module]).items()
        if not each.startswith("_") and not isinstance(value, type | ModuleType)
        and (callable(value) or hasattr(value, "run"))
        and (not inspect.isroutine(value) or value.__module__ == module)
    ]  # fmt: skip
    close = get_close_matches(name, found, 1)
    if close:
        return f": did you mean {module}:{close[0]}?"
    return f": it has {', '.join(found[:MAX_NAMES])}" if found else ""


def _in_one_line(error: BaseException) -> str:
    """Return the exception and its location in the user's code."""
    text = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError):
        return f"{text} ({error.filename}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
    return text + place
