"""One connection of a Flux program as a machine: messages of RFC 3 ↔ effects.

It uses no socket and no clock.  The gateway answers some requests itself (`_OWN`).  Every other one becomes a request
to a service: `Found` says to which, and `Instance.brokers` at which brokers.  Each pair is an attempt; if there is no
such service, the next one follows.  The services that the program offers are in `programs.py`.
"""

import base64
from collections.abc import Callable
from typing import Any, Final
from uuid import uuid4

from ....clients.calls.call import Outcome
from ....clients.calls.reply import Reply
from ....mdp.errors import ServiceError, ServiceNotFound, SettingError
from ....workers.session.request import Request
from ..instance.instance import Instance
from ..instance.pubsub import EVENTS, PRIVATE
from ..wire.errnos import failure
from ..wire.framing import MAX_MESSAGE, Decoder
from ..wire.messages import (
    EAGAIN,
    ECANCELED,
    EHOSTUNREACH,
    ENODATA,
    ENOENT,
    ENOSYS,
    EPERM,
    EPROTO,
    NODEID_ANY,
    Event,
    FluxRequest,
    Invalid,
    Response,
    decode,
)
from ..wire.payloads import RAW, body_of, is_raw, json_payload, parse_json, payload_of, text_in
from .effects import Begin, Cancel, Close, Effect
from .output import OWNER, Output
from .programs import PROBE, RESERVED, Programs
from .subscriptions import Subscriptions

EVENT_SECONDS: Final = 30.0
"""How long an event may take to be published: the gateway at rank 0 may be restarting."""
PROBE_SECONDS: Final = 30.0
"""How long a program's service may take until the broker knows it."""


class Pending:
    """A request of the program: where it is tried, and who takes its outcomes."""

    __slots__ = ("at", "attempts", "body", "options", "rank", "request", "then", "wait")

    def __init__(self, request: FluxRequest, then: "Callable[[int, Pending, Outcome], None]") -> None:
        self.request = request
        self.then = then
        """Takes the outcomes."""
        self.attempts: list[tuple[str, str | None]] = []
        """The services, and their brokers, to try."""
        self.at = 0
        """The current attempt."""
        self.body = b""
        self.options: dict[str, Any] = {}
        self.rank = 0
        """The rank that a ping reaches."""
        self.wait: float | None = None
        """Seconds for which it may wait for the service; None if it must not wait."""


