"""A request as a client makes it (`Ask`), and the interface of the dialogs that carry it out (`Dialog`).

A client chooses its dialog once, when it is created: `X1Dialog` or `LegacyDialog`.  The dialog owns the connection.
The client checks arguments, encodes values, and knows to which process and event loop it belongs.  `Client` reaches
the same dialogs through a `BlockingDialog`.
"""

import asyncio
from asyncio import Future
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from ...mdp import wire
from ...mdp.errors import ClosedError, SettingError
from ...mdp.program import process
from .reply import Outcome, Reply, closed_error
from .retry import Retry

RESERVED: Final = frozenset({"ttl", "headers"})
"""Names that options cannot have, because they are arguments of a request.  `wait` is allowed if it is true."""
_NO_WAIT: Final = wire.encode_options({"wait": False})


class Ask:
    """A request as a client makes it, with all arguments checked, except those that `encode_options` checks."""

    __slots__ = (
        "body", "headers", "options", "retries", "retry", "service", "silence", "stream", "timeout", "wait",
    )  # fmt: skip

    def __init__(
        self,
        service: bytes,
        body: Sequence[bytes],
        timeout: float | None = None,
        silence: float | None = None,
        retries: int = 0,
        stream: bool = False,
        wait: Any = True,
        headers: Any = None,
        options: Any = None,
        retry: Retry | None = None,
    ) -> None:
        self.service = service
        self.body = body
        """The frames."""
        self.timeout = timeout
        """Seconds until the FINAL must have arrived."""
        self.silence = silence
        """Seconds within which something must arrive, a PARTIAL or the FINAL."""
        self.retries = retries
        """How often a legacy protocol sends the request again after such a silence (C5).  X1 ignores it, because it
        notices a lost broker at once."""
        self.stream = stream
        """Whether parts are delivered as they arrive."""
        self.wait = wait
        self.headers = headers
        self.options = options
        self.retry = retry
        """After which errors, and how often, to send it again."""

    def encoded(self, headers: Any) -> bytes:
        """Return its encoded options, with these headers in place of its own."""
        return encode_options(self.options, headers, self.wait)


def new_ask(
    service: Any, frames: Any, timeout: Any, wait: Any, headers: Any, group: Any, options: Any, retry: Retry | None
) -> Ask:
    """Return the request that these arguments describe.  Raises `SettingError` for a service, body or group that is
    invalid."""
    body, options = checked_body(frames), in_group(options, group)
    return Ask(wire.service_name(service), body, timeout, None, 0, False, wait, headers, options, retry)


def in_group(options: Any, group: Any) -> Any:
    """Return `options` with the name of the request's group, if it has one."""
    if not isinstance(group, str):
        raise SettingError(f"group is {group!r:.100}: it must be a text, such as the name of a tenant")
    return {**(options or {}), "group": group} if group else options


def checked_body(frames: Sequence[Any]) -> Sequence[bytes]:
    """Return `frames` as bytes: one empty frame if there are none, because the protocol requires one (C2)."""
    return [each if type(each) is bytes else _as_bytes(at, each) for at, each in enumerate(frames)] or [b""]


def _as_bytes(at: int, frame: Any) -> bytes:
    if not isinstance(frame, bytes | bytearray | memoryview):
        kind = type(frame).__name__
        raise SettingError(
            f"frame {at} is of type {kind}: a frame is bytes (for text: {'text'!r}.encode(); for values: call())"
        )
    return bytes(frame)


def encode_options(options: Mapping[str, Any] | None, headers: Mapping[Any, Any] | None, wait: bool) -> bytes:
    """Return the options of a request as JSON; nothing if there are none.  Raises `SettingError` for invalid ones."""
    if not (options or headers):
        return b"" if wait else _NO_WAIT
    # The types of headers are checked here: compiled code would raise `TypeError` for types other than those declared.
    given: dict[str, Any] = {}
    if options:
        if not isinstance(options, Mapping):
            raise SettingError(f"options are {options!r:.200}: they are a mapping of names to values")
        given.update(options)
        reserved = RESERVED if given.get("wait", True) is True else RESERVED | {"wait"}
        if not reserved.isdisjoint(given):
            names = ", ".join(sorted(reserved.intersection(given)))
            raise SettingError(f"options have {names}: use the arguments timeout, wait and headers instead")
    if headers:
        mapped = isinstance(headers, Mapping)
        if not mapped or not all(isinstance(each, str) for pair in headers.items() for each in pair):
            raise SettingError(f"headers are {headers!r:.200}: they are a mapping, whose names and values are text")
        given["headers"] = dict(headers)
    if not wait:
        given["wait"] = False
    return wire.encode_options(given)


def check_usable(closed: bool, pid: int) -> None:
    """Raise `ClosedError` if a client was closed, or was created by another process than this one.

    A forked process has neither its parent's threads nor libzmq's, and perhaps a lock that nobody will release.
    """
    if closed:
        raise closed_error()
    if process.pid != pid:
        raise ClosedError("this client belongs to the process that created it: create one after fork()")


class Receiver(Protocol):
    """Gets the outcomes of a request.  An `asyncio.Future` can take its place if the request does not stream."""

    def put(self, outcome: Outcome) -> None:
        """Take a part, the reply (a `Reply` whose `final` is true) or the error.  Nothing follows the last two."""


class Begun(Protocol):
    """A request that has begun."""

    receiver: Any
    """Gets the outcomes; None once no more are delivered."""


class Dialog(Protocol):
    """Requests over one protocol, made in one event loop."""

    loop: asyncio.AbstractEventLoop | None
    """The event loop, once it is known."""

    @property
    def endpoint(self) -> str:
        """The endpoint of the broker in use."""

    def begin(self, receiver: "Receiver | asyncio.Future[Any]", ask: Ask, options: bytes) -> Begun:
        """Send a request, or have it wait until others end, and return it.

        Args:
            receiver: Gets each part if it is a stream, otherwise the whole reply; or the error.  Nothing before this
                returns.
            ask: The request.
            options: Its encoded options, with `wait`, and with headers that include those of the trace; empty for a
                legacy protocol.

        Raises `SettingError` for an argument that the protocol cannot carry, and `ClosedError`.
        """

    def cancel(self, call: Any) -> None:
        """Cancel a request, unless it has ended.  Its receiver gets nothing more."""

    def close(self) -> None:
        """End every outstanding request with `ClosedError` and close the connection."""


def deliver(receiver: Any, outcome: Outcome) -> None:
    """Deliver an outcome.  An exception of the receiver is logged, so that other receivers get their outcomes."""
    if type(receiver) is not Future:
        try:
            receiver.put(outcome)
        except Exception as error:  # noqa: BLE001 - the receiver may raise anything
            context = {"message": f"{receiver!r} raised an exception", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
    elif not receiver.done():
        if isinstance(outcome, Reply):
            receiver.set_result(outcome)
        else:
            receiver.set_exception(outcome)
