"""Call services: `Client`, what it returns and what it raises."""

from ..mdp.errors import (
    BrokerUnreachable,
    BusyError,
    ClosedError,
    RequestError,
    RequestTimeout,
    ServiceError,
    ServiceNotFound,
    SettingError,
    StreamInterrupted,
    ZmdpError,
)
from .mdclient import Client
from .session import Reply

__all__ = [
    "BrokerUnreachable",
    "BusyError",
    "Client",
    "ClosedError",
    "Reply",
    "RequestError",
    "RequestTimeout",
    "ServiceError",
    "ServiceNotFound",
    "SettingError",
    "StreamInterrupted",
    "ZmdpError",
]
