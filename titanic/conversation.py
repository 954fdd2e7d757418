"""Sans-I/O conversation between a caller and Titanic, shared by `Titanic` and `AsyncTitanic`.

Each operation is a generator of steps.  It yields `CallTitanic`, `CheckAvailable` or `Sleep`, receives the result of
that step (or its exception), and returns the operation's result.  The clients perform the steps, one for threads and
one for asyncio.  They read streams of PARTIALs themselves, and `PartialsCursor` keeps track.
"""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeAlias, TypeVar
from uuid import UUID

from ..clients import (
    BrokerUnreachable,
    Reply,
    RequestTimeout,
    ServiceError,
    ServiceNotFound,
    SettingError,
    StreamInterrupted,
    WorkerLost,
)
from ..mdp.codes import Code
from ..mdp.errors import InvalidUUID, TitanicError, UnknownTicket
from ..mdp.wire import service_name
from .submission import encode_options, read_uuid
from .uuids import UNKNOWN_UUID, new_uuid_hex

LONG_POLL_SECONDS: Final = 15.0
"""How long one request for a reply waits.  Then the caller checks whether a Titanic is registered."""
POLL_SECONDS: Final = (0.05, 1.0)
"""The first and the longest pause between two requests for a reply, if Titanic does not let the caller wait."""
RESTART_SECONDS: Final = 15.0
"""How long a call is repeated while no Titanic is registered: one may be restarting, perhaps on a busy machine."""
RESTART_POLL_SECONDS: Final = 0.1
"""Pause between these calls."""
REQUEST, REPLY, CLOSE, SCHEDULE = "titanic.request", "titanic.reply", "titanic.close", "titanic.schedule"


@dataclass(frozen=True, slots=True)
class CallTitanic:
    """Call one of Titanic's services and return its reply."""

    service: str
    frames: Sequence[bytes]
    options: Mapping[str, Any] | None = None
    headers: Mapping[str, str] | None = None
    timeout: float | None = None
    """Seconds for this call, which is then not repeated; None for the client's own timeout."""
    wait: bool = True
    """Whether the call waits at the broker until a Titanic is registered."""


@dataclass(frozen=True, slots=True)
class CheckAvailable:
    """Return whether any worker offers the service."""

    service: str


@dataclass(frozen=True, slots=True)
class Sleep:
    """Sleep."""

    seconds: float


Step: TypeAlias = CallTitanic | CheckAvailable | Sleep
Result = TypeVar("Result")
Steps: TypeAlias = Generator[Step, Any, Result]


class Caller(Protocol):
    """The client through which the steps are performed."""

    @property
    def protocol(self) -> str:
        """`"X1"`, or an older dialect."""

    @property
    def endpoint(self) -> str:
        """The endpoint of the broker in use."""


# ── operations ───────────────────────────────────────────────────────────────────────────────────────────────────────


def submit(
    caller: Caller,
    service: str | bytes,
    frames: Sequence[bytes],
    headers: Mapping[str, str] | None,
    options: Mapping[str, Any],
) -> Steps[tuple[str, str]]:
    """Submit a request; the result is its UUID and its service's name."""
    name = service_name(service)
    encoded = encode_options(options)
    if caller.protocol == "X1" and "key" not in encoded:
        # The client repeats a request after a lost connection.  By its UUID, as by a key, it is stored once.
        encoded["uuid"] = new_uuid_hex()
    reply = yield from _call(caller, CallTitanic(REQUEST, (name, *(frames or (b"",))), encoded or None, headers))
    raise_for_status(reply)
    return reply[1].decode(), name.decode()


def ready(caller: Caller, uuid: str) -> Steps[bool]:
    """Return whether the request has ended."""
    reply = yield from _call(caller, CallTitanic(REPLY, [uuid.encode()]))
    try:
        return parse_reply(reply, uuid) is not None
    except ServiceError:
        return True


def request(caller: Caller, uuid: str) -> Steps[list[bytes]]:
    """Return the body of the request; only for callers that speak X1."""
    reply = yield from _call(caller, CallTitanic(REPLY, [uuid.encode()], {"request": True}))
    return [*(parse_reply(reply, uuid) or ())]


def result(caller: Caller, uuid: str, timeout: float | None, *, submitted: bool) -> Steps[Reply]:
    """Return the reply's FINAL, waiting for it for `timeout` seconds.

    A Titanic that stops meanwhile may come back, if there has been one: when the caller `submitted` the request, or
    since it waits.
    """
    deadline = Deadline(timeout)
    if timeout == 0:
        found = parse_reply((yield from _call(caller, CallTitanic(REPLY, [uuid.encode()]))), uuid)
        if found is None:
            raise _no_reply(uuid, timeout)
        return found
    options = {"wait": True} if caller.protocol == "X1" else None
    pauses = _pauses()
    registered = submitted
    while True:
        try:
            reply = yield CallTitanic(REPLY, [uuid.encode()], options, timeout=deadline.step)
        except BrokerUnreachable:
            raise
        except RequestTimeout:
            if not registered:
                yield from _await_titanic(caller, deadline)
        except WorkerLost:
            yield Sleep(max(0.0, min(next(pauses), deadline.remaining)))
        else:
            found = parse_reply(reply, uuid)
            if found is not None:
                return found
            yield Sleep(max(0.0, min(next(pauses), deadline.remaining)))
        registered = True
        deadline.check(uuid)


