"""The client's side of MDP/0.2 and 0.1 as a state machine: one request at a time, resent after a silence (C1 to C5).

It uses no socket and no clock.  The dialog calls `request`, `receive` and `tick`, acts on the events of `take_events`,
and then sends the messages of `take_messages`.  The ZeroMQ Guide calls this way of recovering the Lazy Pirate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from ...mdp import wire
from ...mdp.errors import BrokerUnreachable, RequestRejected, RequestTimeout, SettingError, StreamInterrupted
from ...mdp.limits import Limits
from ...mdp.wire import Message, Route
from ..calls.reply import MAX_REPLY_BYTES, Reply, overlong, size_to_keep

HEADERS: Final[dict[str, tuple[Route, bytes]]] = {"0.2": ((), wire.C02), "0.1": ((b"",), wire.C01)}
"""The envelope and the header of a client's messages, by protocol version (C2, C24)."""


@dataclass(frozen=True, slots=True)
class Resend:
    """Close the connection: the next message is sent over a new one, to the next broker (C5)."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Raise what `LegacySession.error` returns: the last try has brought no reply, or the stream has stopped."""


Event = Reply | Resend | GiveUp | RequestRejected
"""A reply or a part of one, another try, a timeout, or the exception for a reply that is too large."""


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
        self.waiting = False
        """Whether a request is outstanding; there is at most one (C4)."""
        self.streamed = False
        """Whether a PARTIAL of its reply was an event."""
        self._messages: list[Message] = []
        self._events: list[Event] = []
        self._message: Message = []
        self._service = b""
        self._timeout = 0.0
        self._deadline: float | None = None
        self._due = 0.0
        self._retries = 0
        self._tries = 0
        self._stream = False
        self._collected: list[bytes] = []
        self._collected_bytes = 0

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
        self,
        service: bytes,
        body: Sequence[bytes],
        now: float,
        *,
        timeout: float,
        retries: int = 0,
        stream: bool = False,
        deadline: float | None = None,
    ) -> None:
        """Begin a request, in place of the one before.

        After `timeout` seconds of silence (`math.inf` for never) it is sent again, at most `retries` times.  With a
        `deadline`, that ends the request instead, whatever has arrived.  With `stream`, each PARTIAL is an event;
        otherwise the FINAL has all frames.
        """
        self._message = self.encode(service, body)
        self._messages, self._events = [self._message], []
        self._service = service
        self._timeout, self._retries, self._stream = timeout, retries, stream
        self._deadline = deadline
        self._tries = 1
        self.streamed = False
        self._collected, self._collected_bytes = [], 0
        self.waiting = True
        self._set_due(now)

    def error(self, endpoint: str, reason: str | None) -> RequestTimeout | StreamInterrupted:
        """Return the error of the request, which got no reply from the broker at `endpoint`.

        `reason` says why the broker cannot be reached; None if it can.
        """
        service, seconds = self._service.decode(), f"{self._timeout:g} s"
        if self.streamed:
            text = f"the stream of service {service!r} stopped: nothing arrived for {seconds} after a part"
            return StreamInterrupted(text, service=service)
        limit = f"within {seconds}" if self._tries == 1 else f"({self._tries} tries, {seconds} each)"
        text = f"no reply from service {service!r} through {endpoint} {limit}"
        if service.startswith("mmi."):
            text = f"the broker at {endpoint} does not answer {service} {limit}"
        if reason is not None:
            return BrokerUnreachable(f"{text}: {reason}", service=service)
        size = sum(map(len, self._message))
        if size > Limits().max_message // 2:
            text += f"; the request has {size} bytes: does that exceed the broker's max_message?"
        return RequestTimeout(text, service=service)

    def _set_due(self, now: float) -> None:
        self._due = now + self._timeout if self._deadline is None else self._deadline

    def receive(self, message: Message, now: float) -> None:
        """Process a message."""
        reply = self.decode(message) if self.waiting else None
        if reply is None or reply.service.encode() != self._service:
            return
        if reply.final:
            self.waiting = False
            reply[:0] = self._collected
            reply.collected = len(self._collected)
            self._events.append(reply)
            return
        self._set_due(now)
        if self._stream:
            self.streamed = True
            self._events.append(reply)
            return
        self._collected += reply
        self._collected_bytes += size_to_keep(reply)
        if self._collected_bytes > MAX_REPLY_BYTES:
            self.waiting = False
            self._collected = []
            self._events.append(overlong(reply.service, MAX_REPLY_BYTES))

    def tick(self, now: float) -> None:
        """Send the request again, or give up, if the silence has lasted too long."""
        if not self.waiting or now < self._due:
            return
        if self.streamed or self._tries > self._retries:
            self.waiting = False
            self._events.append(GiveUp())
            return
        self._tries += 1
        self._set_due(now)
        self._collected, self._collected_bytes = [], 0
        self._messages.append(self._message)
        self._events.append(Resend())

    def deadline(self) -> float | None:
        """Return when `tick` has something to do, or None."""
        return self._due if self.waiting and self._due != inf else None

    def take_messages(self) -> list[Message]:
        """Return the messages to send."""
        messages, self._messages = self._messages, []
        return messages

    def take_events(self) -> list[Event]:
        """Return the events of the request since the last call."""
        events, self._events = self._events, []
        return events
