"""Call services: `Client` and `AsyncClient`, or without a broker `FreelanceClient` and `AsyncFreelanceClient`; what
they return and what they raise."""

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
from .freelance import AsyncFreelanceClient, FreelanceClient
from .freelance_session import ServerStatus
from .mdclient import Client
from .reply import Reply

__all__ = [
    "AsyncClient",
    "AsyncFreelanceClient",
    "BrokerUnreachable",
    "BusyError",
    "Client",
    "ClosedError",
    "CodecError",
    "FreelanceClient",
    "Reply",
    "RequestCancelled",
    "RequestError",
    "RequestRejected",
    "RequestTimeout",
    "RetryLater",
    "ServerStatus",
    "ServiceError",
    "ServiceNotFound",
    "SettingError",
    "StreamInterrupted",
    "WorkerLost",
    "ZmdpError",
]
