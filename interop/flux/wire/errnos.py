"""Errors of the broker and of services ↔ Flux's numbers (Linux's errno) and texts."""

import json
from typing import Final

from ....mdp.codes import Code
from ....mdp.errors import (
    BrokerUnreachable,
    ClosedError,
    RequestError,
    RequestTimeout,
    ServiceError,
    SettingError,
    ZmdpError,
)
from .messages import (
    EAGAIN,
    ECANCELED,
    EHOSTUNREACH,
    EIO,
    EMSGSIZE,
    ENOSYS,
    EPERM,
    EPROTO,
    ETIMEDOUT,
)

_ERRNO_BY_CODE: Final[dict[int, int]] = {
    Code.MALFORMED: EPROTO,
    Code.NOT_ALLOWED: EPERM,
    Code.NO_WORKER: ENOSYS,
    Code.TIME_PASSED: ETIMEDOUT,
    Code.TOO_LARGE: EMSGSIZE,
    Code.QUEUE_FULL: EAGAIN,
    Code.CANCELLED: ECANCELED,
    Code.WORKER_LOST: EHOSTUNREACH,
    Code.DRAINING: EAGAIN,
}
_CODE_BY_ERRNO: Final[dict[int, int]] = {
    EPROTO: Code.MALFORMED,
    EPERM: Code.NOT_ALLOWED,
    ENOSYS: Code.NO_WORKER,
    ETIMEDOUT: Code.TIME_PASSED,
    EMSGSIZE: Code.TOO_LARGE,
    EAGAIN: Code.QUEUE_FULL,
    ECANCELED: Code.CANCELLED,
    EHOSTUNREACH: Code.WORKER_LOST,
}
MAX_ERRNO: Final = 0xFFFFFFFF


def failure(error: ZmdpError) -> tuple[int, str]:
    """Return errno and text of a response for the error of a request; the text may be empty.

    An error of the broker has a number for each code.  A service's own error is EIO with the service's text, unless
    the service is a Flux program behind another gateway (`reported`).
    """
    if isinstance(error, ServiceError):
        return _from_detail(error.detail) or EIO, error.text
    if isinstance(error, BrokerUnreachable | ClosedError):
        return EHOSTUNREACH, "the broker does not answer"
    if isinstance(error, RequestTimeout):
        return ETIMEDOUT, error.text
    if isinstance(error, RequestError):
        return _ERRNO_BY_CODE.get(error.code or 0, EHOSTUNREACH), error.text
    return (EPROTO if isinstance(error, SettingError) else EIO), str(error)


def reported(errnum: int, text: str) -> tuple[int, str, bytes]:
    """Return code, text and detail of the ERROR for a Flux program's response that has an errno.

    The code is the nearest one of X1.  The detail carries the errno itself to other gateways.
    """
    return _CODE_BY_ERRNO.get(errnum, Code.FAILED), text or f"errno {errnum}", b'{"errnum":%d}' % errnum


def _from_detail(detail: bytes | None) -> int | None:
    """Return the errno in the detail of an ERROR, or None."""
    if not detail or not detail.startswith(b'{"errnum":'):
        return None
    try:
        value = json.loads(detail)["errnum"]
    except (ValueError, RecursionError, KeyError):
        return None
    return value if type(value) is int and 0 < value <= MAX_ERRNO else None
