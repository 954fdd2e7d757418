"""Files in TOML: access files, settings, schedules and catalogues."""

import tomllib
from pathlib import Path
from typing import Any

from .errors import SettingError, flaw


def read(path: Path) -> str:
    """Return the text of a file, whatever the locale, without the byte order mark that editors on Windows add.

    Raises `OSError` and `UnicodeDecodeError`.
    """
    return path.read_text(encoding="utf-8-sig")


def load(path: Path) -> dict[str, Any]:
    """Return the content of a file.  Raises `SettingError`."""
    try:
        text = read(path)
    except OSError as error:
        raise SettingError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingError(f"{path} is not text in UTF-8") from None
    return parse(text, path)


def parse(text: str, path: Path) -> dict[str, Any]:
    """Return what `text`, the content of `path`, says.  Raises `SettingError`."""
    try:
        return tomllib.loads(text)
    # Not all are TOMLDecodeErrors: a number may have too many digits, and arrays may be too deep.
    except (ValueError, RecursionError) as error:
        raise SettingError(f"{path} is not valid TOML: {flaw(error)}") from None