class FluxSession:
    """The machine of one connection.

    Args:
        instance: The state that all connections share.
        userid: The user at the other end.
        rolemask: The roles of this user.
        max_message: Maximum size of a message in bytes.
    """

    def __init__(
        self, instance: Instance, userid: int, rolemask: int = OWNER, *, max_message: int = MAX_MESSAGE
    ) -> None:
        self.uuid = str(uuid4())
        """Identifies the connection to Flux programs that serve it."""
        self._instance = instance
        self._userid = userid
        self._rolemask = rolemask
        self._decoder = Decoder(max_message)
        self._pending: dict[int, Pending] = {}
        self._last_number = 0
        self.output = Output(self._decoder, instance.owner)
        self._subscriptions = Subscriptions(instance.subscribers, userid, rolemask, self.output)
        self._programs = Programs(instance, userid, rolemask, self.output)
        instance.departures.arrived(self.uuid)

    @property
    def buffered(self) -> int:
        """The bytes of a message that has not arrived completely."""
        return self._decoder.buffered

    # ── the machine ──────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, data: bytes) -> None:
        """Take in bytes that have arrived from the program."""
        decoder = self._decoder
        decoder.feed(data)
        while (parts := decoder.next()) is not None:
            message = parts if isinstance(parts, Invalid) else decode(parts)
            if isinstance(message, FluxRequest):
                self._requested(message)
            elif isinstance(message, Response):
                self._programs.responded(message)
            elif isinstance(message, Event):
                self._published(message)
            elif isinstance(message, Invalid):
                self.output.do(Close(f"not a Flux message: {message.reason}"))
                return

    def answered(self, number: int, outcome: Outcome) -> None:
        """Take in a part, the reply or the error of a request that `Begin` made."""
        pending = self._pending.get(number)
        if pending is None:
            return
        if not isinstance(outcome, Reply):
            # A name that no service can have is that of no service.
            missing = isinstance(outcome, ServiceNotFound | SettingError)
            if missing and pending.at + 1 < len(pending.attempts):
                self._missed(pending)
                pending.at += 1
                self._attempt(number, pending)
                return
            del self._pending[number]
        elif outcome.final:
            del self._pending[number]
        pending.then(number, pending, outcome)

    def asked(self, number: int, request: Request) -> None:
        """Take in a request to a service that the program offers."""
        self._programs.asked(number, request)

    def withdrawn(self, number: int) -> None:
        """Take in that such a request is not wanted any longer."""
        self._programs.withdrawn(number)

    def refused(self, service: str, why: str) -> None:
        """Take in that a service cannot be offered: too many descriptors or sockets are in use."""
        name = service.removesuffix(".ping")
        for number, pending in self._pending.items():
            if pending.request.topic == "service.add" and pending.body == name.encode():
                del self._pending[number]
                self._not_added(pending, EAGAIN, why)
                self.output.do(Cancel(number))
                return

    def ended(self) -> None:
        """Take in that the connection is closed."""
        self._decoder.discard()  # now: this object is part of reference cycles
        self._subscriptions.ended()
        self._instance.departures.left(self.uuid)
        self._programs.ended()

    def take_messages(self) -> list[bytes]:
        """Return the messages to the program since the last call."""
        return self.output.take_messages()

    def take_events(self) -> list[Effect]:
        """Return the effects since the last call."""
        return self.output.take_effects()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _requested(self, request: FluxRequest) -> None:
        service, _, method = request.topic.rpartition(".")
        own = _OWN.get(request.topic)
        if own is not None:
            own(self, request)
        elif method == "ping" and service:
            self._ping(request, service)
        elif method == "disconnect" and request.noresponse:
            pass  # gateways send these notices themselves
        elif method == "cancel" and isinstance((parse_json(request.payload) or {}).get("matchtag"), int):
            self._cancel(request)
        elif request.topic.partition(".")[0] in RESERVED - {"mmi"}:
            self.output.fail(request, ENOSYS, f"Unknown service method '{request.topic}'")
        else:
            self._call(request)

    def _call(self, request: FluxRequest) -> None:
        brokers = self._instance.brokers(request.nodeid, upstream=request.upstream)
        if not brokers:
            self.output.fail(request, EHOSTUNREACH)
            return
        pending = Pending(request, self._called)
        pending.body = body_of(request.payload)
        services = self._instance.found.services(request.topic)
        pending.attempts = [(service, broker) for broker in brokers for service in services]
        flux = pending.options = self._credentials()
        flux["topic"] = request.topic
        flux["matchtag"] = request.matchtag
        flux["client"] = self.uuid
        flux["gateway"] = self._instance.departures.service
        if request.streaming:
            flux["streaming"] = True
        if request.noresponse:
            flux["noresponse"] = True
        if is_raw(request.payload):
            flux[RAW] = True
        if request.routes:
            flux["routes"] = [each.decode(errors="replace") for each in request.routes]
        self._begin(pending)

    def _called(self, number: int, pending: Pending, outcome: Outcome) -> None:
        """Respond with a part, the reply or the error."""
        del number
        request = pending.request
        if isinstance(outcome, ServiceNotFound | SettingError):
            self._missed(pending)
            self.output.fail(request, ENOSYS, f"No service matching {request.topic} is registered")
            return
        if not isinstance(outcome, Reply):
            self.output.fail(request, *failure(outcome))
            return
        if outcome.final or pending.at:
            self._instance.found.served(request.topic, pending.attempts[pending.at][0])
        payload = payload_of(outcome)
        if not request.streaming:
            if outcome.final:
                self.output.respond(request, payload)
        elif not outcome.final:
            self.output.respond(request, payload)
        else:
            if payload is not None:
                self.output.respond(request, payload)
            self.output.fail(request, ENODATA)

    def _missed(self, pending: Pending) -> None:
        if pending.attempts[pending.at][0] != pending.request.topic:
            self._instance.found.missed(pending.request.topic)

    def _begin(self, pending: Pending) -> None:
        self._last_number = number = self._last_number + 1
        self._pending[number] = pending
        self._attempt(number, pending)

    def _attempt(self, number: int, pending: Pending) -> None:
        service, broker = pending.attempts[pending.at]
        options: dict[str, Any] = {"flux": pending.options}
        if broker is not None:
            options["broker"] = broker
        wait = pending.wait is not None
        detached = pending.request.noresponse
        self.output.do(Begin(number, service, [pending.body], pending.wait, wait, options=options, detached=detached))

    def _credentials(self) -> dict[str, Any]:
        return {"userid": self._userid, "rolemask": self._rolemask}

    # ── ping ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ping(self, request: FluxRequest, service: str) -> None:
        """Ping a Flux program; or find out whether a broker knows the service, or answers."""
        if parse_json(request.payload) is None:
            self.output.fail(request, EPROTO)
            return
        brokers = self._instance.brokers(request.nodeid, upstream=request.upstream)
        if not brokers:
            self.output.fail(request, EHOSTUNREACH)
            return
        pending = Pending(request, self._pinged)
        pending.options = {**self._credentials(), "topic": request.topic, "matchtag": request.matchtag}
        pending.options |= {"client": self.uuid, "gateway": self._instance.departures.service}
        pending.body = body_of(request.payload)
        pending.rank = self._instance.rank_of(brokers[0])
        if service == "broker":
            pending.then = self._ponged
            pending.attempts = [("mmi.broker", brokers[0])]
        else:
            services = dict.fromkeys((request.topic, f"{service.partition('.')[0]}.ping"))
            pending.attempts = [(each, broker) for broker in brokers for each in services]
        self._begin(pending)

    def _pinged(self, number: int, pending: Pending, outcome: Outcome) -> None:
        """Respond with the program's answer; without one, ask the broker for the service."""
        if not isinstance(outcome, ServiceNotFound | SettingError):
            self._called(number, pending, outcome)
            return
        service = pending.request.topic.rpartition(".")[0]
        pending.then = self._ponged
        pending.body = service.encode()
        pending.attempts = [("mmi.service", pending.attempts[0][1])]
        pending.at = 0
        self._begin(pending)

    def _ponged(self, number: int, pending: Pending, outcome: Outcome) -> None:
        """Respond to a ping."""
        del number
        request = pending.request
        if not isinstance(outcome, Reply):
            self.output.fail(request, *failure(outcome))
        elif outcome == [b"403"]:
            self.output.fail(request, EPERM)
        elif outcome == [b"404"]:
            self.output.fail(request, ENOSYS, f"No service matching {request.topic} is registered")
        else:
            pong = parse_json(request.payload) or {}
            pong |= self._credentials()
            pong["rank"] = pending.rank
            pong["route"] = f"{self.uuid[:8]}!{self._instance.uuid[:8]}"
            self.output.respond(request, json_payload(pong))

    # ── cancel ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _cancel(self, request: FluxRequest) -> None:
        """Cancel a request, which ends with ENODATA if it is a stream.  A Flux program is told by its gateway.

        If there is no such request, it has ended meanwhile.
        """
        matchtag = (parse_json(request.payload) or {})["matchtag"]
        service = request.topic.partition(".")[0]
        for number, pending in self._pending.items():
            asked = pending.request
            if asked.matchtag == matchtag and asked.topic.partition(".")[0] == service and not asked.noresponse:
                del self._pending[number]
                self.output.do(Cancel(number))
                self.output.fail(asked, ENODATA if asked.streaming else ECANCELED)
                break
        self.output.respond(request)

    # ── attributes ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _get_attribute(self, request: FluxRequest) -> None:
        brokers = self._instance.brokers(request.nodeid, upstream=request.upstream)
        if not brokers:
            self.output.fail(request, EHOSTUNREACH)
            return
        found = self._instance.attributes(self._instance.rank_of(brokers[0]))
        name = text_in(request.payload, "name")
        if request.topic == "attr.list":
            self.output.respond(request, json_payload({"names": sorted(found)}))
        elif name is None:
            self.output.fail(request, EPROTO)
        elif name not in found:
            self.output.fail(request, ENOENT)
        else:
            value, flags = found[name]
            self.output.respond(request, json_payload({"value": value, "flags": flags}))

    def _set_attribute(self, request: FluxRequest) -> None:
        self.output.fail(request, EPERM)

    # ── services that the program offers ─────────────────────────────────────────────────────────────────────────────

    def _add_service(self, request: FluxRequest) -> None:
        name = text_in(request.payload, "service")
        if name is None:
            self.output.fail(request, EPROTO)
            return
        errnum = self._programs.add(name)
        if errnum:
            self.output.fail(request, errnum)
            return
        pending = Pending(request, self._is_known)
        pending.body = name.encode()
        pending.attempts = [("mmi.service", None)]
        self._begin(pending)

    def _is_known(self, number: int, pending: Pending, outcome: Outcome) -> None:
        """Respond once the broker knows the service.

        If it does not know it yet, find out with a request that the gateway answers itself.
        """
        name = pending.body.decode()
        if outcome == [b"403"]:
            self._not_added(pending, EPERM)
        elif isinstance(outcome, Reply) and outcome != [b"404"]:
            self.output.respond(pending.request)
        else:
            pending.then = self._is_there
            self._pending[number] = pending
            self.output.do(Begin(number, name, [b""], timeout=PROBE_SECONDS, options=PROBE))

    def _is_there(self, number: int, pending: Pending, outcome: Outcome) -> None:
        """Respond.  Without an answer, the broker does not know the service: it has refused the offer."""
        del number
        if isinstance(outcome, Reply | ServiceError):  # the error is that of another worker with this name
            self.output.respond(pending.request)
        else:
            self._not_added(pending, *failure(outcome))

    def _not_added(self, pending: Pending, errnum: int, text: str = "") -> None:
        """Stop offering a service, because the request to add it could not be met."""
        self._programs.remove(pending.body.decode())
        self.output.fail(pending.request, errnum, text)

    def _remove_service(self, request: FluxRequest) -> None:
        name = text_in(request.payload, "service")
        errnum = EPROTO if name is None else self._programs.remove(name)
        if errnum:
            self.output.fail(request, errnum)
        else:
            self.output.respond(request)

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _publish(self, request: FluxRequest) -> None:
        if parse_json(request.payload) is None:
            self.output.fail(request, EPROTO)
            return
        if request.nodeid not in (0, NODEID_ANY):
            self.output.fail(request, EPROTO, "this service is only available on rank 0")
            return
        pending = Pending(request, self._called)
        pending.body = body_of(request.payload)
        pending.attempts = [(EVENTS, None)]
        pending.options = self._credentials()
        pending.wait = EVENT_SECONDS
        self._begin(pending)

    def _published(self, event: Event) -> None:
        """Publish an event that the program has sent as a message."""
        wanted: dict[str, Any] = {"topic": event.topic, "flags": PRIVATE if event.private else 0}
        if event.payload is not None:
            wanted["payload"] = base64.b64encode(event.payload).decode()
        self._publish(FluxRequest("event.publish", json_payload(wanted), noresponse=True))


_OWN: Final[dict[str, Callable[[FluxSession, FluxRequest], None]]] = {
    "attr.get": FluxSession._get_attribute,
    "attr.list": FluxSession._get_attribute,
    "attr.set": FluxSession._set_attribute,
    "event.publish": FluxSession._publish,
    "event.subscribe": lambda session, request: session._subscriptions.subscribe(request),
    "event.unsubscribe": lambda session, request: session._subscriptions.unsubscribe(request),
    "service.add": FluxSession._add_service,
    "service.remove": FluxSession._remove_service,
}
"""Requests that the gateway answers itself, besides `ping`, `cancel` and `disconnect` of any service."""
