"""Declare services as functions with types: `Services`, and what its decorator returns."""

from .offered import OfferedService, OfferedStreaming
from .services import Services
from .worker import ServicesWorker

__all__ = ["OfferedService", "OfferedStreaming", "Services", "ServicesWorker"]
