"""Why the broker drops requests: reason, code and text of each drop, in one table."""

from enum import StrEnum
from typing import Final, NamedTuple

from ...codes import Code


class Drop(StrEnum):
    """Why a valid request was dropped.  The values are the keys under `dropped` in `mmi.stats`."""

    EXPIRED = "expired"
    QUEUE_FULL = "queue-full"
    MEMORY_FULL = "memory-full"
    TOO_MANY_SERVICES = "too-many-services"
    TOO_MANY_UNSERVED = "too-many-unserved-services"
    NOT_ALLOWED = "not-allowed"
    NOT_ON_BEHALF = "not-on-behalf"
    USER_NOT_ALLOWED = "user-not-allowed"
    ROLE_OUTSTANDING = "role-outstanding"
    ROLE_QUEUED = "role-queued"
    ROLE_MEMORY_FULL = "role-memory-full"
    LIMITED = "limited"
    LIMIT_PASSED = "limit-passed"
    TOO_MANY_GROUPS = "too-many-groups"
    DRAINING = "draining"
    CLIENT_GONE = "client-gone"
    WORKERS_LOST = "workers-lost"
    LAST_WORKER_LOST = "last-worker-lost"
    LOST_AFTER_PARTIAL = "worker-lost-after-partial"
    REPLY_TOO_LARGE = "reply-too-large"
    NO_WORKER = "no-worker"
    NO_BROKER = "no-such-broker"
    OPTIONS_TOO_LONG = "options-too-long"
    LINKS_LOST = "links-lost"
    TTL_PASSED = "ttl-passed"
    CANCELLED = "cancelled"
    HANDLER_FAILED = "handler-failed"
    CLOSING = "broker-closing"


class Report(NamedTuple):
    """How a drop is reported."""

    code: int | None
    """The code of the ERROR that an X1 client gets; None if the broker sends it none."""
    text: str
    """The text of that ERROR, with fields in braces; see `text_of`."""
    quiet: bool = False
    """Part of normal operation: logged as information, not as a warning."""


_EXPIRED: Final = "{what} passed before a worker was free for it: {workers}"

REPORTS: Final[dict[Drop, Report]] = {
    Drop.EXPIRED: Report(Code.TIME_PASSED.value, _EXPIRED, quiet=True),
    Drop.TTL_PASSED: Report(Code.TIME_PASSED.value, _EXPIRED, quiet=True),
    Drop.LIMIT_PASSED: Report(Code.TIME_PASSED.value, _EXPIRED, quiet=True),
    Drop.QUEUE_FULL: Report(
        Code.QUEUE_FULL.value, "{limits.max_queue} requests are already waiting for the service: retry later"
    ),
    Drop.MEMORY_FULL: Report(
        Code.QUEUE_FULL.value,
        "the broker has {limits.max_request_bytes} bytes for requests, and this connection's share of them is used up: "
        "retry later",
    ),
    Drop.TOO_MANY_SERVICES: Report(
        Code.QUEUE_FULL.value,
        "no worker offers the service, and {limits.max_services} services are in use: retry later",
    ),
    Drop.TOO_MANY_UNSERVED: Report(
        Code.QUEUE_FULL.value,
        "no worker offers the service, and this client has already named {limits.max_unserved} such services: "
        "retry later",
    ),
    Drop.NOT_ALLOWED: Report(
        Code.NOT_ALLOWED.value,
        "role {request.client.role.name} may not call it: the broker's access file decides",
    ),
    Drop.NOT_ON_BEHALF: Report(
        Code.NOT_ALLOWED.value,
        "role {request.client.role.name} may not ask on behalf of others: it needs on_behalf "
        "in the broker's access file",
    ),
    Drop.USER_NOT_ALLOWED: Report(
        Code.NOT_ALLOWED.value,
        "the role on whose behalf role {request.client.role.name} asks may not call it: "
        "the broker's access file decides",
    ),
    Drop.ROLE_OUTSTANDING: Report(
        Code.QUEUE_FULL.value,
        "role {request.client.role.name} may have {request.client.role.max_outstanding} outstanding requests, "
        "and has: retry later",
    ),
    Drop.ROLE_QUEUED: Report(
        Code.QUEUE_FULL.value,
        "role {request.client.role.name} may have {request.client.role.max_queued} waiting requests, "
        "and has: retry later",
    ),
    Drop.ROLE_MEMORY_FULL: Report(
        Code.QUEUE_FULL.value,
        "requests of role {request.client.role.name} may take {request.client.role.max_request_bytes} bytes, "
        "and that is used up: retry later",
    ),
    Drop.LIMITED: Report(
        Code.QUEUE_FULL.value,
        "the service is limited ({request.service.schedule.limits}), no more requests may start now, and wait is "
        "false: retry later",
        quiet=True,
    ),
    Drop.TOO_MANY_GROUPS: Report(
        Code.QUEUE_FULL.value, "requests of {max_groups} groups are waiting or have started: retry later"
    ),
    Drop.DRAINING: Report(
        Code.DRAINING.value, "the broker is draining and takes no new requests: retry later, or at another broker"
    ),
    Drop.CLOSING: Report(
        Code.DRAINING.value, "the broker shut down before the request was done: retry later, or at another broker"
    ),
    Drop.WORKERS_LOST: Report(
        Code.WORKER_LOST.value,
        "{worker}, and this was attempt {request.attempts} of {limits.max_attempts} (max_attempts)",
    ),
    Drop.LAST_WORKER_LOST: Report(
        Code.WORKER_LOST.value, "{worker}, no other worker offers the service, and wait is false"
    ),
    Drop.LOST_AFTER_PARTIAL: Report(
        Code.WORKER_LOST.value, "its worker was lost after a PARTIAL, so it cannot be retried"
    ),
    Drop.REPLY_TOO_LARGE: Report(
        Code.TOO_LARGE.value,
        "the reply exceeds the limits of {limits.max_message} bytes and {limits.max_frames} frames",
    ),
    Drop.NO_WORKER: Report(Code.NO_WORKER.value, "no worker offers the service", quiet=True),
    Drop.NO_BROKER: Report(Code.WORKER_LOST.value, "broker {broker} cannot be reached from here", quiet=True),
    Drop.LINKS_LOST: Report(
        Code.WORKER_LOST.value,
        "the links over which it was passed to other brokers broke {request.way.losses} times (max_attempts)",
    ),
    Drop.OPTIONS_TOO_LONG: Report(
        Code.TOO_LARGE.value, "its options are too long, with what the broker has to add for a worker or another broker"
    ),
    Drop.CANCELLED: Report(Code.CANCELLED.value, "cancelled", quiet=True),
    Drop.CLIENT_GONE: Report(None, "its client is gone", quiet=True),
    Drop.HANDLER_FAILED: Report(None, "its handler failed", quiet=True),  # an X1 client gets the worker's own ERROR
}
