"""Call servers directly, without a broker: `FreelanceClient` and `AsyncFreelanceClient`, and what they return."""

from .client import AsyncFreelanceClient, FreelanceClient
from .session import RoundTrips, ServerStatus

__all__ = ["AsyncFreelanceClient", "FreelanceClient", "RoundTrips", "ServerStatus"]
