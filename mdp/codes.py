"""The codes of X1's ERROR (docs/reference/x1.md)."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from .errors import (
    RequestCancelled,
    RequestError,
    RequestRejected,
    RequestTimeout,
    RetryLater,
    ServiceError,
    ServiceNotFound,
    WorkerLost,
)


class Code(IntEnum):
    """Why a request failed.  Workers may send other codes, which their services define."""

    MALFORMED = 400
    NOT_ALLOWED = 403
    NO_WORKER = 404
    TIME_PASSED = 408
    TOO_LARGE = 413
    QUEUE_FULL = 429
    CANCELLED = 499
    FAILED = 500
    WORKER_LOST = 502
    DRAINING = 503

    @property
    def frame(self) -> bytes:
        """The code as a frame on the wire."""
        return b"%03d" % self


def request_error(service: str, code: int, text: str, detail: bytes | None = None) -> RequestError:
    """Return the exception for an ERROR.

    An ERROR with a detail frame is the service's own, whatever its code; one without (None) is the broker's.
    """
    kind = None if detail is not None else _ERRORS.get(code)
    if kind is None:
        return ServiceError(code, text, detail or None, service=service)
    return kind(f"service {service!r}: {text} ({code})", service=service, code=code, text=text)


_ERRORS: Final[Mapping[int, type[RequestError]]] = {
    Code.MALFORMED: RequestRejected,
    Code.NOT_ALLOWED: RequestRejected,
    Code.NO_WORKER: ServiceNotFound,
    Code.TIME_PASSED: RequestTimeout,
    Code.TOO_LARGE: RequestRejected,
    Code.QUEUE_FULL: RetryLater,
    Code.CANCELLED: RequestCancelled,
    Code.WORKER_LOST: WorkerLost,
    Code.DRAINING: RetryLater,
}
