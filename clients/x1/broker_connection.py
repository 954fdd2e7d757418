"""A request of an X1 client (`Call`), and the connection over which it is sent (`BrokerConnection`)."""

import math
from collections.abc import Sequence
from typing import Any, Final

from ...mdp import wire
from ...mdp.timers import TimerNode
from ...mdp.wire import Message, batch, x1
from ..calls.reply import Reply, size_to_keep
from ..calls.retry import Retry

LARGE_REQUEST_BYTES: Final = 1 << 20
"""Size above which a request waits until the broker has told its limits: libzmq closes a connection over which a frame
far beyond them comes, and all other requests there are lost."""
# Not Final: mypyc (2.4) takes a Final of several floats for unset.
GRACE: tuple[float, float] = (0.05, 0.5)
"""How long the client waits beyond a request's timeout for the broker's ERROR, which is more informative than silence:
this fraction of the timeout, but at most this many seconds."""


class Call(TimerNode):
    """One request, from when it is made until its FINAL or ERROR."""

    __slots__ = (
        "attempts", "body", "collected", "collected_bytes", "deadline", "due", "ended", "number", "options", "place",
        "receiver", "retry", "service", "silence", "stream", "streamed", "timeout",
    )  # fmt: skip

    place: "Place"
    """Where it is outstanding, or waits."""

    def __init__(
        self,
        number: int,
        service: bytes,
        body: Sequence[bytes],
        options: bytes,
        *,
        stream: bool,
        receiver: Any,
        timeout: float | None,
        silence: float | None,
        retry: Retry | None,
    ) -> None:
        super().__init__()
        self.number = number
        self.service = service
        self.body = body
        self.options = options
        """The encoded options."""
        self.stream = stream
        """Each PARTIAL is delivered as it arrives; otherwise all are collected."""
        self.receiver = receiver
        """Where the outcomes are delivered.  The session does not use it."""
        self.streamed = False
        """A PARTIAL has been delivered, so the request cannot be sent again."""
        self.collected: list[bytes] | None = None
        """The frames of the PARTIALs, if any has arrived."""
        self.collected_bytes = 0
        self.timeout = timeout
        self.silence = silence
        self.deadline: float | None = None
        """When its ttl expires."""
        self.due = math.inf
        """When it fails if nothing more arrives."""
        self.retry = retry
        self.attempts = 1
        """Number of times that it has been sent: 1, plus the retries after errors."""
        self.ended = False

    def wait_from(self, now: float) -> bool:
        """Set `due`, counting silence from now on.  Return whether the request has such a time."""
        due = math.inf
        if self.deadline is not None and self.timeout is not None:
            due = self.deadline + min(self.timeout * GRACE[0], GRACE[1])
        if self.silence is not None and now + self.silence < due:
            due = now + self.silence
        self.due = due
        return due < math.inf

    def collect(self, body: Sequence[bytes]) -> None:
        """Keep the frames of a PARTIAL for the reply."""
        if self.collected is None:
            self.collected = []
        self.collected += body
        self.collected_bytes += size_to_keep(body)

    def complete(self, body: Sequence[bytes]) -> Reply:
        """Return the reply: the collected frames, and those of the FINAL."""
        reply = Reply(body, service=self.service.decode(), final=True)
        if self.collected is not None:
            reply[:0] = self.collected
            reply.collected = len(self.collected)
        return reply


class Place:
    """Where requests are: a connection, or a queue of requests that wait for something else."""

    def __init__(self) -> None:
        self.calls: dict[Any, Call] = {}
        """The requests, by number."""

    def add(self, call: Call, now: float) -> None:
        """Have a request wait here."""
        del now
        self.calls[call.number] = call
        call.place = self

    def forget(self, call: Call) -> None:
        """Remove a request that has ended, or goes to another place."""
        del self.calls[call.number]

    def cancel(self, call: Call) -> None:
        """Cancel a request at the broker, if it was sent there."""


