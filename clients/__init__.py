"""Call services: `Client`, what it returns and what it raises."""

from ..mdp.errors import (
    BrokerUnreachable,
    BusyError,
    ClosedError,
    CodecError,
    RequestCancelled,
    RequestError,
    RequestRejected,
    RequestTimeout,
    RetryLater,
    ServiceError,
    ServiceNotFound,
    SettingError,
    StreamInterrupted,
    WorkerLost,
    ZmdpError,
)
from .aio import AsyncClient
from .mdclient import Client
from .reply import Reply

__all__ = [
    "AsyncClient",
    "BrokerUnreachable",
    "BusyError",
    "Client",
    "ClosedError",
    "CodecError",
    "Reply",
    "RequestCancelled",
    "RequestError",
    "RequestRejected",
    "RequestTimeout",
    "RetryLater",
    "ServiceError",
    "ServiceNotFound",
    "SettingError",
    "StreamInterrupted",
    "WorkerLost",
    "ZmdpError",
]
