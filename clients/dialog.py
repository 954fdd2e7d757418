"""The interface that clients require of a protocol.

`AsyncClient` chooses an implementation once, when it is created: `X1Dialog` or `LegacyDialog`.  A dialog owns the
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
    """A request as `Client` makes it, with all arguments checked."""

    service: bytes
    body: Sequence[bytes]
    timeout: float
    """Seconds that each attempt may take; for a stream, the silence between parts."""
    retries: int = 0
    """Attempts after the first."""
    wait: bool = True
    headers: Mapping[str, str] | None = None
    options: Mapping[str, Any] | None = None
    deadline: float | None = None
    """Seconds until the FINAL of a stream must have arrived."""
    retry: Retry | None = None


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

    def begin(
        self,
        receiver: "Receiver | asyncio.Future[Any]",
        service: bytes,
        body: Sequence[bytes],
        *,
        timeout: float | None = None,
        silence: float | None = None,
        retries: int = 0,
        stream: bool = False,
        options: bytes = b"",
        retry: Retry | None = None,
    ) -> Begun:
        """Send a request, or have it wait until others end, and return it.

        Args:
            receiver: Gets each part if it is a `stream`, otherwise the whole reply; or the error.
            service: The service's name.
            body: The frames of the request.
            timeout: Seconds until the FINAL must have arrived.
            silence: Seconds within which something must arrive, a PARTIAL or the FINAL.
            retries: How often a legacy protocol sends the request again after such a silence (C5).  X1 has no use for
                it: there, a broker that is lost is noticed at once.
            stream: Whether parts are delivered as they arrive.
            options: What `encode_options` returned; a legacy protocol has none.
            retry: After which errors, and how often, to send it again.

        Raises `SettingError` for what the protocol cannot carry, and `ClosedError`.
        """

    def cancel(self, call: Any) -> None:
        """Cancel a request, unless it has ended.  Its receiver gets nothing more."""

    def flush(self) -> None:
        """Send now what waits for the end of this turn of the event loop."""

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
