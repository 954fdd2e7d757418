"""Errors as HTTP reports them: a status, and a problem document (RFC 9457).

A status in `KINDS` has only the meaning given there.  So the code that a service's own handler chose (a `ServiceError`)
becomes the status only if it is 4xx or 5xx and not in the table; otherwise the status is 500.  Its problem document has
the type `service-error` and the code in either case.  So a service's "no such user" (404) is never mistaken for "no
such service".
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..codes import Code
from ..errors import (
    BrokerUnreachable,
    ClosedError,
    CodecError,
    RequestError,
    RequestTimeout,
    ServiceError,
    ServiceNotFound,
    SettingError,
    StreamInterrupted,
    ZmdpError,
)

CONTENT_TYPE: Final = b"application/problem+json"
TYPE_BASE: Final = "https://github.com/zmdp/zmdp/blob/main/docs/how-to/gateways.md#"
"""The beginning of the type of every problem."""
RETRY_AFTER_SECONDS: Final = 1
"""The Retry-After of 429 and 503."""

RawHeaders = Sequence[tuple[bytes, bytes]]


class Kind(NamedTuple):
    """A kind of problem."""

    status: int
    title: str
    retry: bool = False
    """The same request may succeed a little later."""
    code: int | None = None
    """The code of X1's ERROR that reports it."""


KINDS: Final[Mapping[str, Kind]] = {
    # of the broker, by its ERROR
    "malformed": Kind(400, "The broker rejected the request as malformed", code=Code.MALFORMED.value),
    "not-allowed": Kind(403, "The caller may not call this service", code=Code.NOT_ALLOWED.value),
    "no-worker": Kind(404, "No worker offers this service", code=Code.NO_WORKER.value),
    "timeout": Kind(504, "No reply arrived in time", code=Code.TIME_PASSED.value),
    "too-large": Kind(413, "The request or its reply is too large", code=Code.TOO_LARGE.value),
    "queue-full": Kind(429, "Too many requests are waiting", retry=True, code=Code.QUEUE_FULL.value),
    "cancelled": Kind(499, "The request was cancelled", code=Code.CANCELLED.value),
    "failed": Kind(500, "The service failed", code=Code.FAILED.value),
    "worker-lost": Kind(502, "The worker died", code=Code.WORKER_LOST.value),
    "draining": Kind(503, "The broker is shutting down", retry=True, code=Code.DRAINING.value),
    # of the gateway's connection to the broker
    "unreachable": Kind(503, "The broker does not answer", retry=True),
    "interrupted": Kind(502, "The reply broke off"),
    "closing": Kind(503, "The gateway is shutting down", retry=True),
    # of the gateway
    "invalid": Kind(400, "The request is invalid"),
    "unauthorized": Kind(401, "A token or certificate is required"),
    "origin-not-allowed": Kind(403, "Pages of this origin may not use the gateway"),
    "not-found": Kind(404, "There is nothing at this path"),
    "method-not-allowed": Kind(405, "This path does not support the method"),
    "not-acceptable": Kind(406, "The reply has no type that is accepted"),
    "slow-request": Kind(408, "The request did not arrive in time"),
    "unsupported-media-type": Kind(415, "The body is encoded in a way that the gateway does not read"),
    "unknown-host": Kind(421, "The gateway does not have this name"),
    "internal": Kind(500, "The gateway failed"),
    "overloaded": Kind(503, "The server has too much to do", retry=True),
    "unknown-job": Kind(404, "There is no such job"),
    "no-titanic": Kind(503, "There is no Titanic", retry=True),
    "slow-reader": Kind(503, "The reply was not read in time"),
}
"""Every kind of problem that has one status, by the last part of its type."""
SERVICE_ERROR: Final = "service-error"
_OF_THE_BROKER: Final = {kind.code: name for name, kind in KINDS.items() if kind.code is not None}
_TAKEN: Final = frozenset(kind.status for kind in KINDS.values())


