"""Each attack, for a second or so: `make attack` runs them for longer."""

import pytest
from attacks.harness import carry_out
from attacks.suite import ATTACKS, Attack

AMOUNT = 2000


@pytest.mark.parametrize("attack", [pytest.param(each, id=each.name) for each in ATTACKS.values()])
def test_the_broker_survives(attack: Attack) -> None:
    outcome = carry_out(attack, AMOUNT)
    # What is known costs memory, more or less of it, depending on the machine; everything else must hold all the same.
    assert [each for each in outcome.failures if not (attack.known and each.startswith("memory:"))] == []
    assert outcome.messages
    assert outcome.calls
