"""The state of one broker's machine, for all its parts, and the interfaces of the rooms that it does not know."""

import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from ... import wire
from ...errors import SettingError
from ...limits import Limits
from ...timers import Alarms
from ...wire import Message, Reason, RequestId
from .directory import Directory
from .drops import Drop
from .journal import Journal, Stats
from .outgoing import Outgoing
from .records import Attempt, Client, Remote, Request, Service
from .registry import Registry
from .roles import Role, Roles


class Work:
    """How much the turn may still do, in requests that end or are dispatched: the next turn does the rest."""

    __slots__ = ("left",)

    def __init__(self, most: int) -> None:
        self.left = most


class State:
    """The state of one broker's machine: its settings, its books, and its messages.

    `name` distinguishes it from the brokers to which it is linked.  `first_address` is the address of its first
    dispatch.  `turn_work` is how many requests may end in a turn, and how many that wait may be dispatched.
    """

    def __init__(self, limits: Limits, name: str, first_address: int, logger: logging.Logger, turn_work: int) -> None:
        self.limits = limits
        self.name = name
        self.first_address = first_address
        self.alarms = Alarms()
        """The tasks that become due when nothing happens."""
        self.read_until = 0.0
        """The time up to which all input has been read: a peer that was silent until then is silent."""
        self.roles = Roles()
        self.directory = Directory()
        self.registry = Registry(self.directory, limits.expiry)
        self.stats = Stats()
        self.journal = Journal(logger, self.alarms)
        self.outgoing = Outgoing()
        self.turn = 0
        """The number of the broker's current turn.  Only `end_turn` changes it."""
        self._turn_work = turn_work
        self.work = Work(turn_work)
        """How many requests may still end in this turn."""
        self.dispatching = Work(turn_work)
        """How many requests that wait may still be dispatched in this turn."""
        self.congested: dict[bytes, dict[Client, None]] = {}
        """Routing ids whose messages pile up, each with the clients still to be told which requests have ended."""
        self.draining = False
        """Whether no more requests and workers are accepted."""
        self.closing = False
        """Whether no more requests are dispatched."""

    def end_turn(self) -> None:
        """Begin the next turn, which may do as much as this one."""
        self.turn += 1
        self.work.left = self.dispatching.left = self._turn_work

    def count_invalid(self, reason: Reason, now: float) -> None:
        """Count and log an invalid message (C15)."""
        self.stats.invalid[reason] += 1
        self.journal.note(now, logging.WARNING, reason, "ignored an invalid message: %s", reason)


class Part:
    """A part of one broker's machine, which has at hand the state that it shares with the others."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._name = state.name
        self._limits = state.limits
        self._max_message, self._max_frames = state.limits.max_message, state.limits.max_frames
        self._roles = state.roles
        self._directory = state.directory
        self._registry = state.registry
        self._stats = state.stats
        self._journal = state.journal
        self._outgoing = state.outgoing


class Observer(Part):
    """Takes note of how requests end, for operators."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.active = False
        """Whether `ended` is to be called at the end of a request."""

    @abstractmethod
    def ended(self, request: Request, attempt: Attempt | None, outcome: str, now: float) -> None:
        """Take note of the end of a request; of its last attempt, if it ended at a worker."""

    @abstractmethod
    def failed(self, request: Request, attempt: Attempt | None, outcome: str, text: str, now: float) -> None:
        """Remember a request that was not answered with a FINAL, unless its client has given it up."""

    @abstractmethod
    def fields(self, request: Request, attempt: Attempt | None = None) -> dict[str, Any]:
        """Return the fields of a log line about a request."""


class Federation(Part):
    """The other brokers, as the rest of the machine knows them.  Here there are none; a `LinkDialog` has links to some.

    Their workers are `Remote` workers of this one, and the brokers that pass on requests are clients.
    """

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.opening: dict[bytes, Any] = {}
        """The links that other brokers have not accepted yet, by the first frames of their messages."""
        self.linked: dict[bytes, Any] = {}
        """All links, by the first frames of their messages."""
        self.announcing = state.alarms.add()
        """Set while there is anything to announce: `end_turn` is due then, too."""

    @property
    def incomplete(self) -> bool:
        """Whether other brokers may be about to announce their services, so that clients should wait."""
        return False

    # ── links, and messages of other brokers ─────────────────────────────────────────────────────────────────────────

    def add(self, kind: str, role: Role, where: str, identity: bytes) -> bytes:
        """Add a link that this broker opens; return the first frame of its messages."""
        raise SettingError(f"this broker was made without links: there can be none to {where} ({kind})")

    def opened(self, identity: bytes, role: Role | None, now: float) -> None:
        """Record that a link has a new connection."""

    def failed(self, identity: bytes, why: str, now: float) -> None:
        """Record that the connection for a link has ended, and why, or that there could be none."""

    def receive(self, message: Message, found: wire.Batched, role: Role, now: float) -> None:
        """Take in a message of another broker."""
        self._state.count_invalid(Reason.NO_HEADER, now)

    def receive_opening(self, message: Message, now: float) -> None:
        """Take in a message over a link that the other broker has not accepted yet."""

    def lose(self, identity: bytes, now: float) -> None:
        """Record that the connection with that routing id has ended."""

    # ── tasks of the machine ─────────────────────────────────────────────────────────────────────────────────────────

    def pass_on(self, remote: Remote, request: Request, now: float) -> None:
        """Pass a request on to another broker, as its client (C44)."""

    def cancel(self, attempt: Attempt) -> None:
        """Tell another broker that a request which was passed on has ended."""

    def hand_back(self, request: Request, attempt: Attempt | None, reason: Drop) -> bool:
        """Return a request that cannot be done here to the broker that passed it on.  Return whether one did."""
        return False

    def end_turn(self, changed: Iterable[Service], now: float) -> None:
        """Tell other brokers which services have changed."""

    def probe(self, identity: bytes) -> None:
        """Send a HEARTBEAT to the broker behind that routing id, to see whether it is connected."""

    def revoke(self, now: float) -> None:
        """End the links whose roles may no longer be links."""

    def drain(self) -> None:
        """Withdraw every service, announce none from now on, and open no links."""

    def held(self) -> Iterator[dict[RequestId, Attempt]]:
        """Yield the requests that are at each of the other brokers, by address."""
        yield from ()

    def farewell(self) -> None:
        """Tell other brokers that this one is gone."""

    def describe(self, now: float) -> list[dict[str, Any]]:
        """Return the links, as `mmi.brokers` shows them."""
        return []
