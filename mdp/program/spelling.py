"""Hints for names that do not exist."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def spelling_hint(name: str, known: Sequence[str]) -> str:
    """Return which of the `known` names is probably meant, or else all of them."""
    close = get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"


def check_known(what: str, settings: Iterable[str], known: Sequence[str]) -> None:
    """Raise `TypeError` for the first setting that is not `known`, with the one that is probably meant."""
    for name in settings:
        if name not in known:
            raise TypeError(f"{what} has no setting {name!r}: {spelling_hint(name, known)}")
