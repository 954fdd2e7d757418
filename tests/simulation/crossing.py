"""What passes the links between brokers, and the rules for it (C44), as each broker's own end sees it.

A `Crossing` is one end of one connection.  It notes which requests this broker has passed on over it and which came
over it.  `sent` checks what the broker sends: requests that have not passed the other broker before, and for each
request that came, PARTIALs and one end, and nothing else.
"""

from collections import Counter
from typing import Any

from zmdp.mdp import wire
from zmdp.mdp.wire import Message, batch
from zmdp.mdp.wire.options import MAX_HOPS

from .rules import check

UNLIMITED = 1 << 30


class Crossing:
    """One end of a connection between two brokers: that of the broker `name`."""

    def __init__(self, name: str, other: str, events: Counter[str]) -> None:
        self.passed_on: dict[Any, bool] = {}
        """Requests that were sent to the other broker: whether CANCEL was sent."""
        self.came: dict[Any, bool] = {}
        """Requests that came from the other broker and have not ended: whether a PARTIAL was sent."""
        self._cancelled: list[Any] = []
        """Requests that came and were cancelled since they were checked last."""
        self._name = name
        self._other = other
        self._events = events
        self._ids: set[Any] = set()
        """All that were ever passed on."""

    def sent(self, message: Message) -> None:
        """Check what this broker sends.  `message` has no identity frame."""
        for header, command in commands(message):
            if header == wire.CL1:
                self._sent_as_client(command)
            else:
                self._sent_as_worker(command)

    def _sent_as_client(self, command: Any) -> None:
        if isinstance(command, wire.Request) and command.service == wire.HELLO:
            self._events["link asked for"] += 1
        elif isinstance(command, wire.Request):
            via = command.options.values().get("via")
            check(isinstance(via, list), "C44: {} passes on {} without via", self._name, command)
            assert isinstance(via, list)
            check(via[-1] == self._name, "C44: {} passes on what came via {}", self._name, via)
            check(len(set(via)) == len(via), "C44: a request has passed a broker twice: {}", via)
            check(len(via) <= MAX_HOPS, "C44: a request has passed too many brokers: {}", via)
            check(self._other not in via, "C44: {} sends a request back to {}: {}", self._name, self._other, via)
            check(command.id not in self._ids, "C32: {} uses the address {} twice", self._name, command.id)
            self._ids.add(command.id)
            self.passed_on[command.id] = False
            self._events["request passed on"] += 1
            self._events[f"request passed {len(via)} links"] += 1
        elif isinstance(command, wire.Cancel):
            check(command.id in self._ids, "C44: {} cancels {}, which it has not passed on", self._name, command.id)
            if command.id in self.passed_on:
                self.passed_on[command.id] = True
            self._events["CANCEL passed on"] += 1
        else:
            check(isinstance(command, wire.Heartbeat), "C44: {} sends {} over a link", self._name, command)

    def _sent_as_worker(self, command: Any) -> None:
        if isinstance(command, wire.Reply | wire.Error | wire.Release):
            check(
                command.id in self.came, "C44: {} sends {}, which {} does not expect", self._name, command, self._other
            )
            if isinstance(command, wire.Release):
                check(not self.came[command.id], "C17: {} returns {} after a PARTIAL", self._name, command.id)
                self._events["request returned over a link"] += 1
            self.came[command.id] = True
            if ends(command):
                del self.came[command.id]
            else:
                self._events["PARTIAL over a link"] += 1
        elif isinstance(command, wire.Ready):
            self._events["announced" if command.hops else "announcement withdrawn"] += 1

    def received(self, message: Message) -> None:
        """Note what the broker has taken in."""
        for header, command in commands(message):
            if header == wire.CL1 and isinstance(command, wire.Request):
                self.came[command.id] = False
            elif header == wire.CL1 and isinstance(command, wire.Cancel):
                self._cancelled.append(command.id)
            elif header == wire.WL1 and ends(command):
                self.passed_on.pop(command.id, None)

    def forget(self) -> None:
        """The link has ended: what came over it is over."""
        self.came.clear()

    def check_cancelled(self) -> None:
        """Check that what the other broker has cancelled has ended."""
        for number in self._cancelled:
            check(number not in self.came, "C44: {} does not end {}, which {} cancels", self._name, number, self._other)
        self._cancelled.clear()


def ends(command: Any) -> bool:
    """Return whether a worker's command ends a request, at that worker."""
    return isinstance(command, wire.Error | wire.Release) or (isinstance(command, wire.Reply) and command.final)


def commands(message: Message) -> list[tuple[bytes, Any]]:
    """Return the commands in a message over a link, each with its header; none if it does not belong to a link."""
    found = wire.decode_peer([b"?", *message], UNLIMITED, UNLIMITED)
    if not isinstance(found, wire.Batched):
        return []
    if found.header not in {wire.CL1, wire.WL1} or found.bare:
        return []
    unpack = batch.from_client if found.header == wire.CL1 else batch.from_worker
    return [(found.header, each) for each in unpack([b"?", *message], found.at, found.route, UNLIMITED, UNLIMITED)]
