"""The Flux program at the other end as a worker: the services that it offers, and the requests that it was passed.

A pure machine, part of that of the connection (`session.py`).  For each service `x`, the gateway offers `x`, and
`x.ping`, so that pings reach the program, while gateways answer them for all other services.

A request gets two routes: on top one that no other request has, by which its response is recognized, and below the uuid
of the client that sent it, which is the same in all its requests.
"""

import re
from dataclasses import replace
from typing import Any, Final

from ....workers.session.request import Request
from ..instance.departures import GATEWAY
from ..instance.instance import Instance
from ..instance.pubsub import credentials
from ..wire.errnos import reported
from ..wire.messages import (
    EAGAIN,
    EEXIST,
    EINVAL,
    ENODATA,
    ENOENT,
    EPERM,
    MAX_ROUTE,
    ROLE_OWNER,
    FluxRequest,
    Response,
    Routes,
    valid_topic,
)
from ..wire.payloads import RAW, body_of, json_payload, parse_string, payload_of
from .effects import Answer, Fail, Offer, Withdraw
from .output import Output

MAX_SERVICES: Final = 100
"""Maximum number of services of one connection."""
MAX_HOPS: Final = 100
"""Maximum number of a request's routes that are passed on."""
RESERVED: Final = frozenset({"attr", "broker", "event", "flux", "mmi", "service"})
"""Names that gateways and brokers answer themselves."""
PROBE: Final = {"flux": {"probe": True}}
"""The options of a request by which a gateway finds out that the broker knows a service."""
_GATEWAY: Final = re.compile(re.escape(GATEWAY) + "[0-9a-f]{32}")
_NAME: Final = re.compile(r"[!-~]{1,200}")
_U32: Final = 0xFFFFFFFF


