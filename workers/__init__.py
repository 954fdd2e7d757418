"""Offer services: `Worker` and `AsyncWorker`; the `Request` that a handler gets, and what it raises.

`zmdp.interop.freelance.worker` has servers that need no broker.
"""

from ..mdp.errors import ClosedError, CodecError, HandlerError, RequestCancelled, ServiceError, SettingError, ZmdpError
from ..mdp.program.logs import RequestFilter
from .aio import AsyncWorker
from .aio_handling import AsyncHandler
from .handling import Frames, Last, current_request
from .mdworker import Handler, Worker
from .session.request import Request

__all__ = [
    "AsyncHandler",
    "AsyncWorker",
    "ClosedError",
    "CodecError",
    "Frames",
    "Handler",
    "HandlerError",
    "Last",
    "Request",
    "RequestCancelled",
    "RequestFilter",
    "ServiceError",
    "SettingError",
    "Worker",
    "ZmdpError",
    "current_request",
]
