"""Who may connect to a broker, and in which role: its access file, which can be reloaded while it runs."""

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import zmq

from ...errors import SettingError
from ...program.logs import counted
from ...security.access import SETTLE_SECONDS, Access, FileState, state_of
from ...timers import Alarms
from ..core.roles import Role
from ..machine import Broker
from .connections import Connections
from .gate import Gate
from .listener import RouterPort
from .ports import Port, Sockets

log = logging.getLogger("zmdp.broker")


class AccessControl:
    """Decides who may connect to a broker: every peer, unless it is opened with an access file."""

    def __init__(self, broker: Broker, sockets: Sockets, connections: Connections, alarms: Alarms) -> None:
        self.gate: Gate | None = None
        """Answers handshakes; None without access control."""
        self.on_reload: Callable[[Access], None] | None = None
        """Called in the loop's thread after the access file was read again."""
        self.around_reload: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered in the loop's thread while the access file is read again."""
        self._broker = broker
        self._sockets = sockets
        self._connections = connections
        self._reload = False
        """A reload was asked for."""
        self._seen: FileState = None
        """The state of the access file when it was looked at last."""
        self.settling = alarms.add(self._reload_access)
        """Set to when it is read, if it is still in that state."""
        self._answering = alarms.add(self._answer)
        """Set while there may be more handshakes."""

    @property
    def access(self) -> Access | None:
        """The content of the access file; None without access control."""
        return self._connections.access

    @property
    def users(self) -> dict[bytes, Role] | None:
        """The role of each public key; None without access control."""
        return self._connections.users

    def open(self, access: Access | None, main: RouterPort, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Admit only the keys of `access`, if it is given; call it before `main` is bound.

        Raises `BindError` if the context has a ZAP handler already.
        """
        if access is None:
            return
        self.gate = Gate(context, access, self._connections)
        self._sockets.watch(self.gate.descriptor, self._answer)
        main.protect(self.gate)
        self._grant(access, self._broker.started)

    def admit_to(self, port: Port) -> None:
        """Give the peers at one more socket their roles."""
        if self.users is not None:
            port.grant(self.users)

    def _grant(self, access: Access, now: float) -> None:
        self._connections.access = access
        self._broker.grant(access.roles, now)
        self._broker.limit(access.limits, now)
        roles = self._broker.roles
        self._connections.users = {key: roles.named(role) for key, role in access.keys.items()}
        for port in self._sockets.ports.values():
            self.admit_to(port)

    def ask_to_reload(self) -> None:
        """Have the access file read again, after the loop is woken.  Thread-safe."""
        self._reload = True

    def _answer(self, now: float) -> None:
        """Answer handshakes."""
        more = self.gate is not None and self.gate.answer(now)
        self._answering.set(now if more else math.inf)

    def woken(self, now: float) -> None:
        """Look at the access file if a reload was asked for."""
        if self._reload:
            self._reload = False
            self._look_at_file(now)

    def _look_at_file(self, now: float) -> None:
        if self.access is None:
            log.info("nothing to reload: the broker was started without --access")
            return
        self._seen = state_of(self.access.path)
        self.settling.set(now + SETTLE_SECONDS)

    def _reload_access(self, now: float) -> None:
        self.settling.set(math.inf)
        with self.around_reload():
            self._read_again(now)

    def _read_again(self, now: float) -> None:
        before = self.access
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
        for port in self._sockets.ports.values():
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
