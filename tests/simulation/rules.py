"""How the simulation reports a broken rule."""


class Broken(AssertionError):
    """A rule was broken."""


def check(holds: bool, rule: str) -> None:
    """Raise `Broken` with `rule`, which says what is wrong and begins with the number of the rule, if it has one."""
    if not holds:
        raise Broken(rule)
