"""How a simulation says that a rule was broken."""


class Broken(AssertionError):
    """A rule was broken."""


def check(holds: bool, rule: str) -> None:
    """`rule` says what is wrong if it does not hold, beginning with its number in CONFORMANCE.md if it has one."""
    if not holds:
        raise Broken(rule)
