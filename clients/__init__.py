"""Call services: `Client` and `AsyncClient`, what they return and what they raise.

`zmdp.interop.freelance.client` has clients that need no broker.
"""

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
from .calls.reply import Reply
from .calls.retry import Retry
from .mdclient import Client

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
    "Retry",
    "RetryLater",
    "ServiceError",
    "ServiceNotFound",
    "SettingError",
    "StreamInterrupted",
    "WorkerLost",
    "ZmdpError",
]
