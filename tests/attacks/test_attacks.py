"""Each attack, for a second or so: `make attack` runs them for longer."""

import pytest
from attacks.harness import carry_out
from attacks.suite import ATTACKS

AMOUNT = 2000

KNOWN = {
    "a-message-without-end": "libzmq keeps the frames of a message, without a limit, until its last one has arrived",
    "next-routing-ids": "automatic routing ids start at the same number in every process (C39)",
    "ids-of-departed-clients": "a peer with the routing id of one that has just left receives its replies (C39)",
    "ids-of-departed-workers": "a peer with the routing id of one that has just left receives its requests (C39)",
    "tiny-frames": "the overhead of frames is not charged (C40)",
    "envelopes": "envelopes are not charged (C40)",
    "large-held-requests": "requests that workers hold are not charged (C40)",
    "requests-not-read": "requests that workers hold are not charged (C40)",
    "collected-partials": "PARTIALs that are kept for an MDP/0.1 client are not charged (C40)",
    "streams-not-read": "what libzmq keeps for a slow reader, a thousand messages, is not charged (C40)",
    "large-requests-at-once": "what libzmq has received for the broker, a thousand messages a peer, is not limited",
    "memory-used-up": "one client may use up the memory for all waiting requests, and others get 429",
    "unknown-services": "names that are only waited for keep workers out (C41)",
}
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
