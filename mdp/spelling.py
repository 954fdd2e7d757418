"""Hints for names that do not exist."""

from collections.abc import Sequence
from difflib import get_close_matches


def spelling_hint(name: str, known: Sequence[str]) -> str:
    """Return which of the `known` names is probably meant, or else all of them."""
    close = get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
