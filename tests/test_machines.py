"""All machines are used in the same way (ARCHITECTURE.md, "The machines' contract")."""

from inspect import signature

import pytest

from zmdp.clients.legacy.session import LegacySession
from zmdp.clients.x1.session import ClientSession
from zmdp.interop.flux.session.session import FluxSession
from zmdp.interop.freelance.client.session import FreelanceSession
from zmdp.interop.freelance.worker.session import FreelanceServerSession
from zmdp.workers.session.session import WorkerSession

CONTRACT = {
    "receive": ["self", "message", "now"],
    "tick": ["self", "now"],
    "deadline": ["self"],
    "take_messages": ["self"],
    "take_events": ["self"],
}
TIMELESS = {"receive": ["self", "data"], "take_messages": ["self"], "take_events": ["self"]}
MACHINES = [
    (ClientSession, CONTRACT), (LegacySession, CONTRACT), (FreelanceSession, CONTRACT),
    (FluxSession, TIMELESS), (WorkerSession, CONTRACT), (FreelanceServerSession, CONTRACT),
]  # fmt: skip


@pytest.mark.pure_only  # compiled methods have no signature
@pytest.mark.parametrize(("machine", "contract"), MACHINES)
def test_a_machine_fulfils_the_contract(machine: type, contract: dict[str, list[str]]) -> None:
    for name, required in contract.items():
        method = signature(getattr(machine, name))
        assert list(method.parameters)[: len(required)] == required
        others = list(method.parameters.values())[len(required) :]
        assert all(each.default is not each.empty for each in others)
        takes = name.startswith(("take_", "deadline"))
        assert takes or method.return_annotation is None
