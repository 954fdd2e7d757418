"""The conversation of `Titanic` and `AsyncTitanic` with Titanic: what to ask, when to ask again, and how bodies of
services with types are made and read."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, NamedTuple, Protocol
from uuid import UUID

from ...clients import (
    BrokerUnreachable,
    Reply,
    RequestTimeout,
    ServiceError,
    ServiceNotFound,
    SettingError,
    StreamInterrupted,
    WorkerLost,
)
from ...mdp.backoff import Backoff
from ...mdp.codecs import Codec, Coder
from ...mdp.codes import Code
from ...mdp.errors import InvalidUUID, TitanicError, UnknownTicket, ZmdpError
from ...mdp.services import BaseService, Streaming
from ...mdp.wire import service_name
from .submission import UNKNOWN_UUID, encode_options, new_uuid, read_uuid

LONG_POLL_SECONDS: Final = 15.0
"""How long one request for a reply waits.  Then the caller checks whether a Titanic is registered."""
POLL_SECONDS: Final = (0.05, 1.0)
"""The first and the longest pause between two requests for a reply, if Titanic does not let the caller wait."""
RESTART_SECONDS: Final = 15.0
"""How long a call is repeated while no Titanic is registered: one may be restarting, perhaps on a busy machine."""
RESTART_POLL_SECONDS: Final = 0.1
"""Pause between these calls."""
RETRYABLE: Final = (RequestTimeout, StreamInterrupted, WorkerLost)
"""Errors after which waiting for a reply goes on.  Titanic keeps it."""
ServiceOrName = BaseService[Any, Any] | str | bytes
REQUEST, REPLY, CLOSE, SCHEDULE = "titanic.request", "titanic.reply", "titanic.close", "titanic.schedule"


class Caller(Protocol):
    """A client, as this conversation uses it: `AsyncClient`, or one that blocks."""

    @property
    def protocol(self) -> str:
        """`"X1"`, or an older dialect."""

    @property
    def endpoint(self) -> str:
        """The endpoint of the broker in use."""

    @property
    def request(self) -> Callable[..., Awaitable[Reply]]:
        """Call a service and return its reply."""

    @property
    def stream(self) -> Callable[..., AsyncGenerator[Any, None]]:
        """Call a service and yield each part of its reply."""

    @property
    def available(self) -> Callable[[str], Awaitable[bool]]:
        """Return whether any worker offers a service."""


class Conversation:
    """The requests of one client to Titanic's services; `sleep` waits for seconds."""

    def __init__(self, caller: Caller, sleep: Callable[[float], Awaitable[None]]) -> None:
        self._caller = caller
        self._sleep = sleep

    async def submit(
        self,
        service: str | bytes,
        frames: Sequence[bytes],
        headers: Mapping[str, str] | None,
        options: Mapping[str, Any],
    ) -> tuple[str, str]:
        """Submit a request, and return its UUID and its service's name."""
        name = service_name(service)
        encoded = encode_options(options)
        if self._caller.protocol == "X1" and "key" not in encoded:
            # The client repeats a request after a lost connection.  By its UUID, as by a key, it is stored once.
            encoded["uuid"] = new_uuid().hex
        reply = await self._call(REQUEST, name, *(frames or (b"",)), options=encoded or None, headers=headers)
        raise_for_status(reply)
        return reply[1].decode(), name.decode()

    async def ready(self, uuid: str) -> bool:
        """Return whether the request has ended."""
        reply = await self._call(REPLY, uuid.encode())
        try:
            return parse_reply(reply, uuid) is not None
        except ServiceError:
            return True

    async def request(self, uuid: str) -> list[bytes]:
        """Return the body of the request; only for callers that speak X1."""
        reply = await self._call(REPLY, uuid.encode(), options={"request": True})
        return [*(parse_reply(reply, uuid) or ())]

    async def result(self, uuid: str, timeout: float | None, *, submitted: bool) -> Reply:
        """Return the reply's FINAL, waiting for it for `timeout` seconds.

        A Titanic that stops meanwhile may come back, if there has been one: when the caller `submitted` the request, or
        since it waits.
        """
        deadline = Deadline(timeout)
        if timeout == 0:
            found = parse_reply(await self._call(REPLY, uuid.encode()), uuid)
            if found is None:
                raise _no_reply(uuid, timeout)
            return found
        options = {"wait": True} if self._caller.protocol == "X1" else None
        pauses = Backoff(POLL_SECONDS)
        while True:
            try:
                reply = await self._caller.request(REPLY, uuid.encode(), options=options, timeout=deadline.step)
                if (found := parse_reply(reply, uuid)) is not None:
                    return found
                await self._sleep(deadline.limit(pauses.take()))
            except RETRYABLE as error:
                await self._await_return(error, deadline, pauses, registered=submitted)
            submitted = True
            deadline.check(uuid)

    async def partials(
        self, uuid: str, start: int, timeout: float | None, *, submitted: bool
    ) -> AsyncGenerator[Reply, None]:
        """Yield the reply's PARTIALs from number `start` on, across interrupted streams, until the request has ended.

        `timeout` limits the silence.  Raises the request's error.
        """
        deadline, pauses = Deadline(timeout), Backoff(POLL_SECONDS)
        while True:
            options = {"partials": True, "from": start, "wait": True}
            try:
                stream = self._caller.stream(REPLY, uuid.encode(), timeout=deadline.step, options=options)
                async with aclosing(stream):
                    async for part in stream:
                        submitted = True
                        if not part.final:
                            start += 1
                            deadline, pauses = Deadline(timeout), Backoff(POLL_SECONDS)
                            yield part
                        elif parse_reply(part, uuid) is not None:
                            return
                await self._sleep(deadline.limit(pauses.take()))  # Titanic has ended it before the request has ended
            except RETRYABLE as error:
                await self._await_return(error, deadline, pauses, registered=submitted)
            submitted = True
            deadline.check(uuid)

    async def close(self, uuid: str) -> None:
        """Close the request."""
        raise_for_status(await self._call(CLOSE, uuid.encode()))

    async def schedule(
        self,
        frames: Sequence[bytes],
        options: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Sequence[bytes]:
        """Ask `titanic.schedule`, and return the frames after the status."""
        reply = await self._call(SCHEDULE, *frames, options=options or None, headers=headers)
        raise_for_status(reply)
        return reply[1:]

    async def _call(self, service: str, *frames: bytes, **how: Any) -> Reply:
        """Call a service, again for `RESTART_SECONDS` while no Titanic is registered; then raise `ServiceNotFound`.

        Every call can be repeated: if a Titanic was lost with it, the request may be stored, but it has a UUID or a
        key.  Only X1 tells at once that there is no Titanic.
        """
        numbered = self._caller.protocol == "X1"
        until: float | None = None
        while True:
            try:
                return await self._caller.request(service, *frames, **how, wait=not numbered)
            except (ServiceNotFound, WorkerLost):
                now = time.monotonic()
                until = now + RESTART_SECONDS if until is None else until
                if now >= until:
                    raise no_titanic(self._caller.endpoint, service) from None
                await self._sleep(RESTART_POLL_SECONDS)
            except RequestTimeout as error:
                if not (numbered or isinstance(error, BrokerUnreachable) or await self._caller.available(service)):
                    raise no_titanic(self._caller.endpoint, service) from None
                raise

    async def _await_return(self, error: ZmdpError, deadline: "Deadline", pauses: Backoff, *, registered: bool) -> None:
        """Return when another try may succeed; otherwise raise the error, or `ServiceNotFound`.

        A Titanic that was `registered` before may come back.  Others get `RESTART_SECONDS`, or the time until the
        deadline, to register.
        """
        if isinstance(error, BrokerUnreachable):
            raise error
        if not isinstance(error, RequestTimeout):
            await self._sleep(deadline.limit(pauses.take()))
        elif not registered:
            until = time.monotonic() + min(RESTART_SECONDS, deadline.remaining)
            while not await self._caller.available(REPLY):
                if time.monotonic() >= until:
                    raise no_titanic(self._caller.endpoint, REPLY) from None
                await self._sleep(RESTART_POLL_SECONDS)


# ── replies and errors ───────────────────────────────────────────────────────────────────────────────────────────────


def uuid_text(uuid: str | bytes | UUID) -> str:
    """Return `uuid` as 32 lower-case hex digits.

    Raises:
        InvalidUUID: It is not a UUID.
    """
    text = uuid.hex if isinstance(uuid, UUID) else uuid.decode(errors="replace") if isinstance(uuid, bytes) else uuid
    found = read_uuid(text)
    if found is None:
        raise InvalidUUID(f"{uuid!r:.150} is not a UUID: it must be 32 hex digits, with or without dashes")
    return found.hex


def parse_reply(reply: Reply, uuid: str) -> Reply | None:
    """Return the reply that `titanic.reply` delivers, or None if it is not there yet.

    Raises:
        ServiceError: The request failed.
        UnknownTicket: Titanic does not know the request.
    """
    code, text = _status(reply)
    if code == Code.FAILED and len(reply) > 2 and reply[1].isdigit():  # without more frames, it is Titanic that failed
        detail = reply[3] if len(reply) > 3 else None
        raise ServiceError(int(reply[1]), text, detail, service=reply[2].decode(errors="replace"))
    raise_for_status(reply, uuid)
    return None if code == 300 else Reply(reply[1:], service=reply.service, final=True)


def no_titanic(endpoint: str, service: str) -> ServiceNotFound:
    """Return the error for a broker at which no Titanic is registered."""
    return ServiceNotFound(
        f"no Titanic is registered at {endpoint}, so nobody offers {service}: start one with `titanic serve`",
        service=service,
    )


def raise_for_status(reply: Reply, uuid: str = "") -> None:
    """Raise the error that Titanic's reply reports, if any."""
    code, text = _status(reply)
    if code in {200, 300}:
        return
    reason = reply[1].decode(errors="replace") if len(reply) > 1 else ""
    if code == Code.MALFORMED and (reason == UNKNOWN_UUID or (uuid and not reason)):  # 0.2 gets no reason (C37)
        unknown = f"Titanic does not know request {uuid}: it was closed, its result has expired, or it never existed"
        raise UnknownTicket(unknown, service=reply.service, code=code, text=text, reason=reason)
    if code == Code.MALFORMED:
        raise SettingError(f"Titanic rejected the request: {text}")
    raise TitanicError(
        f"Titanic failed with {code}: {text}", service=reply.service, code=code, text=text, reason=reason
    )


def _status(reply: Sequence[bytes]) -> tuple[int, str]:
    code, text = reply[0][:3], reply[0][4:]
    return int(code) if code.isdigit() else int(Code.FAILED), text.decode(errors="replace")


def _no_reply(uuid: str, timeout: float) -> RequestTimeout:
    return RequestTimeout(f"request {uuid} has no reply after {timeout:g} s", service=REPLY)


# ── services with types, or with a codec ─────────────────────────────────────────────────────────────────────────────


class Reader(NamedTuple):
    """How a ticket reads the reply's FINAL, and each PARTIAL."""

    final: Callable[[Reply], Any]
    part: Callable[[Reply], Any]


def _frames(reply: Reply) -> Reply:
    return reply


FRAMES: Final = Reader(_frames, _frames)


def reader_of(service: ServiceOrName | None, codec: str | Codec | None) -> Reader:
    """Return how replies of `service` are read: as values if it has types or there is a codec, otherwise as they are.

    Raises `SettingError` for a codec that does not exist.
    """
    if codec is not None:
        coder = _coder(service, codec)
        return Reader(coder.decode, coder.decode)
    if isinstance(service, Streaming):
        return Reader(lambda final: None if service.ends(final) else service.decode_reply(final), service.decode_reply)
    if isinstance(service, BaseService):
        return Reader(service.decode_reply, _frames)
    return FRAMES


def name_of(service: ServiceOrName) -> str | bytes:
    """Return the name of `service`."""
    return service.name if isinstance(service, BaseService) else service


def body_of(service: ServiceOrName, given: Sequence[Any], codec: str | Codec | None = None) -> Sequence[bytes]:
    """Return the body of a request: that of one value or none, or frames if `service` is a name without a codec.

    Raises `SettingError` for several values, `CodecError` for one that cannot be sent.
    """
    if codec is not None:
        coder = _coder(service, codec)
        if len(given) > 1:
            raise SettingError(f"a codec sends one value, not {len(given)}")
        return coder.encode(given[0] if given else None)
    return service.encode_request(given) if isinstance(service, BaseService) else given


def _coder(service: ServiceOrName | None, codec: str | Codec) -> Coder:
    if isinstance(service, BaseService):
        raise SettingError(f"codec is {codec!r}, but {service!r} has a codec of its own")
    return Coder(codec)


def options_of(service: ServiceOrName, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a submission: those that are given, and for the others the service's own."""
    if not isinstance(service, BaseService) or not service.submission:
        return options
    return {**service.submission, **{name: value for name, value in options.items() if value is not None}}


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Deadline:
    """A number of seconds from now, or None for no end."""

    def __init__(self, timeout: float | None) -> None:
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0
        ):
            raise SettingError(f"timeout is {timeout!r}: it must be a number of seconds, 0 or more, or None")
        self._timeout = timeout
        self._at = None if timeout is None else time.monotonic() + timeout

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; without one, those of a long poll."""
        return LONG_POLL_SECONDS if self._at is None else self._at - time.monotonic()

    @property
    def step(self) -> float:
        """Seconds for the next call."""
        remaining = self.remaining
        return min(remaining, LONG_POLL_SECONDS) if remaining > 0 else LONG_POLL_SECONDS

    def limit(self, pause: float) -> float:
        """Return how long to pause: no longer than until the deadline."""
        return max(0.0, min(pause, self.remaining))

    def check(self, uuid: str) -> None:
        """Raise `RequestTimeout` if the deadline has passed."""
        if self._timeout is not None and self.remaining <= 0:
            raise _no_reply(uuid, self._timeout)
