"""The PARTIALs of a request whose caller gets one reply, with all of them (C24): in MDP/0.1, and with FLP."""

from collections.abc import Sequence

from ...mdp import wire
from ...mdp.codes import Code
from ...mdp.limits import MAX_BODY, MAX_BODY_FRAMES


class CollectedPartials:
    """The frames of one request's PARTIALs; none are kept once they exceed the limits of a reply."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._count = 0
        self._bytes = 0

    def add(self, body: Sequence[bytes]) -> None:
        """Add the frames of one more PARTIAL."""
        self._count += len(body)
        self._bytes += wire.size_of(body)
        if self._bytes > MAX_BODY or self._count > MAX_BODY_FRAMES:
            self._frames = []  # the reply will be an error
        else:
            self._frames += body

    def reply(self, last: Sequence[bytes]) -> list[bytes]:
        """Return the body of the reply, which ends with `last`; that of a failure if it exceeds the limits."""
        self.add(last)
        if self._bytes > MAX_BODY or self._count > MAX_BODY_FRAMES:
            text = f"the parts of the reply together have more than {MAX_BODY} bytes or {MAX_BODY_FRAMES} frames"
            return wire.error_body(Code.TOO_LARGE, text)
        return self._frames
