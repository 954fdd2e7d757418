"""The codes of X1's ERROR (docs/x1.md)."""

from enum import IntEnum


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
