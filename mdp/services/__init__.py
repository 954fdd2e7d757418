"""Services as both sides know them: a name, and the types of the values."""

from .about import About, Description
from .service import BaseService, Service, Streaming
from .tool import Tool

__all__ = ["About", "BaseService", "Description", "Service", "Streaming", "Tool"]
