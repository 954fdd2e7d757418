"""How the drivers here (batches, fleets) are asked what they do, and told to stop: a service for each driver.

The driver NAME offers `spark.control.NAME`.  A request is one frame of JSON, an object whose `op` says what is wanted;
the reply is one frame of JSON.  Every driver knows `status` and `drain`; batches know `cancel`, fleets `slot`.
"""

import json
import logging
import os
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Self

from ..clients import Client, ServiceNotFound
from ..mdp.errors import ServiceError, SettingError, ZmdpError
from ..workers import Request, Worker

PREFIX: Final = "spark.control."
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
Operation = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Gets the request's object, returns the reply's; a `ServiceError` that it raises is what the caller gets."""

log = logging.getLogger("zmdp.spark")


def default_name(kind: str) -> str:
    """A driver's name unless it is given one: what it is, where it runs, and its process."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
    return f"{kind}-{host}-{os.getpid()}"


def checked_name(name: str) -> str:
    """`name`, if a driver can have it.  Raises `SettingError`."""
    if not _NAME.fullmatch(name):
        raise SettingError(f"{name!r} cannot be a driver's name: it takes letters, digits, '.', '_' and '-'")
    return name


class Control:
    """Answers for the driver `name`, while the `with` block lasts: `operations` by their names."""

    def __init__(self, name: str, operations: Mapping[str, Operation], *, broker: str, concurrency: int = 2) -> None:
        self.name = checked_name(name)
        self._operations = dict(operations)
        self._worker = Worker(PREFIX + name, self._answer, broker=broker, concurrency=concurrency)

    def _answer(self, request: Request) -> bytes:
        try:
            asked = json.loads(request[0])
            operation = self._operations[asked["op"]]
        except (ValueError, TypeError, LookupError):
            known = ", ".join(self._operations)
            raise ServiceError(422, f'a driver takes one frame of JSON, {{"op": …}}, with one of: {known}') from None
        return json.dumps(operation(asked)).encode()

    def __enter__(self) -> Self:
        self._warn_of_twin()
        self._worker.start()
        return self

    def _warn_of_twin(self) -> None:
        with suppress(ZmdpError), Client(self._worker.broker, timeout=1.0, retries=0) as client:
            if client.available(self._worker.service):
                log.warning(
                    "another driver is called %s, or has just died: status and drain find one of them; see --name",
                    self.name,
                )

    def __exit__(self, *exception: object) -> None:
        self._worker.stop()
        self._worker.wait()


def drivers(client: Client) -> list[str]:
    """The names of the drivers at the broker, sorted."""
    answer = json.loads(client.request("mmi.services")[0])
    names = (str(row["name"]) for row in answer["services"] if row["workers"])
    return sorted(name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))


def ask(client: Client, driver: str, op: str, **arguments: Any) -> dict[str, Any]:
    """What `driver` answers.  Raises `ServiceNotFound` if it is not there, else as `Client.request`."""
    try:
        reply = client.request(PREFIX + driver, json.dumps({"op": op, **arguments}).encode(), wait=False)
    except ServiceNotFound as error:
        there = ", ".join(drivers(client)) or "none"
        told = f"there is no Spark driver {driver!r} at the broker; there are: {there}"
        raise ServiceNotFound(told, service=PREFIX + driver, code=error.code) from None
    found: dict[str, Any] = json.loads(reply[0])
    return found
