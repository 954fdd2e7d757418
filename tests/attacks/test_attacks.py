"""Each attack, for a second or so: `make attack` runs them for longer."""

import pytest
from attacks.harness import carry_out
from attacks.suite import ATTACKS, Attack

AMOUNT = 2000


def expected(attack: Attack) -> list[pytest.MarkDecorator]:
    """Return the mark of an attack that is known to succeed."""
    return [pytest.mark.xfail(reason=attack.known, strict=False)] if attack.known else []


@pytest.mark.parametrize("attack", [pytest.param(a, id=a.name, marks=expected(a)) for a in ATTACKS.values()])
def test_the_broker_survives(attack: Attack) -> None:
    outcome = carry_out(attack, AMOUNT)
    assert outcome.failures == []
    assert outcome.messages
    assert outcome.calls