class Problem(Exception):
    """An error that becomes a response.

    Args:
        kind: The last part of the problem's type: a name in `KINDS`, or a name with its own `status` and `title`.
        detail: What happened this time, and what to do.
        service: The service that was called.
        code: The code of the ERROR that reported it; by default, that of the kind.
        headers: Further headers of the response.
        members: Further members of the document.
        status: For kinds that are not in the table.
        title: As above.
    """

    def __init__(
        self,
        kind: str,
        detail: str,
        *,
        service: str = "",
        code: int | None = None,
        headers: RawHeaders = (),
        members: Mapping[str, Any] | None = None,
        status: int | None = None,
        title: str | None = None,
    ) -> None:
        super().__init__(detail)
        known = KINDS.get(kind) or Kind(500, kind)
        self.kind = kind
        self.status = status or known.status
        self.title = title or known.title
        self.detail = detail
        self.service = service
        self.code = known.code if code is None else code
        self.headers = [*headers]
        self.members = members or {}
        if known.retry and status is None:
            self.headers.append((b"retry-after", b"%d" % RETRY_AFTER_SECONDS))

    def document(self) -> dict[str, Any]:
        """Return the problem document."""
        found: dict[str, Any] = {
            "type": TYPE_BASE + self.kind,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        if self.service:
            found["service"] = self.service
        if self.code is not None:
            found["code"] = self.code
        return {**found, **self.members}

    def body(self) -> bytes:
        """Return the problem document as JSON."""
        return json.dumps(self.document(), ensure_ascii=False).encode(errors="replace")

    def response(self) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Return status, headers and body."""
        body = self.body()
        headers = [(b"content-type", CONTENT_TYPE), (b"content-length", b"%d" % len(body)), *self.headers]
        return self.status, headers, body


def problem_of(error: ZmdpError, service: str = "", *, overdue: bool = False) -> Problem:
    """Return the problem that tells an HTTP client about an exception of zmdp.

    `overdue` says that the request's time has passed, which a `StreamInterrupted` does not.
    """
    service = (error.service if isinstance(error, RequestError) else "") or service
    if isinstance(error, ServiceError):
        return _service_error(error, service)
    if isinstance(error, BrokerUnreachable):
        return Problem("unreachable", str(error), service=service)
    if isinstance(error, RequestError) and error.code in _OF_THE_BROKER:
        return Problem(_OF_THE_BROKER[error.code], error.text or str(error), service=service)
    if isinstance(error, ServiceNotFound):  # without a code, it comes from Titanic's client
        return Problem("no-titanic", str(error), service=service)
    if isinstance(error, StreamInterrupted) and not overdue:
        return Problem("interrupted", str(error), service=service)
    if isinstance(error, RequestTimeout | StreamInterrupted):
        return Problem("timeout", str(error), service=service)
    if isinstance(error, SettingError | CodecError):
        return Problem("invalid", str(error), service=service)
    if isinstance(error, ClosedError):
        return Problem("closing", "the gateway is shutting down", service=service)
    return Problem("interrupted", str(error), service=service)


def _service_error(error: ServiceError, service: str) -> Problem:
    """Return the problem for a handler's error: a failure, or an error with a code of its own."""
    if error.code == Code.FAILED and error.detail is None:
        return Problem("failed", error.text, service=service)
    own = 400 <= error.code < 600 and error.code not in _TAKEN
    return Problem(
        SERVICE_ERROR, error.text, service=service, code=error.code, members=as_members(error.detail),
        status=error.code if own else 500, title="The service reported an error",
    )  # fmt: skip


def as_members(data: bytes | None) -> dict[str, str]:
    """Return bytes as a member of a JSON object: `data` if they are text, otherwise `data_base64`."""
    if data is None:
        return {}
    try:
        return {"data": data.decode()}
    except UnicodeDecodeError:
        return {"data_base64": base64.b64encode(data).decode()}
