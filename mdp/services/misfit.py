"""`Misfit`: what is wrong with a value, and where."""

import re
from typing import Final

import msgspec

from ..errors import CodecError

_PATH: Final = re.compile(r"(.*) - at `([^`]*)`", re.DOTALL)
_INNER_PATH: Final = re.compile(r"([.\[][^ ]*): (.*)", re.DOTALL)


class Misfit(CodecError):
    """A value is readable but is not of the declared type; the text says where: `$.width: expected int, got str`."""


def problem_in(error: msgspec.ValidationError) -> str:
    """Return what msgspec says about a value, the path first."""
    text = str(error)
    found = _PATH.fullmatch(text)
    path, text = (found[2], found[1]) if found else ("$", text)
    if inner := _INNER_PATH.fullmatch(text):  # a model's own path, inside of msgspec's
        path, text = path + inner[1], inner[2]
    return f"{path}: {text[:1].lower()}{text[1:]}".replace("`", "")
