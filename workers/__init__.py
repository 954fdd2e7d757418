"""Offer services: `Worker`, the `Request` its handler gets, and what it raises."""

from ..mdp.errors import ClosedError, HandlerError, SettingError, ZmdpError
from .mdworker import Frames, Handler, Worker
from .session import Request

__all__ = ["ClosedError", "Frames", "Handler", "HandlerError", "Request", "SettingError", "Worker", "ZmdpError"]
