"""Offer services: `Worker`, `AsyncWorker`, the `Request` a handler gets, and what it raises."""

from ..mdp.errors import ClosedError, CodecError, HandlerError, RequestCancelled, ServiceError, SettingError, ZmdpError
from .aio import AsyncHandler, AsyncWorker
from .handling import Final, Frames, current_request
from .mdworker import Handler, Worker
from .request import Request

__all__ = [
    "AsyncHandler",
    "AsyncWorker",
    "ClosedError",
    "CodecError",
    "Final",
    "Frames",
    "Handler",
    "HandlerError",
    "Request",
    "RequestCancelled",
    "ServiceError",
    "SettingError",
    "Worker",
    "ZmdpError",
    "current_request",
]
