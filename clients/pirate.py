"""The client's side of MDP/0.2 and 0.1 as a machine: one request at a time, with Lazy Pirate recovery (C1 to C5).

No socket, no clock: the shell sends what `request` and `tick` return, and feeds `receive` with what arrives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..mdp import wire
from ..mdp.errors import SettingError
from ..mdp.wire import Message, Route
from .reply import Reply

HEADERS: Final[dict[str, tuple[Route, bytes]]] = {"0.2": ((), wire.C02), "0.1": ((b"",), wire.C01)}
"""For each protocol version the envelope and the header of a client's messages (C2, C24)."""


@dataclass(frozen=True, slots=True)
class Resend:
    """Close the socket, open a new one to the next broker, and send `message` there (C5)."""

    message: Message


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No reply came.  `tries` counts the sendings; `streamed` tells whether a PARTIAL had been handed out."""

    tries: int
    streamed: bool


class PirateSession:
    """The dialog of one client with whichever broker it is connected to.

    With `envelope`, messages of 0.2 begin with an empty frame, as those of 0.1 always do: a ROUTER–DEALER proxy between
    the client and the broker needs it (C36).  A broker that returns the envelope (C22) must be behind that proxy.
    """

    def __init__(self, protocol: str = "0.2", *, envelope: bool = False) -> None:
        if protocol not in HEADERS:
            raise SettingError(f"protocol is {protocol!r}: it is one of {', '.join(HEADERS)}")
        self._route, self._header = HEADERS[protocol]
        if envelope:
            self._route = (b"",)
        self._message: Message = []
        self._service = b""
        self._timeout = 0.0
        self._retries = 0
        self._tries = 0
        self._due: float | None = None
        self._stream = False
        self._streamed = False
        self._collected: list[bytes] = []

    @property
    def waiting(self) -> bool:
        """Whether a request is outstanding; there is at most one (C4)."""
        return self._due is not None

    def encode(self, service: bytes, body: Sequence[bytes]) -> Message:
        """A REQUEST, without keeping anything of it: for those who pipeline and match replies themselves."""
        return wire.request_to_broker(self._route, self._header, service, body)

    def decode(self, message: Message) -> Reply | None:
        """The PARTIAL or FINAL in `message`; None if it is anything else."""
        answer = wire.decode_broker(message)
        if not isinstance(answer, wire.Reply) or answer.header != self._header:
            return None
        reply = Reply(answer.body, service=answer.service.decode(errors="replace"), final=answer.final)
        if answer.final:
            reply.failure = wire.parse_error(answer.body)
        return reply

    def request(
        self, service: bytes, body: Sequence[bytes], now: float, *, timeout: float, retries: int, stream: bool = False
    ) -> Message:
        """Begin a request; returns what to send.

        `timeout` is the silence, in seconds, after which it is sent again, at most `retries` times.  With `stream` each
        PARTIAL is handed out as it comes, else all is collected and handed out with the FINAL.
        """
        self._message = self.encode(service, body)
        self._service = service
        self._timeout, self._retries, self._stream = timeout, retries, stream
        self._tries = 1
        self._streamed = False
        self._collected = []
        self._due = now + timeout
        return self._message

    def receive(self, message: Message, now: float) -> Reply | None:
        """The reply, or the part of one, that `message` brings; None if there is nothing to hand out."""
        if self._due is None:
            return None
        reply = self.decode(message)
        if reply is None or reply.service.encode() != self._service:
            return None
        if not reply.final:
            self._due = now + self._timeout
            if self._stream:
                self._streamed = True
                return reply
            self._collected += reply
            return None
        self._due = None
        reply[:0] = self._collected
        reply.collected = len(self._collected)
        return reply

    def tick(self, now: float) -> Resend | GiveUp | None:
        """What to do about a silence that has lasted too long."""
        if self._due is None or now < self._due:
            return None
        if self._streamed or self._tries > self._retries:
            self._due = None
            return GiveUp(self._tries, self._streamed)
        self._tries += 1
        self._due = now + self._timeout
        self._collected = []
        return Resend(self._message)

    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        return self._due
