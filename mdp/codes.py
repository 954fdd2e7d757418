"""The codes of X1's ERROR (docs/x1.md): what each means, for the broker that sends it and the client that gets it."""

from enum import IntEnum


class Code(IntEnum):
    """Why a request ended without a reply.  A worker may send others, of its service's own making."""

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
        """The code as it goes on the wire."""
        return b"%03d" % self
