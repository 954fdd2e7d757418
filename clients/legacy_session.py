"""The client's side of MDP/0.2 and 0.1 as a state machine: one request at a time, resent after a silence (C1 to C5).

It uses no socket and no clock: the dialog sends what `request` and `tick` return, and passes what arrives to `receive`.
The ZeroMQ Guide calls this way of recovering the Lazy Pirate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..mdp import wire
from ..mdp.errors import SettingError
from ..mdp.wire import Message, Route
from .reply import Reply

HEADERS: Final[dict[str, tuple[Route, bytes]]] = {"0.2": ((), wire.C02), "0.1": ((b"",), wire.C01)}
"""The envelope and the header of a client's messages, by protocol version (C2, C24)."""


@dataclass(frozen=True, slots=True)
class Resend:
    """Close the socket, open a new one to the next broker, and send `message` there (C5)."""

    message: Message


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No reply arrived within the last of `tries`.  `streamed` tells whether a PARTIAL had been delivered."""

    tries: int
    streamed: bool


class LegacySession:
    """One client's exchange with whichever broker it is connected to.

    With `envelope`, messages of 0.2 begin with an empty frame, as those of 0.1 always do: a ROUTER–DEALER proxy between
    the client and the broker needs it (C36).  The broker must return the envelope with its replies (C22).
    """

    def __init__(self, protocol: str = "0.2", *, envelope: bool = False) -> None:
        if protocol not in HEADERS:
            raise SettingError(f"protocol is {protocol!r}: it must be one of {', '.join(HEADERS)}")
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
        """Return a REQUEST without keeping track of it, for callers that pipeline."""
        return wire.request_to_broker(self._route, self._header, service, body)

    def decode(self, message: Message) -> Reply | None:
        """Return the PARTIAL or FINAL in `message`, or None if it is anything else."""
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
        """Begin a request and return the message to send.

        After `timeout` seconds of silence it is sent again, at most `retries` times.  With `stream`, `receive` returns
        each PARTIAL as it arrives; otherwise it returns all frames with the FINAL.
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
        """Return the reply, or the part of one, to deliver after `message`; None if there is nothing to deliver."""
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
        """Return what to do if the silence has lasted too long, otherwise None."""
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
        """Return when `tick` has something to do, or None."""
        return self._due
