"""The output of the machine of a connection: messages to the program, and effects."""

from collections.abc import Callable
from typing import Final

from ..wire.framing import Decoder
from ..wire.framing import encode as framed
from ..wire.messages import ROLE_LOCAL, ROLE_OWNER, FluxRequest, Message, Response, encode
from ..wire.payloads import string_payload
from .effects import Effect

OWNER: Final = ROLE_OWNER | ROLE_LOCAL
"""The roles of the instance owner, who also signs responses."""


class Output:
    """Collects messages and effects until the shell takes them.  Writes in the byte order in which the peer writes.

    Args:
        decoder: Knows that order.
        owner: The user to whom the gateway belongs.
    """

    def __init__(self, decoder: Decoder, owner: int) -> None:
        self.wake: Callable[[], None] = lambda: None
        """Called when another connection has caused output, so that the shell takes it."""
        self._decoder = decoder
        self._owner = owner
        self._messages: list[bytes] = []
        self._effects: list[Effect] = []

    def take_messages(self) -> list[bytes]:
        """Return the messages since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def take_effects(self) -> list[Effect]:
        """Return the effects since the last call."""
        effects, self._effects = self._effects, []
        return effects

    def do(self, *effects: Effect) -> None:
        """Add effects."""
        self._effects += effects

    def write(self, message: Message) -> None:
        """Send a message."""
        self._messages.append(framed(encode(message), self._decoder.order))

    def choose(self, message: dict[str, bytes]) -> None:
        """Send a message that has been encoded in both orders."""
        self._messages.append(message[self._decoder.order])

    def respond(self, request: FluxRequest, payload: bytes | None = None, errnum: int = 0) -> None:
        """Respond to a request, unless it wants no response.  Flags are those of the request, as in flux-core."""
        if request.noresponse:
            return
        response = Response(
            request.topic, payload, request.matchtag, errnum, request.routes, self._owner, OWNER,
            request.upstream, request.streaming, request.user1,
        )  # fmt: skip
        self.write(response)

    def fail(self, request: FluxRequest, errnum: int, text: str = "") -> None:
        """Respond with an errno, and perhaps a text."""
        self.respond(request, string_payload(text) if text else None, errnum)
