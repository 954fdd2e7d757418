"""What a connection writes: messages, and responses to its requests."""

from typing import Final

from ..effects import Effect, Write
from .framing import Decoder
from .framing import encode as framed
from .messages import ROLE_LOCAL, ROLE_OWNER, Message, Request, Response, encode
from .payloads import string_payload

OWNER: Final = ROLE_OWNER | ROLE_LOCAL
"""What the instance owner may do, who also signs responses."""


class Writer:
    """Writes in the byte order in which the peer writes.

    Args:
        decoder: Knows that order.
        owner: The user to whom the gateway belongs.
    """

    def __init__(self, decoder: Decoder, owner: int) -> None:
        self._decoder = decoder
        self._owner = owner

    def write(self, message: Message) -> Write:
        """Send a message."""
        return Write(framed(encode(message), self._decoder.order))

    def choose(self, message: dict[str, bytes]) -> Write:
        """Send a message that has been encoded in both orders."""
        return Write(message[self._decoder.order])

    def respond(self, request: Request, payload: bytes | None = None, errnum: int = 0) -> list[Effect]:
        """Respond to a request, unless it wants no response.  Flags are those of the request, as in flux-core."""
        if request.noresponse:
            return []
        response = Response(
            request.topic, payload, request.matchtag, errnum, request.routes, self._owner, OWNER,
            request.upstream, request.streaming, request.user1,
        )  # fmt: skip
        return [Write(framed(encode(response), self._decoder.order))]

    def fail(self, request: Request, errnum: int, text: str = "") -> list[Effect]:
        """Respond with an errno, and perhaps a text."""
        return self.respond(request, string_payload(text) if text else None, errnum)
