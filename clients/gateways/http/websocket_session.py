"""The gateway's side of a WebSocket connection after the handshake, as a machine: bytes ↔ messages."""

from typing import Final, Protocol

from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol

from ....mdp.errors import ZmdpError
from ....mdp.http.problems import Problem
from ...call import Outcome
from ...reply import Reply
from ..effects import Begin, Cancel, Close, Effect
from .websocket_messages import Ask, CancelAsk, Id, MessageError, NotUtf8Error, decode, encode, encode_error

MAX_REASON_BYTES: Final = 123
"""Maximum size of the reason in a close frame."""


class Policy(Protocol):
    """What a gateway allows."""

    def begin(self, number: int, ask: Ask) -> Begin:
        """Return how to make a request, which then counts as outstanding.  Raises `Problem`."""

    def end(self, number: int, ask: Ask) -> None:
        """Take in that a request for which `begin` has returned has ended."""

    def problem(self, number: int, error: ZmdpError, ask: Ask) -> Problem:
        """Return the problem with which an outstanding request ends."""

    def hold(self, size: int) -> None:
        """Take in that so many bytes of an incomplete message are held now.

        Raises `Problem` if there is no memory for more than before; then none count.
        """


class WebSocketSession:
    """The machine of one connection.

    Every request ends with one `final` or one `error`; afterwards its id may be used again.  `frames` is the codec,
    with its handshake done and without extensions.
    """

    def __init__(self, frames: ServerProtocol, policy: Policy) -> None:
        self._frames = frames
        self._policy = policy
        self._requests: dict[int, Ask] = {}
        """Outstanding requests by the number that `Begin` gave them."""
        self._numbers: dict[Id, int] = {}
        self._last_number = 0
        self._message = bytearray()
        """The message of which some frames have arrived."""
        self._partial = 0
        """Bytes of the frame that has not arrived completely."""
        self._is_text = False
        self._draining = False
        self._closed = False
        self._effects: list[Effect] = []

    @property
    def outstanding(self) -> int:
        """Number of outstanding requests."""
        return len(self._requests)

    # ── from the peer ────────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, data: bytes) -> None:
        """Take in bytes that have arrived."""
        self._frames.receive_data(data)
        frames = self._frames.events_received()
        for frame in frames:
            if isinstance(frame, Frame) and not self._closed:
                self._take(frame)
        self._partial = 0 if frames else self._partial + len(data)
        if self._frames.parser_exc is not None:  # the codec has sent the close frame that says why
            sent = self._frames.close_sent
            self._end("invalid WebSocket frame" if sent is None else sent.reason or f"code {sent.code}")
        if not self._closed:
            try:
                self._policy.hold(len(self._message) + self._partial)
            except Problem as problem:
                self.close(CloseCode.TRY_AGAIN_LATER, problem.detail)

    def _take(self, frame: Frame) -> None:
        match frame.opcode:
            case Opcode.TEXT | Opcode.BINARY:
                if frame.fin:
                    self._take_message(bytes(frame.data), frame.opcode is Opcode.TEXT)
                else:
                    self._message += frame.data
                    self._is_text = frame.opcode is Opcode.TEXT
            case Opcode.CONT:
                self._message += frame.data
                if frame.fin:
                    message, self._message = bytes(self._message), bytearray()
                    self._take_message(message, self._is_text)
            case Opcode.CLOSE:
                self._end("")
            case _:  # the codec has answered a PING
                pass

    def _take_message(self, data: bytes, text: bool) -> None:
        try:
            said = decode(data, text=text)
        except NotUtf8Error as error:
            self.close(CloseCode.INVALID_DATA, str(error))
            return
        except MessageError as error:
            # An error with the id of an outstanding request would end that one.
            self._say_error(None if error.id in self._numbers else error.id, Problem("invalid", str(error)))
            return
        if isinstance(said, CancelAsk):
            self._cancel(said.id)
        elif said.id in self._numbers:
            self._say_error(None, Problem("invalid", f"id {said.id!r:.120} is in use by an outstanding request"))
        else:
            self._ask(said)

    def _ask(self, ask: Ask) -> None:
        number = self._last_number + 1
        try:
            if self._draining:
                raise Problem("closing", "the gateway is shutting down", service=ask.service)
            begin = self._policy.begin(number, ask)
        except Problem as problem:
            self._say_error(ask.id, problem)
            return
        self._last_number = number
        self._requests[number] = ask
        self._numbers[ask.id] = number
        self._effects.append(begin)

    def _cancel(self, id_: Id) -> None:
        number = self._numbers.get(id_)
        if number is None:  # the CANCEL crossed the end of the request
            return
        ask = self._forget(number)
        self._say_error(id_, Problem("cancelled", "cancelled as asked", service=ask.service))
        self._effects.append(Cancel(number))
        self._end_if_drained()

    # ── from the broker ──────────────────────────────────────────────────────────────────────────────────────────────

    def answered(self, number: int, outcome: Outcome) -> None:
        """Take in a part, the reply or the error of a request."""
        ask = self._requests.get(number)
        if ask is None:
            return
        if isinstance(outcome, Reply) and not outcome.final:
            if ask.stream:
                self._say(ask, "partial", outcome)
            return
        if isinstance(outcome, Reply):
            self._say(ask, "final", outcome)
        else:
            self._say_error(ask.id, self._policy.problem(number, outcome, ask))
        self._forget(number)
        self._end_if_drained()

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    def ping(self) -> None:
        """Ask the peer for a sign of life."""
        if self._frames.state is State.OPEN:
            self._frames.send_ping(b"")

    def drain(self) -> None:
        """Close the connection once nothing is outstanding; requests from now on are for another gateway."""
        self._draining = True
        self._end_if_drained()

    def close(self, code: CloseCode, reason: str) -> None:
        """Close the connection for a reason."""
        if self._frames.state is State.OPEN:
            self._frames.send_close(code, reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore"))
            self._end(reason)

    def ended(self) -> None:
        """Take in that the connection is closed."""
        self._end("")

    def _end_if_drained(self) -> None:
        if self._draining and not self._requests and self._frames.state is State.OPEN:
            self._frames.send_close(CloseCode.GOING_AWAY, "the gateway is shutting down")
            self._end("")

    def _end(self, why: str) -> None:
        if self._closed:
            return
        self._closed = True
        numbers = list(self._requests)
        for number in numbers:
            self._forget(number)
        self._policy.hold(0)
        self._effects += [*(Cancel(number) for number in numbers), Close(why)]

    def _forget(self, number: int) -> Ask:
        ask = self._requests.pop(number)
        del self._numbers[ask.id]
        self._policy.end(number, ask)
        return ask

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def take_messages(self) -> list[bytes]:
        """Return what is to be written since the last call."""
        return [data for data in self._frames.data_to_send() if data]  # an empty one is the end of the stream

    def take_events(self) -> list[Effect]:
        """Return what is to be done since the last call."""
        effects, self._effects = self._effects, []
        return effects

    def _say(self, ask: Ask, kind: str, reply: Reply) -> None:
        message, text = encode(ask.id, kind, reply, ask.form)
        self._send(message, text=text)

    def _say_error(self, id_: Id | None, problem: Problem) -> None:
        self._send(encode_error(id_, problem.document()), text=True)

    def _send(self, message: bytes, *, text: bool) -> None:
        if self._frames.state is State.OPEN:  # the peer's close frame may have arrived in the same bytes
            (self._frames.send_text if text else self._frames.send_binary)(message)
