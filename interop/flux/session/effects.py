"""The effects that the machine of a connection has its shell carry out: values that tests compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Begin:
    """Call a service.  Its outcomes arrive as `answered(number, outcome)`."""

    number: int
    """Chosen by the machine: unique among its outstanding requests."""
    service: str
    body: Sequence[bytes]
    timeout: float | None = None
    """Seconds until the reply must have arrived."""
    wait: bool = True
    options: Mapping[str, Any] | None = None
    detached: bool = False
    """Whether the request goes on when the connection ends, instead of being cancelled."""


@dataclass(slots=True)
class Cancel:
    """Cancel a request made with `Begin`.  Nothing more arrives for it."""

    number: int


@dataclass(slots=True)
class Close:
    """Close the connection to the peer, once the messages are written."""

    why: str = ""
    """Logged, unless it is empty."""


@dataclass(slots=True)
class Offer:
    """Offer a service as a worker.  Its requests arrive as `asked(number, request)`.

    If that is not possible, `refused(service, why)` follows; a broker that does not admit the worker is not noticed.
    """

    service: str


@dataclass(slots=True)
class Withdraw:
    """Stop offering a service.  Requests in progress go on.  Without effect if it is not offered."""

    service: str


@dataclass(slots=True)
class Answer:
    """Send a PARTIAL, or the FINAL, of a request to an offered service."""

    number: int
    body: Sequence[bytes]
    final: bool


@dataclass(slots=True)
class Fail:
    """End a request to an offered service with an ERROR."""

    number: int
    code: int
    text: str
    detail: bytes | None = None


Effect = Begin | Cancel | Close | Offer | Withdraw | Answer | Fail