class BrokerConnection(Place):
    """A connection to a broker, as `ClientSession` sees it.

    While `lost` says that there is none, requests wait here for the next connection.  The commands of one turn are
    packed into one message (`batch`).

    While a request is outstanding, a broker that has been silent for `heartbeat` seconds is sent a HEARTBEAT.  One that
    leaves it unanswered for `patience` seconds is considered dead.
    """

    def __init__(self, endpoint: str, heartbeat: float, patience: float, lost: str | None) -> None:
        super().__init__()
        self.endpoint = endpoint
        self.lost = lost
        """Why there is no connection, or none any more; None while there is one."""
        self.heard = False
        """Whether the broker has sent anything."""
        self.unsent = 0
        """Commands that `take_messages` would return."""
        self.asked_at: float | None = None
        """When the first unanswered HEARTBEAT was sent."""
        self.beat_at = 0.0
        """When to send the next HEARTBEAT, or to give up the broker."""
        self.excused_until = -math.inf
        """The time until which silence proves nothing, because this process was held up."""
        self._limits: wire.Limits | None = None
        """The broker's limits, once it has told them."""
        self._large: dict[Any, Call] = {}
        """Large requests that wait for the limits."""
        self._heartbeat = heartbeat
        self._patience = patience
        self._batch: Any = _new_batch()
        self._heartbeat_unsent = False

    # ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, call: Call, now: float) -> None:
        """Send a request, or have it wait for the next connection."""
        if not self.calls:
            self.expect_sign_of_life(now)
        self.calls[call.number] = call
        call.place = self
        if self.lost is None:
            self._send(call, now)

    def _send(self, call: Call, now: float) -> None:
        """Send a request; a large one only if the broker has told its limits, and after it has."""
        if self._limits is None and wire.size_of(call.body) > LARGE_REQUEST_BYTES:
            if not self._large:
                self._batch.signal(x1.CLIENT_LIMITS, 0)
                self.unsent += 1
            self._large[call.number] = call
            return
        ttl, deadline = 0, call.deadline
        if deadline is not None:
            ttl = min(max(1, round((deadline - now) * 1000)), x1.MAX_TTL_MS)
        self._batch.request_to_broker(call.number, ttl, call.service, call.options, call.body)
        self.unsent += 1

    def told_limits(self, limits: wire.Limits, now: float) -> list[Call]:
        """Send the large requests that the broker accepts, and return the others."""
        self._limits = limits
        large, self._large = self._large, {}
        exceeding = []
        for call in large.values():
            if self.refuses(call.body) is None:
                self._send(call, now)
            else:
                exceeding.append(call)
        return exceeding

    def refuses(self, body: Sequence[bytes]) -> str | None:
        """Return which limit of the broker a body is known to exceed, or None."""
        limits = self._limits
        if limits is None or (len(body) <= limits.max_frames and wire.size_of(body) <= limits.max_bytes):
            return None
        return f"a request may have up to {limits.max_bytes} bytes in {limits.max_frames} frames"

    def forget(self, call: Call) -> None:
        """Remove a request that has ended, or goes to another broker."""
        del self.calls[call.number]
        if self._large:
            self._large.pop(call.number, None)

    def take_large(self) -> list[Call]:
        """Remove and return the large requests, which have not been sent."""
        large, self._large = self._large, {}
        for number in large:
            del self.calls[number]
        return list(large.values())

    def cancel(self, call: Call) -> None:
        """Cancel a request at the broker, if it was sent there."""
        if self.lost is None and call.number not in self._large:
            self._batch.signal(x1.CLIENT_CANCEL, call.number)
            self.unsent += 1

    def take_messages(self) -> list[Message]:
        """Return the messages to send: all commands since the last call, in as few messages as possible."""
        if not self.unsent:
            return []
        messages: list[Message] = self._batch.messages()
        if self._heartbeat_unsent:
            self._heartbeat_unsent = False
            messages.append(wire.heartbeat((b"",), wire.CX1))
        self.unsent = 0
        return messages

    def end(self, reason: str) -> None:
        """Stop using the connection, and discard unsent commands."""
        self.lost = reason
        self._batch = _new_batch()
        self._large = {}
        self._heartbeat_unsent = False
        self.unsent = 0

    # ── heartbeats ───────────────────────────────────────────────────────────────────────────────────────────────────

    def notice_delay(self, now: float) -> None:
        """Find out whether this process was held up: then messages of the broker may still be unread.

        They may not even have reached the socket, because ZeroMQ's thread was held up too, or stops reading at its
        limit.
        """
        if now > self.beat_at + self._heartbeat and self.calls and self.lost is None:
            self.excused_until = now + self._heartbeat

    def expect_sign_of_life(self, now: float) -> None:
        """Begin to wait for a sign of life: one has arrived, or there was no reason to expect one until now."""
        self.notice_delay(now)
        self.beat_at = now + self._heartbeat
        self.asked_at = None

    def tick(self, now: float) -> str | None:
        """Send a HEARTBEAT if one is due.  Return why the broker is to be given up, or None."""
        if now < self.beat_at or not self.calls or self.lost is not None:
            return None
        asked_at = self.asked_at
        if asked_at is None:
            asked_at = self.asked_at = now
        give_up_at = asked_at + self._patience
        if now >= give_up_at and now >= self.excused_until:
            silence = f"silent for {self._patience + self._heartbeat:g} s"
            if self.heard:
                return f"the broker has been {silence}"
            return f"the program that listens there has been {silence}; if it is not zmdp's broker, try protocol 0.2"
        self.beat_at = now + self._heartbeat if give_up_at <= now else min(now + self._heartbeat, give_up_at)
        if not self._heartbeat_unsent:
            self._heartbeat_unsent = True
            self.unsent += 1
        return None

    def silence(self, now: float) -> float:
        """Return for how many seconds the broker has been silent, or 0 if that is less than it may be."""
        if self.asked_at is None or now - self.asked_at < self._heartbeat:
            return 0.0
        return now - self.asked_at + self._heartbeat


def _new_batch() -> Any:
    return batch.Batch((b"",), wire.CX1)
