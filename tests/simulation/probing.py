"""Finds out whether a broker is back, as `mdp/transport/probe.py` does for clients and workers."""

from collections.abc import Callable

from zmdp.mdp import wire
from zmdp.mdp.wire import Message
from zmdp.testing.network import Dealer, Network

PATIENCE = 2.0
"""Seconds that the broker may take to answer."""


class Probe:
    """Sends a HEARTBEAT over a connection of its own, and calls `report` once with whether the broker answered it."""

    def __init__(self, network: Network, owner: str, report: Callable[[bool], None]) -> None:
        self._report: Callable[[bool], None] | None = report
        self._dealer = Dealer(network, owner, self._arrived, lost=self._lost)
        self._dealer.send(wire.heartbeat((b"",), wire.CX1))
        network.world.clock.after(PATIENCE, lambda: self._end(False))

    def _arrived(self, _: Dealer, message: Message) -> None:
        found = wire.decode_broker(message)
        self._end(isinstance(found, wire.Batched) and found.bare)

    def _lost(self, _: Dealer, reason: str) -> None:
        self._end(False)

    def _end(self, answered: bool) -> None:
        report, self._report = self._report, None
        if report is not None:
            self._dealer.close()
            report(answered)
