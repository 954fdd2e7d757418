"""What a gateway's protocol machine asks of its shell, as values that tests compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...clients.calls.reply import Outcome
from ...workers.session.request import Request


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
    headers: Mapping[str, str] | None = None
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


class Machine(Protocol):
    """The protocol of one connection.  Nothing in it depends on the time, so it takes none."""

    def receive(self, data: bytes) -> None:
        """Take in bytes that have arrived from the peer."""

    def answered(self, number: int, outcome: Outcome) -> None:
        """Take in a part, the reply or the error of a request that `Begin` made."""

    def ended(self) -> None:
        """Take in that the connection is closed.  Nothing can be written any more."""

    def take_messages(self) -> list[bytes]:
        """Return what is to be written to the peer since the last call."""

    def take_events(self) -> list[Effect]:
        """Return what is to be done since the last call, in order."""


class ServingMachine(Machine, Protocol):
    """The machine of a protocol whose peers can offer services: only its effects contain `Offer`."""

    def asked(self, number: int, request: Request) -> None:
        """Take in a request to a service that this connection offers."""

    def withdrawn(self, number: int) -> None:
        """Take in that a request passed to `asked` is not wanted any longer."""

    def refused(self, service: str, why: str) -> None:
        """Take in that a service cannot be offered: `Offer` had no effect."""
