"""Each attack, for a second or so: `make attack` runs them for longer."""

import pytest
from attacks.harness import carry_out
from attacks.suite import ATTACKS

AMOUNT = 2000

KNOWN: dict[str, str] = {}
"""Attacks that succeed, and why."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.xfail(strict=False, reason=KNOWN[each])] if each in KNOWN else [])
     for each in ATTACKS],
)  # fmt: skip
def test_the_broker_survives(name: str) -> None:
    outcome = carry_out(ATTACKS[name], AMOUNT)
    assert outcome.failures == []
    assert outcome.messages
    assert outcome.calls
