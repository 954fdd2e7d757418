"""The exceptions with which requests of an X1 client end."""

from typing import Final

from ...mdp import wire
from ...mdp.codes import Code, request_error
from ...mdp.errors import RequestError, RequestRejected, RetryLater, StreamInterrupted
from ...mdp.limits import LARGEST
from .broker_connection import Call

LIMITED: Final = b"limited"
"""The reason of an ERROR whose detail says after how many seconds to try again."""


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


def too_large(service: bytes, why: str) -> RequestRejected:
    """Return the exception of a request that exceeds a limit of the broker."""
    name = service.decode()
    return RequestRejected(f"service {name!r}: {why}", service=name, code=Code.TOO_LARGE)