def close(caller: Caller, uuid: str) -> Steps[None]:
    """Close the request."""
    raise_for_status((yield from _call(caller, CallTitanic(CLOSE, [uuid.encode()]))))


def schedule(
    caller: Caller,
    frames: Sequence[bytes],
    options: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Steps[Sequence[bytes]]:
    """Ask `titanic.schedule`, and return the frames after the status."""
    reply = yield from _call(caller, CallTitanic(SCHEDULE, frames, options or None, headers))
    raise_for_status(reply)
    return reply[1:]


class PartialsCursor:
    """A caller's position in the PARTIALs of a reply, across interrupted streams.

    Read a stream of `titanic.reply` with `frames`, `options` and `timeout`; pass each part to `take`.  When it ends,
    sleep for `pause()`; if it fails, call `failed`.  Continue until `ended`.
    """

    def __init__(self, caller: Caller, uuid: str, start: int, timeout: float | None, *, submitted: bool) -> None:
        self.ended = False
        self.frames = [uuid.encode()]
        self._caller = caller
        self._uuid = uuid
        self._registered = submitted
        """Whether a Titanic was registered: if it stops, it may come back."""
        self._position = start
        self._silence = timeout
        self._deadline = Deadline(timeout)
        self._pauses = _pauses()

    @property
    def options(self) -> dict[str, Any]:
        """The options of the next stream."""
        return {"partials": True, "from": self._position, "wait": True}

    @property
    def timeout(self) -> float:
        """Seconds for which the next stream may be silent."""
        return self._deadline.step

    def take(self, part: Reply) -> bool:
        """Return whether `part` is a PARTIAL of the reply.  Raises the request's error."""
        self._registered = True
        if part.final:
            self.ended = parse_reply(part, self._uuid) is not None
            return False
        self._position += 1
        self._deadline, self._pauses = Deadline(self._silence), _pauses()
        return True

    def pause(self) -> float:
        """Return how long to sleep before the next stream; Titanic has ended the last one before the request ended."""
        return 0.0 if self.ended else max(0.0, min(next(self._pauses), self._deadline.remaining))

    def check(self) -> None:
        """Raise `RequestTimeout` if the timeout has passed."""
        if not self.ended:
            self._deadline.check(self._uuid)

    def failed(self, error: Exception) -> Steps[None]:
        """Return if another stream may succeed; otherwise raise the error, or `ServiceNotFound`."""
        retryable = RequestTimeout | StreamInterrupted | WorkerLost
        if isinstance(error, BrokerUnreachable) or not isinstance(error, retryable):
            raise error
        if not isinstance(error, RequestTimeout):
            yield Sleep(self.pause())
        elif not self._registered:
            yield from _await_titanic(self._caller, self._deadline)
        self._registered = True


def _call(caller: Caller, call: CallTitanic) -> Steps[Reply]:
    """Perform the call and return the reply.  Raises `ServiceNotFound` if no Titanic is registered."""
    if caller.protocol == "X1":
        return (yield from _call_registered(caller, call))
    try:
        reply: Reply = yield call
    except RequestTimeout as error:
        if not isinstance(error, BrokerUnreachable) and not (yield CheckAvailable(call.service)):
            raise no_titanic(caller, call.service) from None
        raise
    return reply


def _call_registered(caller: Caller, call: CallTitanic) -> Steps[Reply]:
    """Perform a call that fails at once while no Titanic is registered, until `RESTART_SECONDS` have passed.

    Every call can be repeated: if a Titanic was lost with it, the request may be stored, but it has a UUID or a key.
    """
    until: float | None = None
    while True:
        try:
            reply: Reply = yield replace(call, wait=False)
        except (ServiceNotFound, WorkerLost):
            now = time.monotonic()
            until = now + RESTART_SECONDS if until is None else until
            if now >= until:
                raise no_titanic(caller, call.service) from None
            yield Sleep(RESTART_POLL_SECONDS)
        else:
            return reply


def _await_titanic(caller: Caller, deadline: "Deadline") -> Steps[None]:
    """Wait until a Titanic is registered, for `RESTART_SECONDS` or until the deadline."""
    until = time.monotonic() + min(RESTART_SECONDS, deadline.remaining)
    while not (yield CheckAvailable(REPLY)):
        if time.monotonic() >= until:
            raise no_titanic(caller, REPLY) from None
        yield Sleep(RESTART_POLL_SECONDS)


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


def no_titanic(caller: Caller, service: str) -> ServiceNotFound:
    """Return the error for a broker at which no Titanic is registered."""
    return ServiceNotFound(
        f"no Titanic is registered at {caller.endpoint}, so nobody offers {service}: start one with `titanic serve`",
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

    def check(self, uuid: str) -> None:
        """Raise `RequestTimeout` if the deadline has passed."""
        if self._timeout is not None and self.remaining <= 0:
            raise _no_reply(uuid, self._timeout)


def _pauses() -> Iterator[float]:
    pause, longest = POLL_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, longest)
