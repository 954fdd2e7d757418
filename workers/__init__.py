"""Offer services: `Worker`, `AsyncWorker`, or without a broker `FreelanceWorker`, `AsyncFreelanceWorker`; the `Request`
that a handler gets, and what it raises."""

from ..mdp.errors import ClosedError, CodecError, HandlerError, RequestCancelled, ServiceError, SettingError, ZmdpError
from ..mdp.logs import RequestFilter
from .aio import AsyncHandler, AsyncWorker
from .freelance import AsyncFreelanceWorker, FreelanceWorker
from .handling import Final, Frames, current_request
from .mdworker import Handler, Worker
from .request import Request

__all__ = [
    "AsyncFreelanceWorker",
    "AsyncHandler",
    "AsyncWorker",
    "ClosedError",
    "CodecError",
    "Final",
    "Frames",
    "FreelanceWorker",
    "Handler",
    "HandlerError",
    "Request",
    "RequestCancelled",
    "RequestFilter",
    "ServiceError",
    "SettingError",
    "Worker",
    "ZmdpError",
    "current_request",
]
