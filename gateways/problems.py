"""Exceptions of zmdp as problem documents.

A status in `KINDS` always means what is said there.  So the code that a service's own handler chose (a `ServiceError`)
becomes the status only if it is 4xx or 5xx and not in the table; otherwise the status is 500.  Its problem document has
the type `service-error` and the code in either case.  So a service's "no such user" (404) is never mistaken for "no
such service".
"""

import base64
from typing import Final

from ..mdp.codes import Code
from ..mdp.errors import (
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
from ..mdp.http.problems import KINDS, Problem

SERVICE_ERROR: Final = "service-error"
_OF_THE_BROKER: Final = {kind.code: name for name, kind in KINDS.items() if kind.code is not None}
_TAKEN: Final = frozenset(kind.status for kind in KINDS.values())


def problem_of(error: ZmdpError, service: str = "", *, overdue: bool = False) -> Problem:
    """Return the problem that tells an HTTP client about an exception of zmdp.

    `overdue` tells that the time for the request has passed, which a `StreamInterrupted` does not say.
    """
    service = (error.service if isinstance(error, RequestError) else "") or service
    if isinstance(error, ServiceError):
        return _service_error(error, service)
    if isinstance(error, BrokerUnreachable):
        return Problem("unreachable", str(error), service=service)
    if isinstance(error, RequestError) and error.code in _OF_THE_BROKER:
        return Problem(_OF_THE_BROKER[error.code], error.text or str(error), service=service)
    if isinstance(error, ServiceNotFound):  # without a code, it is Titanic's client that says so
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
    """Return what a handler reports: that it failed, or an error with a code of its own."""
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
