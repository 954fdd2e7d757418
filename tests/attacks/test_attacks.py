"""Each attack, for a second or so: `make attack` runs them for longer.

`make test` runs some of each kind, `make test-all` the others.
"""

import pytest
from attacks.harness import carry_out
from attacks.suite import ATTACKS, Attack

AMOUNT = 2000


QUICK = {"garbage-bytes", "half-handshakes", "envelopes", "mutated-messages", "others-requests"}


@pytest.mark.parametrize(
    "attack",
    [pytest.param(a, id=a.name, marks=() if a.name in QUICK else pytest.mark.long) for a in ATTACKS.values()],
)
def test_the_broker_survives(attack: Attack) -> None:
    outcome = carry_out(attack, AMOUNT)
    assert outcome.failures == []
    assert outcome.messages
    assert outcome.calls
