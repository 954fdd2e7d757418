"""Who may connect to a broker, and in which role: its access file, which can be reloaded while it runs."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import zmq

from ..access import SETTLE_SECONDS, Access, FileState, state_of
from ..errors import SettingError
from ..logs import counted
from .machine import Broker
from .ports import Port
from .roles import Role
from .sockets import Sockets
from .zap import Gate

log = logging.getLogger("zmdp.broker")


class Door:
    """Decides who may connect at the sockets of a broker: everybody, unless it is opened with an access file."""

    def __init__(self, broker: Broker, sockets: Sockets) -> None:
        self.access: Access | None = None
        self.users: dict[bytes, Role] | None = None
        """The role of each public key; None without access control."""
        self.gate: Gate | None = None
        """Answers handshakes; None without access control."""
        self.on_reload: Callable[[Access], None] | None = None
        """Called in the loop's thread after the access file was read again."""
        self.around_reload: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered in the loop's thread while the access file is read again."""
        self._broker = broker
        self._sockets = sockets
        self._reload = False
        """A reload was asked for."""
        self._seen: FileState = None
        """The state of the access file when it was looked at last."""
        self._settled_at: float | None = None
        """When it is read, if it is still in that state."""

    def open(self, access: Access | None, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Admit only the keys of `access`, if it is given; call it before the main ROUTER is bound.

        Raises `BindError` if the context has a ZAP handler already.
        """
        if access is None:
            return
        self.gate = Gate(context, access, log)
        self.gate.counts = self._sockets.main.connections.counts
        self._sockets.wait_for(self.gate.descriptor)
        self._sockets.main.protect(self.gate)
        self._grant(access, self._broker.started)

    def admit_to(self, port: Port) -> None:
        """Give the peers at one more socket their roles."""
        if self.access is not None and self.users is not None:
            port.grant(self.access, self.users)

    def _grant(self, access: Access, now: float) -> None:
        self.access = access
        self._broker.grant(access.roles, now)
        roles = self._broker.roles
        self.users = {key: roles.named(role) for key, role in access.keys.items()}
        for port in (self._sockets.main, *self._sockets.ports.values()):
            port.grant(access, self.users)

    def ask_to_reload(self) -> None:
        """Have the access file read again.  Thread-safe."""
        self._reload = True

    def tend(self, now: float) -> bool:
        """Reload the access file if that is due, and answer handshakes.  Return whether there may be more to do."""
        more = False
        if self._reload:
            self._reload = False
            self._look_at_file(now)
        elif self._settled_at is not None and now >= self._settled_at:
            with self.around_reload():
                self._reload_access(now)
            more = True
        return (self.gate is not None and self.gate.answer(now)) or more

    def deadline(self) -> float | None:
        """Return when `tend` is due, or None."""
        due = None if self.gate is None else self.gate.deadline()
        if due is None or self._settled_at is None:
            return self._settled_at if due is None else due
        return min(due, self._settled_at)

    def _look_at_file(self, now: float) -> None:
        if self.access is None:
            log.info("nothing to reload: the broker was started without --access")
            return
        self._seen = state_of(self.access.path)
        self._settled_at = now + SETTLE_SECONDS

    def _reload_access(self, now: float) -> None:
        before, self._settled_at = self.access, None
        if self.gate is None or before is None:
            return
        error: SettingError | None = None
        try:
            access = before.read_again()
        except SettingError as raised:
            error = raised
        if state_of(before.path) != self._seen:  # it is being written
            self._look_at_file(now)
            return
        if error is not None:
            log.error("reloaded nothing, the previous state of the access file still applies: %s", error)
            return
        if access.secret_key != before.secret_key:
            log.warning("the broker's own key has changed: restart the broker to use it")
        self.gate.access = access
        lost = before.lost_in(access)
        for port in (self._sockets.main, *self._sockets.ports.values()):
            port.end_users(lost)
        self._grant(access, now)
        if self.on_reload is not None:
            self.on_reload(access)
        roles, keys = counted(len(access.roles), "role"), counted(len(access.keys), "key")
        log.info("reloaded %s: %s, %s", access.path, roles, keys)

    def close(self) -> None:
        """Answer no more handshakes.  Idempotent."""
        if self.gate is not None:
            self.gate.close()
