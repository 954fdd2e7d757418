"""MODULE:NAME on a command line: the object that it names."""

import importlib
import os
import sys
import traceback

from .errors import SettingError


def load(target: str, example: str) -> object:
    """What `target` names, MODULE:NAME, with the current directory before the installed packages.

    Raises `SettingError` that says in one line what is wrong and where: `example` is shown for a text of another form.
    """
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise SettingError(f"{target!r}: it takes {example}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # noqa: BLE001 - it is the user's module: whatever it raises is told in one line
        raise SettingError(f"cannot use {target}: {described(error)}") from None
    return found


def described(error: Exception) -> str:
    """The exception in one line, with the place in the user's code."""
    text = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError):
        return f"{text} ({error.filename}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
    return text + place
