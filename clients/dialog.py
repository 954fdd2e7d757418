"""The interface that clients require of a protocol.

A client chooses an implementation once, when it is created: `X1Dialog` or `LegacyDialog`.  A dialog owns the
connection; the client above it checks arguments, encodes values and knows which process and event loop it belongs to.
`Client` reaches the same dialogs through a `BlockingDialog`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from .call import Outcome
from .reply import Reply
from .retry import Retry


class Ask(NamedTuple):
    """A request as a client makes it, with all arguments checked."""

    service: bytes
    body: Sequence[bytes]
    """The frames."""
    timeout: float | None = None
    """Seconds until the FINAL must have arrived."""
    silence: float | None = None
    """Seconds within which something must arrive, a PARTIAL or the FINAL."""
    retries: int = 0
    """How often a legacy protocol sends the request again after such a silence (C5).  X1 has no use for it: there, a
    broker that is lost is noticed at once."""
    stream: bool = False
    """Whether parts are delivered as they arrive."""
    wait: bool = True
    headers: Mapping[str, str] | None = None
    options: Mapping[str, Any] | None = None
    retry: Retry | None = None
    """After which errors, and how often, to send it again."""


class Receiver(Protocol):
    """Gets what a request results in.  An `asyncio.Future` can take its place if the request does not stream."""

    def put(self, outcome: Outcome) -> None:
        """Take a part, the reply (a `Reply` whose `final` is true) or the error.  Nothing follows the last two."""


class Begun(Protocol):
    """A request that has begun."""

    receiver: Any
    """Gets its outcomes; None once it needs no more."""


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
            options: What `encode_options` made of its options, its `wait`, and its headers with those of the trace; a
                legacy protocol has none.

        Raises `SettingError` for what the protocol cannot carry, and `ClosedError`.
        """

    def cancel(self, call: Any) -> None:
        """Cancel a request, unless it has ended.  Its receiver gets nothing more."""

    def close(self) -> None:
        """End every outstanding request with `ClosedError` and close the connection."""


def deliver(receiver: Any, outcome: Outcome) -> None:
    """Give a receiver an outcome; one that raises must not keep the others from getting theirs."""
    if type(receiver) is not asyncio.Future:
        try:
            receiver.put(outcome)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the receiver's
            context = {"message": f"{receiver!r} raised an exception", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
    elif not receiver.done():
        if isinstance(outcome, Reply):
            receiver.set_result(outcome)
        else:
            receiver.set_exception(outcome)
