"""What a service is: its name and the types of its values, for those who offer it and those who call it."""

from .about import About, Description
from .service import BaseService, Service, Streaming
from .tool import Tool

__all__ = ["About", "BaseService", "Description", "Service", "Streaming", "Tool"]
