"""The dialog with clients: requests, cancellations and heartbeats, valid or not (C2, C15, C19 to C25)."""

from typing import Final

from ... import wire
from ...codes import Code
from ...timers import NEVER
from ...wire import Message, Reason, batch
from .admission import Admission
from .drops import Drop
from .endings import Endings
from .records import Client, PeerKey, Request, Service, key_of
from .requests import Requests
from .roles import Role
from .state import Federation, Part, State

GIVEN_UP: Final = 60.0
"""A client that was given up is not answered until it has been silent for this many seconds."""
MAX_GIVEN_UP: Final = 5000
"""Maximum number of such clients that are remembered."""


class GivenUp:
    """Peers that did not keep up and so missed messages.

    Since it is not answered, an X1 client considers the broker dead, reconnects, and resends its outstanding requests.
    A proxy stands for all peers behind it.
    """

    def __init__(self) -> None:
        self._until: dict[PeerKey, float] = {}
        """The time up to which each client that was given up is not answered; the latest last."""

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: PeerKey, now: float) -> None:
        """Give up a peer."""
        self._until.pop(key, None)  # the one that is forgotten first is the one that has been silent for longest
        self._until[key] = now + GIVEN_UP
        if len(self._until) > MAX_GIVEN_UP:
            del self._until[next(iter(self._until))]

    def forget(self, identity: bytes) -> None:
        """Answer the peer with that routing id again: it is another connection."""
        self._until.pop(identity, None)

    def includes(self, key: PeerKey, now: float) -> bool:
        """Return whether a peer that has just sent a message is not answered."""
        proxy = key if isinstance(key, bytes) else key[0]
        until = max(self._until.get(key, 0.0), self._until.get(proxy, 0.0))
        if now >= until:
            self._until.pop(key, None)
            self._until.pop(proxy, None)
            return False
        # This message stays unanswered too, which extends the time.  A peer behind a proxy reconnects to the proxy, so
        # it is given up by itself; otherwise its peers would keep the whole proxy given up.
        self.add(key, now)
        return True


class ClientDialog(Part):
    """The dialog of one broker with its clients."""

    def __init__(
        self, state: State, federation: Federation, requests: Requests, endings: Endings, admission: Admission
    ) -> None:
        super().__init__(state)
        self._federation = federation
        self._requests = requests
        self._endings = endings
        self._admission = admission
        self._given_up = GivenUp()

    # ── commands of clients ──────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, command: wire.Request, role: Role, now: float) -> None:
        """Take in a request that is a message of its own, as in every dialect but X1."""
        client = self._client(command.route, role)
        if client is not None:
            self._request(command, client, now)

    def receive_batch(self, message: Message, found: wire.Batched, role: Role, now: float) -> None:
        """Take in an X1 message of a client (C43)."""
        if len(self._given_up) and self._given_up.includes(key_of(found.route), now):
            return
        client = self._client(found.route, role)
        if client is None:
            return
        if not client.is_broker:
            client.route = found.route
        if found.bare:
            self._heartbeat(client)
            return
        asks_for_limits = False
        for command in batch.from_client(message, found.at, found.route, self._max_message, self._max_frames):
            if isinstance(command, wire.Request):
                self._request(command, client, now)
            elif isinstance(command, wire.Cancel):
                if not self._requests.cancel(client, command.id, now):
                    self._invalid(wire.Invalid(Reason.UNKNOWN_NUMBER, command.route, command.id), client, now)
            elif isinstance(command, wire.Limits):
                asks_for_limits = True
            else:
                self._invalid(command, client, now)
        if asks_for_limits:
            self._outgoing.say(client, wire.limits(client.route, self._max_message, self._max_frames))

    def _client(self, route: wire.Route, role: Role) -> Client | None:
        """Return the client with that route; None if it belongs to another role (C45)."""
        client = self._directory.client(route, role)
        if client.role is role:
            return client
        self._stats.other_role += 1
        return None

    def _request(self, command: wire.Request, client: Client, now: float) -> None:
        self._stats.requests += 1
        name, options = command.service, command.options
        number = command.id if isinstance(command.id, int) else None
        if number is not None and number in client.numbered:
            self._invalid(wire.Invalid(Reason.NUMBER_IN_USE, command.route, number), client, now)
            return
        own = name.startswith(wire.MMI)
        service = Service(name) if own else self._directory.service(name)
        deadline = NEVER if command.ttl is None else now + command.ttl
        delimited = len(command.route) > 1
        request = Request(
            client, command.header, service, command.body,
            number=number, delimited=delimited, options=options, deadline=deadline,
        )  # fmt: skip
        if (client.role.restricted or options.claims) and (denial := self._authorise(request)) is not None:
            self._requests.report(request, denial, now)
            self._registry.remember_end(request)
            return
        self._admission.admit(request, own, client.role, now)

    def _authorise(self, request: Request) -> Drop | None:
        """Write into the options of `request` on whose behalf it is made.  Return why it is not allowed, or None."""
        role, name, options = request.client.role, request.service.name, request.options
        user = role
        if role.restricted and options.on_behalf is not None:
            if not role.on_behalf:
                return Drop.NOT_ON_BEHALF
            user = self._state.roles.named(options.on_behalf)
        request.sign(user.signature)
        if not role.may_call(name):
            return Drop.NOT_ALLOWED
        return None if user.may_call(name) else Drop.USER_NOT_ALLOWED

    def _invalid(self, command: wire.Invalid, client: Client, now: float) -> None:
        # C15: dropped and counted by reason; the peer's other traffic is judged on its own.  X1 clients get an ERROR.
        self._state.count_invalid(command.reason, now)
        if command.id is None:
            return
        code, text = Code.MALFORMED, f"malformed: {command.reason}"
        if command.over_limit:
            code = Code.TOO_LARGE
            text = f"a request may have up to {self._max_message} bytes in {self._max_frames} frames"
        self._outgoing.error(client, command.id, code.value, text.encode(), [], command.reason.value.encode(), 0)

    def _heartbeat(self, client: Client) -> None:
        """Answer a HEARTBEAT."""
        self._stats.heartbeats += 1
        # A broker that has just started waits until the services of other brokers can be reached.
        away = self._state.draining or self._federation.incomplete
        answer = wire.disconnect if away else wire.heartbeat
        self._outgoing.say(client, answer(client.route, wire.CX1))

    # ── reports of the machine ───────────────────────────────────────────────────────────────────────────────────────

    def probe(self, identity: bytes) -> None:
        """Send a HEARTBEAT to the clients behind that routing id that wait for a reply."""
        for client in self._directory.clients_at(identity):
            if client.numbered and not client.is_broker:
                self._outgoing.say(client, wire.heartbeat(client.route, wire.CX1))

    def drain(self) -> None:
        """Tell the clients that wait for a reply that the broker drains."""
        for client in self._directory.clients.values():
            if client.numbered and not client.is_broker:
                self._outgoing.say(client, wire.disconnect(client.route, wire.CX1))

    def give_up(self, identity: bytes, now: float) -> None:
        """No longer answer the clients behind that routing id, which missed messages."""
        self._given_up.add(identity, now)

    def disconnected(self, identity: bytes) -> None:
        """Record that the connection with that routing id has ended: another one may have it next."""
        self._given_up.forget(identity)

    def lose(self, identity: bytes, now: float) -> None:
        """Drop the requests of the clients behind that routing id."""
        for client in self._directory.clients_at(identity):
            self._endings.client(client, now)
