"""The interface that `Client` and `AsyncClient` require of a protocol.

Each chooses an implementation once, when it is created: `X1Dialog` or `LegacyDialog` for threads, `X1AsyncDialog` or
`LegacyAsyncDialog` for asyncio.  A dialog owns the connection; the client above it checks arguments, encodes values and
knows which process and event loop it belongs to.
"""

from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from .reply import Reply
from .retry import Retry


class Ask(NamedTuple):
    """A request as `Client` passes it to its dialog, with all arguments checked."""

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


class Dialog(Protocol):
    """Requests over one protocol, made by threads.

    Every method that waits raises the request's error.  X1 allows `timeout × (1 + retries)` seconds; a legacy protocol
    sends the request again after each `timeout`, at most `retries` times.
    """

    @property
    def endpoint(self) -> str:
        """The endpoint of the broker in use."""

    def request(self, ask: Ask) -> Reply:
        """Send a request and return the whole reply."""

    def stream(self, ask: Ask) -> Generator[Reply, None, None]:
        """Send a request and yield each part of the reply as it arrives, the FINAL last."""

    def submit(self, ask: Ask, convert: Callable[[Reply], Any] | None = None) -> "Future[Any]":
        """Send a request and return the future of its reply, or of what `convert` makes of it."""

    def send(self, service: bytes, body: Sequence[bytes], *, timeout: float) -> None:
        """Send a request whose reply `recv` returns.  `timeout` limits the sending."""

    def recv(self, *, timeout: float) -> Reply:
        """Return the next reply, or part of one, to a request made with `send`."""

    def reset(self) -> None:
        """Abandon every request made with `send`."""

    def close(self) -> None:
        """Cancel every outstanding request, if the protocol can, and close the connection."""


class AsyncDialog(Protocol):
    """Requests over one protocol, made by the tasks of one event loop.

    There is no `Ask` here: creating one takes 0.3 µs, and a whole request in asyncio only 7 µs.
    """

    @property
    def endpoint(self) -> str:
        """The endpoint of the broker in use."""

    async def request(
        self,
        service: bytes,
        body: Sequence[bytes],
        *,
        timeout: float | None,
        wait: bool,
        headers: Mapping[str, str] | None,
        options: Mapping[str, Any] | None,
        retry: Retry | None,
    ) -> Reply:
        """Send a request and return the whole reply.  Raises the request's error."""

    def stream(
        self,
        service: bytes,
        body: Sequence[bytes],
        *,
        timeout: float | None,
        deadline: float | None,
        wait: bool,
        headers: Mapping[str, str] | None,
        options: Mapping[str, Any] | None,
        retry: Retry | None,
    ) -> AsyncGenerator[Reply, None]:
        """Send a request and yield each part of the reply as it arrives, the FINAL last.  Raises as `request`."""

    def close(self) -> None:
        """End every outstanding request with `ClosedError` and close the connection."""
