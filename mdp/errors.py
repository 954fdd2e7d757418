"""All exceptions, in one hierarchy.

    ZmdpError
    ├── SettingError (ValueError)          a setting or argument is invalid
    ├── InvalidUUID (ValueError)           a text that should be a request's UUID is not one
    ├── BindError (OSError)                the broker cannot listen on an endpoint
    ├── ClosedError                        the client or worker was closed
    ├── BusyError                          recv() was called, but nothing was sent
    ├── HandlerError (TypeError)           a worker's handler returned or yielded something that cannot be sent
    ├── CodecError (ValueError)            a value cannot be encoded, or a body cannot be decoded
    └── RequestError                       a request failed; has `.service`, and `.code` if an ERROR reported it
        ├── RequestTimeout (TimeoutError)  no reply in time (408)
        │   └── BrokerUnreachable          … because no broker answers
        ├── StreamInterrupted              a stream broke off after its first part
        ├── ServiceNotFound (LookupError)  no worker offers the service (404)
        ├── RequestRejected                the request or its reply violates a rule or a limit (400, 403, 413)
        ├── RetryLater                     a queue is full (429), or the broker is shutting down (503)
        ├── RequestCancelled               the request was cancelled (499)
        ├── WorkerLost                     the workers that held the request died (502)
        ├── ServiceError                   the service's handler failed (500, or the service's own code)
        └── TitanicError                   Titanic could not perform the operation (400, 500)
            └── UnknownTicket (LookupError)  no such request: closed, expired, or never accepted (400)

Peers that violate the protocol raise no exceptions: their messages are dropped and counted.
"""


class ZmdpError(Exception):
    """Base class of all exceptions that zmdp raises."""


class SettingError(ZmdpError, ValueError):
    """A setting or argument is invalid; the message says which, and what is allowed."""


class InvalidUUID(ZmdpError, ValueError):
    """A text that should be the UUID of a request to Titanic is not a UUID."""


class BindError(ZmdpError, OSError):
    """The broker cannot listen on an endpoint."""


class ClosedError(ZmdpError):
    """The client or worker was closed and can no longer be used."""


class BusyError(ZmdpError):
    """`recv` was called, but nothing that was sent is outstanding."""


class HandlerError(ZmdpError, TypeError):
    """A handler returned or yielded something that cannot be sent."""


class CodecError(ZmdpError, ValueError):
    """A value cannot be encoded, or a body cannot be decoded."""


class RequestError(ZmdpError):
    """A request failed."""

    code: int | None = None
    """The code of the ERROR that reported the failure (docs/reference/x1.md); None if there was none."""
    text = ""
    """The text of that ERROR."""
    detail: bytes | None = None
    """The detail of that ERROR, a frame defined by the service; None if there was none."""
    reason = ""
    """The broker's name for the failure, or Titanic's, such as `queue-full`: programs can compare it.  Empty if the
    service failed, or the dialect has no ERROR."""
    workers_lost = 0
    """How many workers were lost while they held the request, as far as the broker knows."""

    def __init__(
        self,
        message: str,
        *,
        service: str = "",
        code: int | None = None,
        text: str = "",
        detail: bytes | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.service = service
        if code is not None:
            self.code, self.text, self.detail = code, text, detail
        if reason:
            self.reason = reason


class RequestTimeout(RequestError, TimeoutError):
    """No reply arrived in time."""


class BrokerUnreachable(RequestTimeout):
    """No reply arrived in time, and no broker answers; without a broker (Freelance), no server."""


class StreamInterrupted(RequestError):
    """A stream broke off after its first part.  It is not retried, because its parts would arrive twice."""


class ServiceNotFound(RequestError, LookupError):
    """No worker offers the service."""


class RequestRejected(RequestError):
    """The request or its reply violates a rule or a limit.  Retrying does not help."""


class RetryLater(RequestError):
    """A queue is full or a limit is reached (429), or the broker is shutting down (503).

    After 429 the request was not executed.  After 503 a worker may have started it.
    """

    retry_after: float | None = None
    """Seconds after which a limit lets the request start, if nobody else is faster; None if it is not known."""


class RequestCancelled(RequestError):
    """The request was cancelled."""


class WorkerLost(RequestError):
    """The workers that held the request died, and no other worker gets it; or the broker that it is addressed to cannot
    be reached.
    """


class ServiceError(RequestError):
    """The service's handler failed: `code` has three digits as in HTTP, and `text` is the explanation.

    A handler can raise it to choose what the client gets; `detail` is a frame of the handler's choice, or None.
    """

    code: int

    def __init__(self, code: int, text: str, detail: bytes | None = None, *, service: str = "") -> None:
        Exception.__init__(self, code, text, detail)  # the arguments, so that it can be pickled
        self.code = code
        self.text = text
        self.detail = detail
        self.service = service

    def __str__(self) -> str:
        where = f"service {self.service!r} failed" if self.service else "failed"
        return f"{where} with {self.code}: {self.text}"


class TitanicError(RequestError):
    """Titanic could not perform the operation; the text says why.

    A submitted request was not stored, unless the database failed during the commit: submit it again with the same
    `key`.
    """


class UnknownTicket(TitanicError, LookupError):
    """Titanic has no such request: it was closed, its reply has expired, or it was never accepted."""


def flaw(error: Exception) -> str:
    """Return what is wrong with a value, given the error; the versions of Python word differently how deep it is."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
