"""What the parts of a broker's machine share."""

import logging

from ..limits import Limits
from ..timers import Alarms
from .directory import Directory
from .events import Event
from .journal import Journal, Stats
from .outgoing import Outgoing
from .records import Client
from .registry import Registry
from .roles import Roles


class Work:
    """How much the turn may still do, in requests that end or are dispatched: the next turn does the rest."""

    __slots__ = ("left",)

    def __init__(self, most: int) -> None:
        self.left = most


class Shared:
    """What all parts of one broker's machine know: its settings, its books, and what goes out.

    `name` distinguishes it from the brokers to which it is linked.  `first_address` is the address of its first
    dispatch.  `turn_work` is how many requests may end in a turn, and how many that wait may be dispatched.
    """

    def __init__(self, limits: Limits, name: str, first_address: int, logger: logging.Logger, turn_work: int) -> None:
        self.limits = limits
        self.name = name
        self.first_address = first_address
        self.alarms = Alarms()
        """What is due, when nothing happens."""
        self.heard = 0.0
        """Everything that had arrived at this time has been taken in: whoever was silent until then is silent."""
        self.roles = Roles()
        self.directory = Directory()
        self.registry = Registry(self.directory, limits.expiry)
        self.stats = Stats()
        self.journal = Journal(logger, self.alarms)
        self.outgoing = Outgoing()
        self._turn_work = turn_work
        self.work = Work(turn_work)
        """How many requests may still end in this turn."""
        self.dispatching = Work(turn_work)
        """How many requests that wait may still be dispatched in this turn."""
        self.congested: dict[bytes, dict[Client, None]] = {}
        """Routing ids whose messages pile up, each with the clients still to be told which requests have ended."""
        self.draining = False
        """Whether no more requests and workers are accepted.  Read it, and call `drain`."""
        self.closing = False
        """Whether no more requests are dispatched."""
        self._events: list[Event] = []

    def drain(self) -> None:
        """Accept no more requests and workers."""
        self.draining = True

    def close(self) -> None:
        """Stop dispatching."""
        self.closing = True

    def end_turn(self) -> None:
        """Let the next turn do as much as this one."""
        self.work.left = self.dispatching.left = self._turn_work

    def ask(self, event: Event) -> None:
        """Ask the shell to do something."""
        self._events.append(event)

    def take_events(self) -> list[Event]:
        """Return what the shell is to do."""
        events, self._events = self._events, []
        return events


class Part:
    """A part of one broker's machine, which has at hand what it shares with the others."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._name = shared.name
        self._limits = shared.limits
        self._max_message, self._max_frames = shared.limits.max_message, shared.limits.max_frames
        self._roles = shared.roles
        self._directory = shared.directory
        self._registry = shared.registry
        self._stats = shared.stats
        self._journal = shared.journal
        self._outgoing = shared.outgoing