class Programs:
    """The services of one connection."""

    def __init__(self, instance: Instance, userid: int, rolemask: int, output: Output) -> None:
        self._names: set[str] = set()
        self._instance = instance
        self._userid = userid
        self._rolemask = rolemask
        self._output = output
        self._passed: dict[bytes, tuple[int, FluxRequest]] = {}
        """The number and the message of each request that the program has not answered, by its topmost route."""
        self._numbers: dict[int, bytes] = {}
        """The route of each, by number."""
        self._clients: dict[str, tuple[str, dict[str, FluxRequest]]] = {}
        """The gateway of each client, by its uuid, and its first request to each service, without the payload."""

    # ── services ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, name: str) -> int:
        """Begin to offer a service.  Return an errno, or 0."""
        if not _NAME.fullmatch(name) or "." in name:
            return EINVAL
        if not self._rolemask & ROLE_OWNER and not name.startswith(f"{self._userid}-"):
            return EPERM
        if name in RESERVED or name in self._instance.programs:
            return EEXIST
        if len(self._names) >= MAX_SERVICES or len(self._instance.programs) >= self._instance.max_services:
            return EAGAIN
        self._names.add(name)
        self._instance.programs.add(name)
        self._output.do(Offer(f"{name}.ping"), Offer(name))
        return 0

    def remove(self, name: str) -> int:
        """Stop offering a service.  Return an errno, or 0."""
        if name not in self._names:
            return ENOENT
        self._names.remove(name)
        self._instance.programs.remove(name)
        self._output.do(Withdraw(f"{name}.ping"), Withdraw(name))
        return 0

    def ended(self) -> None:
        """Take in that the connection is closed."""
        self._instance.programs -= self._names
        for client, (gateway, _) in self._clients.items():
            self._instance.departures.forget(gateway, client, self._gone)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def asked(self, number: int, request: Request) -> None:
        """Pass a request to the program."""
        found = request.options.get("flux")
        flux: dict[str, Any] = found if isinstance(found, dict) else {}
        if flux.get("probe") is True:
            self._output.do(Answer(number, [b""], final=True))
            return
        message = _message(number, request, flux)
        self._watch(message, flux)
        self._output.write(message)
        if message.noresponse:
            self._output.do(Answer(number, [b""], final=True))
        else:
            self._numbers[number] = route = b"%d" % number
            self._passed[route] = number, message

    def withdrawn(self, number: int) -> None:
        """Tell the program that its responses are no longer wanted.

        Only streams are cancelled: programs that do not stream do not understand cancel requests.
        """
        route = self._numbers.pop(number, None)
        if route is None:
            return
        _, asked = self._passed.pop(route)
        if asked.streaming:
            self._notify("cancel", asked, json_payload({"matchtag": asked.matchtag}))

    def responded(self, response: Response) -> None:
        """Take in a response.  One that belongs to no request is ignored: it is late, or has lost its routes."""
        found = self._passed.get(response.routes[0]) if response.routes else None
        if found is None:
            return
        number, asked = found
        if not response.errnum and asked.streaming and response.streaming:
            self._output.do(Answer(number, [body_of(response.payload)], final=False))
            return
        del self._passed[self._numbers.pop(number)]
        if not response.errnum:
            self._output.do(Answer(number, [body_of(response.payload)], final=True))
        elif response.errnum == ENODATA and asked.streaming:
            self._output.do(Answer(number, [b""], final=True))
        else:
            self._output.do(Fail(number, *reported(response.errnum, parse_string(response.payload) or "")))

    # ── clients that leave ───────────────────────────────────────────────────────────────────────────────────────────

    def _watch(self, message: FluxRequest, flux: dict[str, Any]) -> None:
        gateway, client = flux.get("gateway"), flux.get("client")
        if not (isinstance(gateway, str) and _GATEWAY.fullmatch(gateway) and isinstance(client, str)):
            return  # a client of the broker has no connection that could end
        if message.noresponse or not _is_route(client):
            return
        new = client not in self._clients
        _, first = self._clients.setdefault(client, (gateway, {}))
        first.setdefault(_first_word(message.topic), replace(message, payload=None))
        if new:
            self._instance.departures.watch(gateway, client, self._gone)

    def _gone(self, client: str) -> None:
        """Tell the program that a client has left."""
        _, first = self._clients.pop(client, ("", {}))
        for asked in first.values():
            self._notify("disconnect", asked)
        self._output.wake()

    def _notify(self, method: str, asked: FluxRequest, payload: bytes | None = None) -> None:
        """Send a request to the service of `asked` that seems to come from the same client."""
        topic = f"{_first_word(asked.topic)}.{method}"
        self._output.write(
            FluxRequest(
                topic, payload, routes=asked.routes, userid=asked.userid, rolemask=asked.rolemask, noresponse=True
            )
        )  # fmt: skip


def _message(number: int, request: Request, flux: dict[str, Any]) -> FluxRequest:
    """Return the request as the program gets it.

    Options of other gateways are taken as they are, if they can be sent.  For clients of the broker, the topic is the
    name of the service by default.
    """
    topic, matchtag, client, hops = flux.get("topic"), flux.get("matchtag"), flux.get("client"), flux.get("routes")
    if not (isinstance(topic, str) and valid_topic(topic) and _first_word(topic) == _first_word(request.service)):
        topic = request.service
    if not (type(matchtag) is int and 0 <= matchtag <= _U32):
        matchtag = number & _U32
    userid, rolemask = credentials(flux)
    sender = str(client).encode() if _is_route(client) else request.client
    routes: Routes = (b"%d" % number, sender[:MAX_ROUTE], *_hops(hops))
    noresponse = flux.get("noresponse") is True
    streaming = not noresponse and flux.get("streaming") is True
    payload = b"".join(request) if flux.get(RAW) is True else payload_of(request)
    return FluxRequest(topic, payload, matchtag, routes=routes, userid=userid, rolemask=rolemask, noresponse=noresponse,
                   streaming=streaming)  # fmt: skip


def _hops(routes: object) -> list[bytes]:
    """Return the routes that a request had when it reached its gateway, or none if they cannot be sent."""
    if not isinstance(routes, list) or len(routes) > MAX_HOPS:
        return []
    return [each.encode() for each in routes] if all(map(_is_route, routes)) else []


def _is_route(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_ROUTE and value.isascii() and value.isprintable()


def _first_word(topic: str) -> str:
    return topic.partition(".")[0]
