"""What the rooms of a broker share."""

import logging

from ..limits import Limits
from .directory import Directory
from .events import Event
from .journal import Journal, Stats
from .outgoing import Outgoing
from .registry import Registry
from .roles import Roles


class Shared:
    """What all rooms of one broker know: its settings, its books, and what goes out.

    `name` distinguishes it from the brokers to which it is linked.  `first_address` is the address of its first
    dispatch.
    """

    def __init__(self, limits: Limits, name: str, first_address: int, logger: logging.Logger) -> None:
        self.limits = limits
        self.name = name
        self.first_address = first_address
        self.roles = Roles()
        self.directory = Directory()
        self.registry = Registry(self.directory, limits.expiry)
        self.stats = Stats()
        self.journal = Journal(logger)
        self.outgoing = Outgoing()
        self.draining = False
        """Whether no more requests and workers are accepted.  Read it, and call `drain`."""
        self._events: list[Event] = []

    def drain(self) -> None:
        """Accept no more requests and workers."""
        self.draining = True

    def ask(self, event: Event) -> None:
        """Ask the shell to do something."""
        self._events.append(event)

    def take_events(self) -> list[Event]:
        """Return what the shell is to do."""
        events, self._events = self._events, []
        return events
