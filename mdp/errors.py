"""What can go wrong, in one tree.

    ZmdpError
    ├── SettingError (ValueError)          a setting or argument is out of range: says which, and what is allowed
    ├── InvalidUUID (ValueError)           a text that should be a request's UUID is not one: names the text
    ├── BindError (OSError)                the broker cannot listen on an endpoint
    ├── ClosedError                        the client or worker was closed
    ├── BusyError                          a client was used while it is in the middle of another request
    ├── HandlerError                       a worker's handler returned or yielded something that is no reply
    ├── CodecError (ValueError)            a value cannot be encoded, or a body cannot be decoded
    └── RequestError                       a request brought no reply; each has `.service`, and `.code` if X1 gave one
        ├── RequestTimeout (TimeoutError)  no reply in time (408)
        │   └── BrokerUnreachable          … because no broker answers
        ├── StreamInterrupted              a stream stopped after its first part: it is not repeated
        ├── ServiceNotFound (LookupError)  no worker offers the service (404)
        ├── RequestRejected                the request breaks a rule or a limit (400, 403, 413)
        ├── RetryLater                     the queue is full (429), or the broker is about to end (503)
        ├── RequestCancelled               somebody cancelled it (499)
        ├── WorkerLost                     its workers died, and it is not tried again (502)
        ├── ServiceError                   the service's handler failed (500, or what the service chose)
        └── TitanicError                   Titanic has not done what it was asked (400, 500)
            └── UnknownTicket (LookupError)  it knows no such request: closed, expired, or never accepted (400)

A peer that breaks the protocol raises nothing: its messages are dropped and counted.
"""


class ZmdpError(Exception):
    """The root of all that zmdp raises on its own account."""


class SettingError(ZmdpError, ValueError):
    """A setting or argument is out of range."""


class InvalidUUID(ZmdpError, ValueError):
    """A text that should be the UUID of a request to Titanic is not a UUID."""


class BindError(ZmdpError, OSError):
    """The broker cannot listen on an endpoint."""


class ClosedError(ZmdpError):
    """The client or worker was closed and cannot be used any more."""


class BusyError(ZmdpError):
    """A client was used while it is in the middle of another request."""


class HandlerError(ZmdpError, TypeError):
    """A handler returned or yielded something that cannot be sent."""


class CodecError(ZmdpError, ValueError):
    """A value cannot be encoded, or a body cannot be decoded."""


class RequestError(ZmdpError):
    """A request brought no reply."""

    code: int | None = None
    """The code of the ERROR that told so (docs/x1.md); None if nobody told."""
    text = ""
    """The text of that ERROR."""
    detail: bytes | None = None
    """The detail of that ERROR, a frame of the service's own making; None if there was none."""

    def __init__(
        self, message: str, *, service: str = "", code: int | None = None, text: str = "", detail: bytes | None = None
    ) -> None:
        super().__init__(message)
        self.service = service
        if code is not None:
            self.code, self.text, self.detail = code, text, detail


class RequestTimeout(RequestError, TimeoutError):
    """No reply came in time."""


class BrokerUnreachable(RequestTimeout):
    """No reply came in time, and no broker answers."""


class StreamInterrupted(RequestError):
    """A stream broke off after its first part.  It is not repeated: its parts would come twice."""


class ServiceNotFound(RequestError, LookupError):
    """No worker offers the service."""


class RequestRejected(RequestError):
    """The request, or the reply to it, breaks a rule or a limit; sent again it would do so again."""


class RetryLater(RequestError):
    """A queue is full (429), or the broker is about to end (503).

    The request was not done; but if it was the broker's end that interrupted it, it may have been in part.
    """


class RequestCancelled(RequestError):
    """The request was cancelled."""


class WorkerLost(RequestError):
    """The workers that had the request died, and it is not given to another."""


class ServiceError(RequestError):
    """The service took the request and failed; `code` has three digits as in HTTP, `text` says how.

    A handler may raise it to choose what the client gets; `detail` is a frame of its own making, or None.
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
    """Titanic has not done what it was asked; the text says why.

    What was to be stored was not (or, if its database went away in the very moment, perhaps was: see `key`).
    """


class UnknownTicket(TitanicError, LookupError):
    """Titanic knows no such request: it was closed, its reply has expired, or it was never accepted."""
