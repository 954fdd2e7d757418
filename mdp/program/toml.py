"""Files in TOML: access files, settings and catalogues."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..errors import SettingError, flaw
from .arguments import spelling_hint

Kind = TypeVar("Kind", bound=msgspec.Struct)


def read(path: Path, advice: str = "") -> str:
    """Return the text of a file, whatever the locale, without the byte order mark that editors on Windows add.

    Raises `SettingError`, which ends with the advice if there is no such file.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        more = f": {advice}" if advice and isinstance(error, FileNotFoundError) else ""
        raise SettingError(f"cannot read {path}: {error.strerror}{more}") from None
    except UnicodeDecodeError:
        raise SettingError(f"{path} is not text in UTF-8") from None


def load(path: Path) -> dict[str, Any]:
    """Return the content of a file.  Raises `SettingError`."""
    return parse(read(path), path)


def parse(text: str, path: Path) -> dict[str, Any]:
    """Return what `text`, the content of `path`, says.  Raises `SettingError`."""
    try:
        return tomllib.loads(text)
    # Not all are TOMLDecodeErrors: a number may have too many digits, and arrays may be too deep.
    except (ValueError, RecursionError) as error:
        raise SettingError(f"{path} is not valid TOML: {flaw(error)}") from None


def convert(content: Any, kind: type[Kind], where: str) -> Kind:
    """Return a table as an object of `kind`, which forbids unknown fields.  Raises `SettingError`, after `where`."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        known = [each.encode_name for each in msgspec.structs.fields(kind)]
        unknown = [name for name in content if name not in known] if isinstance(content, dict) else []
        hint = f" ({unknown[0]!r}: {spelling_hint(unknown[0], known)})" if unknown else ""
        raise SettingError(f"{where}: {error}{hint}") from None
