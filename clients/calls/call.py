"""A request of an X1 client: its options, its state, and the exceptions that end it."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ...mdp import wire
from ...mdp.codes import Code, request_error
from ...mdp.errors import RequestError, RequestRejected, RetryLater, SettingError, StreamInterrupted, ZmdpError
from ...mdp.limits import LARGEST, Limits
from ...mdp.timers import TimerNode
from .reply import Reply
from .retry import Retry

if TYPE_CHECKING:
    from ..x1.broker_connection import BrokerConnection

RESERVED: Final = frozenset({"ttl", "headers"})
"""Names that options cannot have, because they are arguments of a request.  `wait` is allowed if it is true."""
# Not Final: mypyc (2.4) takes a Final of several floats for unset.
GRACE: tuple[float, float] = (0.05, 0.5)
"""How long the client waits beyond a request's timeout for the broker's ERROR, which is more informative than silence:
this fraction of the timeout, but at most this many seconds."""
FRAME_OVERHEAD_BYTES: Final = 100
"""Memory charged for each frame that is kept, in addition to its content."""
MAX_REPLY_BYTES: int = Limits().max_message
"""Maximum size of the collected PARTIALs of one reply; a stream has no limit."""
LIMITED: Final = b"limited"
"""The reason of an ERROR whose detail says after how many seconds to try again."""
_NO_WAIT: Final = wire.encode_options({"wait": False})

Outcome = Reply | ZmdpError
"""What a request results in: any number of parts, then a final `Reply` or an error."""


class Call(TimerNode):
    """One request, from when it is made until its FINAL or ERROR."""

    __slots__ = (
        "attempts", "body", "collected", "collected_bytes", "connection", "deadline", "due", "ended", "number",
        "options", "receiver", "retry", "service", "silence", "stream", "streamed", "timeout",
    )  # fmt: skip

    connection: "BrokerConnection"
    """Where it is outstanding, or waits for a connection."""

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
        """Set `due`, since something has happened.  Return whether there is such a time."""
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
        """Return the reply: what was collected, and the body of the FINAL."""
        reply = Reply(body, service=self.service.decode(), final=True)
        if self.collected is not None:
            reply[:0] = self.collected
            reply.collected = len(self.collected)
        return reply


def encode_options(options: Mapping[str, Any] | None, headers: Mapping[Any, Any] | None, wait: bool) -> bytes:
    """Return the options of a request as JSON; nothing if there are none.  Raises `SettingError` for invalid ones."""
    if not (options or headers):
        return b"" if wait else _NO_WAIT
    # The types of headers are checked here: compiled code would raise `TypeError` for types other than those declared.
    given: dict[str, Any] = {}
    if options:
        if not isinstance(options, Mapping):
            raise SettingError(f"options are {options!r:.200}: they are a mapping of names to values")
        given.update(options)
        reserved = RESERVED if given.get("wait", True) is True else RESERVED | {"wait"}
        if not reserved.isdisjoint(given):
            names = ", ".join(sorted(reserved.intersection(given)))
            raise SettingError(f"options have {names}: use the arguments timeout, wait and headers instead")
    if headers:
        mapped = isinstance(headers, Mapping)
        if not mapped or not all(isinstance(each, str) for pair in headers.items() for each in pair):
            raise SettingError(f"headers are {headers!r:.200}: they are a mapping, whose names and values are text")
        given["headers"] = dict(headers)
    if not wait:
        given["wait"] = False
    return wire.encode_options(given)


def size_to_keep(body: Sequence[bytes]) -> int:
    """Return the memory charged for a body that is kept."""
    return wire.size_of(body) + FRAME_OVERHEAD_BYTES * len(body)


def overlong(service: str, most: int) -> RequestRejected:
    """Return the exception of a request whose PARTIALs together have more than `most` bytes."""
    text = f"the parts of the reply of service {service!r} exceed {most} bytes: use stream()"
    return RequestRejected(text, service=service, code=Code.TOO_LARGE)


def is_refused(call: Call, error: wire.Error) -> bool:
    """Return whether a broker that drains refuses a request, which another broker can have."""
    return error.code == Code.DRAINING and not error.detail and not call.streamed


def error_of(call: Call, error: wire.Error) -> RequestError:
    """Return the exception for an ERROR."""
    service, text = call.service.decode(), error.text.decode(errors="replace")
    found: RequestError
    if call.streamed and error.code == Code.WORKER_LOST and not error.detail:
        message = f"service {service!r}: {text} ({error.code})"
        found = StreamInterrupted(message, service=service, code=error.code, text=text)
    elif error.reason == LIMITED:
        found = RetryLater(f"service {service!r}: {text} ({error.code})", service=service, code=error.code, text=text)
        found.retry_after = _seconds(error.detail)
    else:
        found = request_error(service, error.code, text, error.detail[0] if error.detail else None)
    found.reason, found.workers_lost = error.reason.decode(errors="replace"), error.lost
    return found


def _seconds(detail: list[bytes]) -> float | None:
    """Return the number of seconds that the detail of an ERROR says; None if there is none."""
    try:
        seconds = float(detail[0]) if detail else -1.0
    except ValueError:
        return None
    return seconds if 0 <= seconds < LARGEST else None


def interruption(call: Call, endpoint: str, reason: str) -> StreamInterrupted | None:
    """Return the exception of a stream that has lost its connection after its first part; None if it had none yet."""
    if not call.streamed:
        return None
    service = call.service.decode()
    text = f"the stream of service {service!r} broke off: the connection to {endpoint} was lost ({reason})"
    return StreamInterrupted(text, service=service)
