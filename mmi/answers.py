"""Answer requests to `mmi.*` from a broker's state (RFC 8, C25, C26).

    mmi.service   name           200 if a worker offers the service, else 404; 403 if the client may not know
    mmi.services  [name]         JSON: services, their workers and waiting requests
    mmi.workers   [service]      JSON: workers, their load and uptime; those whose id is greater than a second frame
    mmi.stats     anything       JSON: counts since the start, and the current numbers
    mmi.broker    anything       JSON: its name, version, uptime, dialects, limits
    mmi.brokers   anything       JSON: the brokers that can be reached, and the links over which they are
    mmi.describe  name           JSON: the descriptions of a service by its workers; 404 if the client may know of none
    mmi.metrics   [name]         JSON: the counts of each service whose name is greater, and of each role
    mmi.requests  [service]      JSON: requests that wait or that workers hold; without as many as a second frame says
    mmi.cancel    id             JSON: whether that request was in flight, and so is cancelled
    mmi.limit     name [JSON]    JSON: the limits of a service, which are replaced by those in the second frame, if any
    mmi.tail      [JSON]         JSON: requests that have ended since it was asked last
    mmi.failures  [service]      JSON: the requests that failed last, and why

An answer is one frame.  The answer to any other `mmi.*` is 501, that to a malformed question 400.  Lists are cut at
`MAX_ROWS` rows or fewer; `more` is the number of rows that were left out.  This module only reads
the broker's state; the broker itself cancels requests, sets limits, and remembers the rows that a
tail has shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..mdp.errors import SettingError
from ..mdp.service_limits import NO_LIMITS, ServiceLimits
from ..mdp.wire import BROKER, DESCRIBE, DIALECTS, MMI
from ..mdp.wire.names import show, valid_service
from ..version import __version__, compiled_parts

if TYPE_CHECKING:
    from ..mdp.broker.core.directory import Directory
    from ..mdp.broker.core.journal import Stats
    from ..mdp.broker.core.records import Service
    from ..mdp.broker.core.registry import Registry
    from ..mdp.broker.core.roles import Roles
    from ..mdp.broker.core.state import Federation
    from ..mdp.broker.operators.orders import Orders
    from ..mdp.broker.operators.watch import Watch
    from ..mdp.limits import Limits

MAX_ROWS: Final = 1000
METRICS_ROWS: Final = 100
"""Services in one answer to `mmi.metrics`: it must not hold up the broker, even if it has 10,000."""
REQUEST_ROWS: Final = 250
"""Requests in one answer to `mmi.requests`, for the same reason: each row takes longer than others."""
GROUP_ROWS: Final = 20
"""Groups in an answer to `mmi.limit`."""
MAX_SKIPPED: Final = 100_000
"""Requests that can be left out before the first row: they must be counted."""
Sees = Callable[[bytes], bool]
"""Returns whether the client may know of the service of that name."""


class Broker(Protocol):
    """A broker, as far as the answers are made from it."""

    name: str
    started: float
    limits: Limits
    directory: Directory
    registry: Registry
    roles: Roles
    stats: Stats
    federation: Federation
    watch: Watch
    orders: Orders

    @property
    def draining(self) -> bool:
        """Whether no more requests are accepted."""


def _everything(service: bytes) -> bool:
    del service
    return True


def answer(name: bytes, body: list[bytes], broker: Broker, now: float, sees: Sees = _everything) -> list[bytes]:
    """Return the body of the FINAL that answers a request for `name`, which begins with `mmi.`.

    It leaves out services of which `sees` is not true.
    """
    if name == b"mmi.service":
        # C26: busy workers count; a service without a worker is 404.
        if not sees(body[0]):
            return [b"403"]
        service = broker.directory.services.get(body[0])
        offered = (service is not None and service.available) or body[0] in broker.directory.reachable
        return [b"200" if offered and not body[0].startswith(MMI) else b"404"]
    if name == DESCRIBE:
        return [_description(broker, body[0], sees)]
    paged, plain = _PAGED.get(name), _ANSWERS.get(name)
    if paged is not None:
        found = paged(broker, body, sees, now)
    elif plain is not None:
        found = plain(broker, body[0], sees, now)
    else:
        return [b"501"]
    return [b"400" if found is None else json.dumps(found).encode()]


def _description(broker: Broker, wanted: bytes, sees: Sees) -> bytes:
    directory = broker.directory
    service = directory.services.get(wanted) or directory.reachable.get(wanted)
    if service is None or wanted.startswith(MMI) or not sees(wanted):
        return b"404"
    brokers = sorted(remote.broker for remote in service.remotes)
    if not service.available and not brokers:
        return b"404"
    head = {"service": show(wanted), "broker": broker.name, "workers": service.available, "brokers": brokers}
    if limits := service.schedule.limits:
        head["limits"] = limits.as_dict()
    said = b",".join([b'{"workers":%d,"about":%s}' % (each.workers, each.text) for each in directory.abouts.of(wanted)])
    return json.dumps(head).encode()[:-1] + b', "abouts": [' + said + b"]}"


def _services(broker: Broker, wanted: bytes, sees: Sees, now: float) -> dict[str, Any]:
    services = {**broker.directory.reachable, **broker.directory.services}
    named = [services[wanted]] if wanted in services else () if wanted else services.values()
    found = [service for service in named if sees(service.name) and not service.name.startswith(MMI)]
    return _rows(
        "services",
        len(found),
        (
            {
                "name": show(s.name),
                "workers": s.available,
                "idle": s.schedule.free,
                "credit": s.schedule.capacity,
                "running": s.running,
                "queued": s.waiting,
                **_limited(s, now),
                "dispatched": s.dispatched,
                "remote_credit": sum(remote.credit for remote in s.remotes),
                "remote_free": sum(max(remote.may_hold - remote.load, 0) for remote in s.remotes),
                "remote_running": sum(remote.load for remote in s.remotes),
                "hops": 0 if s.available else min((remote.hops for remote in s.remotes), default=None),
            }
            for s in found
        ),
    )


def _limited(service: Service, now: float) -> dict[str, Any]:
    """Return the limits of a service, and how many requests wait because of them."""
    groups = service.schedule.groups
    if groups is None:
        return {"limits": {}, "held_back": 0}
    return {"limits": groups.limits.as_dict(), "held_back": groups.held_back(now)}


def _number(body: list[bytes]) -> int | None:
    """Return the number in the second frame, with which a page of a list begins; None if it is malformed."""
    frame = bytes(body[1])
    return int(frame) if len(frame) < 19 and frame.isdigit() else None


def _workers(broker: Broker, body: list[bytes], sees: Sees, now: float) -> dict[str, Any] | None:
    directory = broker.directory
    wanted = body[0]
    after = _number(body) if len(body) > 1 else 0
    if after is None:
        return None
    service = directory.services.get(wanted)
    named = (service.workers if service else ()) if wanted else directory.workers.values()
    # In the order of their ids, in which they were registered.
    workers = [worker for worker in named if worker.id > after and sees(worker.service.name)]
    return _rows(
        "workers",
        len(workers),
        (
            {
                "id": w.id,
                "service": show(w.service.name),
                "protocol": DIALECTS[w.header],
                "name": w.name,
                "host": w.host,
                "pid": w.pid,
                "version": w.version,
                "credit": w.credit,
                "held": w.load,
                "done": w.done,
                "busy_seconds": round(w.busy_seconds, 6),
                "suspects": w.suspects,
                "busy": w.load > 0,
                "leaving": w.leaving,
                "up_seconds": round(now - w.since, 3),
                "silent_seconds": round(now - w.last_seen, 3),
            }
            for w in workers
        ),
    )


def _rows(title: str, count: int, rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    shown = list(islice(rows, MAX_ROWS))
    return {title: shown, "more": count - len(shown)}


def _stats(broker: Broker, _: bytes, __: Sees, now: float) -> dict[str, Any]:
    directory, registry = broker.directory, broker.registry
    return {
        "up_seconds": round(now - broker.started, 3),
        "services": len(directory.services),
        "workers": len(directory.workers),
        "queued": registry.queued,
        "running": registry.running,
        "request_bytes": registry.request_bytes,
        **broker.stats.as_dict(),
    }


def _metrics(broker: Broker, after: bytes, sees: Sees, now: float) -> dict[str, Any]:
    directory = broker.directory
    page = directory.metrics.page(after, METRICS_ROWS)
    return {
        "up_seconds": round(now - broker.started, 3),
        "bounds": directory.metrics.bounds,
        "services": [
            {"name": show(each.name), **_now(directory.services.get(each.name), now), **each.as_dict()}
            for each in page
            if sees(each.name)
        ],
        "next": page[-1].name.hex() if len(page) == METRICS_ROWS else None,
        "others": directory.metrics.others.as_dict(),
        "roles": [
            {
                "name": role.name,
                "accepted": role.accepted,
                "failed": role.failed,
                "outstanding": role.accepted - role.ended,
                "running": role.running,
                "request_bytes": role.request_bytes,
            }
            for role in broker.roles.all()
        ],
    }


def _now(service: Service | None, now: float) -> dict[str, Any]:
    """Return the current numbers of a service, which are all 0 if it does not exist any longer."""
    if service is None:
        return {
            "workers": 0, "idle": 0, "credit": 0, "running": 0, "queued": 0, "limits": {}, "held_back": 0,
            "oldest_seconds": 0.0,
        }  # fmt: skip
    schedule = service.schedule
    return {
        "workers": service.available,
        "idle": schedule.free,
        "credit": schedule.capacity,
        "running": service.running,
        "queued": service.waiting,
        **_limited(service, now),
        "oldest_seconds": round(max(now - schedule.oldest(), 0.0), 3) if service.waiting else 0.0,
    }


def _broker(broker: Broker, _: bytes, __: Sees, now: float) -> dict[str, Any]:
    return {
        "name": "zmdp",
        "broker": broker.name,
        "version": __version__,
        "compiled": compiled_parts(),
        "up_seconds": round(now - broker.started, 3),
        "draining": broker.draining,
        "dialects": {"client": ["MDP/0.1", "MDP/0.2", "X1"], "worker": ["MDP/0.1", "MDP/0.2", "X1"]},
        "limits": asdict(broker.limits),
    }


def _brokers(broker: Broker, _: bytes, __: Sees, now: float) -> dict[str, Any]:
    reached = [
        {"name": show(name.removeprefix(BROKER)), "hops": best.hops, "over": best.broker}
        for name, service in broker.directory.reachable.items()
        if name.startswith(BROKER)
        for best in [min(service.remotes, key=lambda remote: remote.hops)]
    ]
    return {
        "name": broker.name,
        "links": broker.federation.describe(now),
        **_rows("brokers", len(reached), sorted(reached, key=lambda each: (each["hops"], each["name"]))),
    }


def _requests(broker: Broker, body: list[bytes], sees: Sees, now: float) -> dict[str, Any] | None:
    if len(body) > 1:
        skip = _number(body)
        if skip is None or skip > MAX_SKIPPED:
            return None
        rows, more = broker.watch.page(body[0], sees, skip, REQUEST_ROWS, now)
    else:
        rows, more = broker.watch.in_flight(body[0], sees, REQUEST_ROWS, now)
    return {"requests": rows, "more": more}


def _cancel(broker: Broker, wanted: bytes, _: Sees, now: float) -> dict[str, Any]:
    return {"cancelled": broker.orders.cancel(wanted.decode(errors="replace"), now)}


def _limit(broker: Broker, body: list[bytes], _: Sees, now: float) -> dict[str, Any] | None:
    name = body[0]
    if len(body) > 1:
        try:
            limits = ServiceLimits.read(json.loads(body[1]))
        except (ValueError, RecursionError, SettingError):
            return None
        valid = valid_service(name) and not name.startswith(MMI)
        if not (valid and broker.orders.limit_service(name, limits or None, now)):
            return None
    service = broker.directory.services.get(name)
    limits = broker.orders.limits_of(name) or (NO_LIMITS if service is None else service.schedule.limits)
    groups = None if service is None else service.schedule.groups
    return {
        "service": show(name),
        "limits": limits.as_dict(),
        "by_operator": broker.orders.limits_of(name) is not None,
        "groups": [
            {"group": each.name, "waiting": each.waiting, "running": each.running}
            for each in (groups.most_waiting(GROUP_ROWS) if groups is not None else ())
        ],
    }


def _tail(broker: Broker, asked: bytes, _: Sees, now: float) -> dict[str, Any] | None:
    return broker.watch.tail(asked, now)


def _failures(broker: Broker, wanted: bytes, _: Sees, now: float) -> dict[str, Any]:
    return broker.watch.failures(wanted, now)


_ANSWERS: Final[dict[bytes, Callable[[Broker, bytes, Sees, float], dict[str, Any] | None]]] = {
    b"mmi.services": _services,
    b"mmi.stats": _stats,
    b"mmi.broker": _broker,
    b"mmi.brokers": _brokers,
    b"mmi.metrics": _metrics,
    b"mmi.cancel": _cancel,
    b"mmi.tail": _tail,
    b"mmi.failures": _failures,
}
_PAGED: Final[dict[bytes, Callable[[Broker, list[bytes], Sees, float], dict[str, Any] | None]]] = {
    b"mmi.workers": _workers,
    b"mmi.requests": _requests,
    b"mmi.limit": _limit,
}
"""Questions with a second frame, which may say where a page begins."""
