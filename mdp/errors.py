"""What can go wrong, in one tree.

    ZmdpError
    ├── SettingError (ValueError)          a setting or argument is out of range: says which, and what is allowed
    ├── BindError (OSError)                the broker cannot listen on an endpoint
    ├── ClosedError                        the client or worker was closed
    ├── BusyError                          a client was used while it is in the middle of another request
    ├── HandlerError                       a worker's handler returned or yielded something that is no reply
    └── RequestError                       a request brought no reply; each has `.service`
        ├── RequestTimeout (TimeoutError)  no reply in time, after every retry
        │   └── BrokerUnreachable          … because nobody listens at the endpoint
        ├── StreamInterrupted              a stream stopped after its first part: it is not repeated
        ├── ServiceNotFound (LookupError)  no worker offers the service
        └── ServiceError                   the service's handler failed; has `.code` and `.text`

A peer that breaks the protocol raises nothing: its messages are dropped and counted.
"""


class ZmdpError(Exception):
    """The root of all that zmdp raises on its own account."""


class SettingError(ZmdpError, ValueError):
    """A setting or argument is out of range."""


class BindError(ZmdpError, OSError):
    """The broker cannot listen on an endpoint."""


class ClosedError(ZmdpError):
    """The client or worker was closed and cannot be used any more."""


class BusyError(ZmdpError):
    """A client was used while it is in the middle of another request."""


class HandlerError(ZmdpError, TypeError):
    """A handler returned or yielded something that cannot be sent."""


class RequestError(ZmdpError):
    """A request brought no reply."""

    def __init__(self, message: str, *, service: str = "") -> None:
        super().__init__(message)
        self.service = service


class RequestTimeout(RequestError, TimeoutError):
    """No reply came in time, after every retry (C5)."""


class BrokerUnreachable(RequestTimeout):
    """No reply came in time, and nobody listens at the endpoint that was tried last."""


class StreamInterrupted(RequestError):
    """A stream fell silent after its first part.  It is not repeated: its parts would come twice."""


class ServiceNotFound(RequestError, LookupError):
    """No worker offers the service."""


class ServiceError(RequestError):
    """The service took the request and failed; `code` has three digits as in HTTP, `text` says how."""

    def __init__(self, code: int, text: str, *, service: str = "") -> None:
        Exception.__init__(self, code, text)  # the arguments, so that it can be pickled
        self.code = code
        self.text = text
        self.service = service

    def __str__(self) -> str:
        return f"service {self.service!r} failed with {self.code}: {self.text}"
