"""One connection of a gateway: carries out the effects of its machine, within limits."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, Final, Protocol

import zmq

from ...clients.calls.call import Call, Outcome
from ...clients.calls.reply import Reply
from ...gateways.upstream import Upstream
from ...mdp.errors import ClosedError, RequestRejected, ServiceError, SettingError
from ...workers.handling import Last
from ...workers.session.request import Request
from .session.effects import Answer, Begin, Cancel, Close, Fail, Offer, Withdraw
from .session.session import FluxSession

MAX_OUTSTANDING: Final = 1000
"""A connection with this many outstanding requests is not read."""
MAX_UNREAD_BYTES: Final = 4 << 20
"""Bytes that a peer may leave unread before it is disconnected."""
MAX_ANSWERS: Final = 100
"""A peer with this many answers that wait for the broker is not read."""

log = logging.getLogger("zmdp.gateway")


class Peer(Protocol):
    """The connection to the peer, as a `Conversation` uses it."""

    def write(self, data: bytes) -> None:
        """Send bytes, without blocking."""

    def unread_bytes(self) -> int:
        """Return how many bytes that were written have not been sent yet."""

    def pause(self) -> None:
        """Read nothing for now."""

    def resume(self) -> None:
        """Read again."""

    def close(self) -> None:
        """Close the connection after what was written before."""

    def abort(self) -> None:
        """Close the connection immediately."""


class Conversation:
    """Runs the machine of one connection.

    The shell calls `received` and `lost`; everything else follows from them.  A peer that leaves more than
    `max_unread_bytes` unread is disconnected.  While `max_outstanding` of its requests are outstanding, or the broker
    does not keep up with its answers, nothing is read from it.
    """

    def __init__(
        self,
        machine: FluxSession,
        peer: Peer,
        upstream: Upstream,
        *,
        name: str,
        max_outstanding: int = MAX_OUTSTANDING,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        self._machine = machine
        self._peer = peer
        self._upstream = upstream
        self._client = upstream.client
        self._name = name
        self._max_outstanding = max_outstanding
        self._max_unread_bytes = max_unread_bytes
        self._calls: dict[int, _Outgoing] = {}
        """Requests made for the peer, by the machine's number."""
        self._asked: dict[int, _Incoming] = {}
        """Requests passed to the peer."""
        self._last_asked = 0
        self._offered: list[str] = []
        self._answers = 0
        """Number of answers of the peer that wait for the broker."""
        self._paused = False
        self._congested = False
        self._closed = False
        self._ended = False

    @property
    def outstanding(self) -> int:
        """Number of requests of the peer that have not ended."""
        return len(self._calls)

    @property
    def serving(self) -> int:
        """Number of requests that were passed to the peer and are not answered."""
        return len(self._asked)

    def drain(self) -> None:
        """Take no more requests for the services of the peer, which can still answer those that it has."""
        for service in self._offered:
            self._upstream.withdraw(service)

    # ── the peer ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def received(self, data: bytes) -> None:
        """Pass on bytes that have arrived."""
        if not self._closed:
            self._machine.receive(data)
            self.act()

    def congested(self, is_so: bool) -> None:
        """Stop reading while the peer leaves much unread, so that it makes no more requests."""
        self._congested = is_so
        self._pause_or_resume()

    def lost(self) -> None:
        """The connection is closed: cancel its requests and withdraw its services.  Idempotent.

        Requests that were passed to the peer are given up, so that other workers get them.
        """
        if self._ended:
            return
        self._closed = self._ended = True
        self._machine.ended()
        self.act()
        for number, outgoing in list(self._calls.items()):
            if not outgoing.detached:
                del self._calls[number]
                if outgoing.call is not None:
                    self._client.cancel(outgoing.call)
        for service in self._offered:
            self._upstream.withdraw(service)
        for incoming in self._asked.values():
            incoming.give_up()

    # ── effects ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def act(self) -> None:
        """Send the machine's messages and carry out its effects."""
        machine, closing = self._machine, None
        while effects := machine.take_events():  # an effect that fails may cause others
            for effect in effects:
                if isinstance(effect, Begin):
                    self._begin(effect)
                elif isinstance(effect, Offer):
                    self._offer(effect.service)
                elif isinstance(effect, Close):
                    closing = effect
                else:
                    self._do(effect)
        messages = machine.take_messages()
        if messages:
            self._write(messages)
        if closing is not None:
            self._close(closing.why)
        self._pause_or_resume()

    def _do(self, effect: Cancel | Answer | Fail | Withdraw) -> None:
        match effect:
            case Cancel(number):
                outgoing = self._calls.pop(number, None)
                if outgoing is not None and outgoing.call is not None:
                    self._client.cancel(outgoing.call)
            case Answer(number) | Fail(number):
                incoming = self._asked.get(number)
                if incoming is not None:
                    incoming.answers.put_nowait(effect)
                    self._answers += 1
            case Withdraw(service):
                if service in self._offered:
                    self._offered.remove(service)
                    self._upstream.withdraw(service)

    def _write(self, messages: list[bytes]) -> None:
        if self._closed:
            return
        if self._peer.unread_bytes() > self._max_unread_bytes:  # checked before writing: one reply may be larger
            log.warning("%s: disconnected: it does not read what it is sent", self._name)
            self._closed = True
            self._peer.abort()
        else:
            self._peer.write(messages[0] if len(messages) == 1 else b"".join(messages))

    def _close(self, why: str) -> None:
        if why:
            log.warning("%s: disconnected: %s", self._name, why)
        if not self._closed:
            self._closed = True
            self._peer.close()

    def _pause_or_resume(self) -> None:
        paused = len(self._calls) >= self._max_outstanding or self._answers >= MAX_ANSWERS or self._congested
        if paused is not self._paused:
            self._paused = paused
            if not self._closed:
                (self._peer.pause if paused else self._peer.resume)()

    # ── requests of the peer ─────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, effect: Begin) -> None:
        """Make a request, or tell the machine why it cannot be made."""
        outgoing = _Outgoing(self, effect.number, effect.detached)
        try:
            outgoing.call = self._client.begin(
                outgoing, effect.service, *effect.body, timeout=effect.timeout, wait=effect.wait,
                options=effect.options,
            )  # fmt: skip
        except (SettingError, ClosedError, RequestRejected) as error:
            self._machine.answered(effect.number, error)
            return
        self._calls[effect.number] = outgoing

    def answered(self, number: int, outcome: Outcome) -> None:
        """Pass on a part, the reply or the error of a request."""
        if number in self._calls:
            if not isinstance(outcome, Reply) or outcome.final:
                del self._calls[number]
            self._machine.answered(number, outcome)
            self.act()

    # ── requests to the peer ─────────────────────────────────────────────────────────────────────────────────────────

    def _offer(self, service: str) -> None:
        """Offer a service, or tell the machine why it cannot be offered."""
        try:
            self._upstream.offer(service, self._serve)
        except (SettingError, zmq.ZMQError, OSError) as error:  # for example, too many open files
            log.warning("%s: cannot offer %r: %s", self._name, service, error)
            self._machine.refused(service, str(error))
        else:
            self._offered.append(service)

    async def _serve(self, request: Request) -> AsyncGenerator[Any, None]:
        """Handle a request to a service that the peer offers."""
        self._last_asked = number = self._last_asked + 1
        incoming = self._asked[number] = _Incoming()
        try:
            if self._ended:  # after the worker had begun to handle it
                incoming.give_up()
            else:
                self._machine.asked(number, request)
                self.act()
            while not incoming.ended:
                answer = await incoming.take()
                self._answers -= 1
                self._pause_or_resume()
                if isinstance(answer, Fail):
                    raise ServiceError(answer.code, answer.text, answer.detail)
                yield Last(list(answer.body)) if answer.final else list(answer.body)
        finally:
            del self._asked[number]
            self._answers -= incoming.answers.qsize()
            if not incoming.ended and not self._ended:
                self._machine.withdrawn(number)
            self.act()


class _Outgoing:
    """A request made for the peer: the receiver of its outcomes."""

    __slots__ = ("_conversation", "_number", "call", "detached")

    def __init__(self, conversation: Conversation, number: int, detached: bool) -> None:
        self._conversation = conversation
        self._number = number
        self.detached = detached
        self.call: Call | None = None

    def put(self, outcome: Outcome) -> None:
        self._conversation.answered(self._number, outcome)


class _Incoming:
    """A request passed to the peer, and its answers that wait for the broker."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[Answer | Fail] = asyncio.Queue()
        self.ended = False
        """The last answer has been taken."""
        self._task = asyncio.current_task()

    def give_up(self) -> None:
        """End the handler without a reply, so that another worker gets the request."""
        if self._task is not None:
            # Not within the task itself: for the worker, that would be a failure of the handler.
            asyncio.get_running_loop().call_soon(self._task.cancel)

    async def take(self) -> Answer | Fail:
        answer = await self.answers.get()
        self.ended = isinstance(answer, Fail) or answer.final
        return answer
