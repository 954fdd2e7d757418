"""How the simulation reports a broken rule."""

EPSILON = 1e-6
"""Seconds by which calculations of times may differ."""


class Broken(AssertionError):
    """A rule was broken."""


def check(holds: bool, rule: str, *values: object) -> None:
    """Raise `Broken` with `rule`, which says what is wrong and begins with the number of the rule, if it has one.

    `values` take the place of the braces in it.  What is checked most often passes them, since a text that is put
    together each time takes longer than what it is about.
    """
    if not holds:
        raise Broken(rule.format(*values) if values else rule)
