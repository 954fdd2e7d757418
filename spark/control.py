"""The control service through which a driver (batch or fleet) reports its status and receives the command to drain.

The driver NAME offers the service `spark.control.NAME`.  A request is one frame with a JSON object whose `op` names the
operation; the reply is one frame of JSON.  All drivers have `status` and `drain`; batches have `cancel` and `reload`,
fleets `retire`.
"""

import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Self

from ..clients import Client, RequestTimeout, ServiceNotFound
from ..mdp.codes import Code
from ..mdp.errors import ServiceError, SettingError, ZmdpError
from ..mdp.keys import ClientKeys
from ..workers import Request, Worker

PREFIX: Final = "spark.control."
UNKNOWN_OPERATION: Final = 422
"""Error code for a request that names no operation of this driver."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
_ADMIN_ONLY: Final = {"drain", "reload"}
Operation = Callable[[Mapping[str, Any], Request], Mapping[str, Any]]
"""Takes the JSON object in a request, and the request; returns the reply's object.  May raise `ServiceError`."""

log = logging.getLogger("zmdp.spark")


def default_driver_name(kind: str) -> str:
    """Return the default name of a driver: KIND-HOST-PID."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
    return f"{kind}-{host}-{os.getpid()}"


def validate_driver_name(name: str) -> str:
    """Return `name` if it is a valid driver name.  Raises `SettingError`."""
    if not _NAME.fullmatch(name):
        raise SettingError(f"{name!r} is not a valid driver name: use up to 100 letters, digits, '.', '_' and '-'")
    return name


class Control:
    """The control service of the driver `name`, which offers `operations` while the `with` block lasts."""

    def __init__(
        self,
        name: str,
        operations: Mapping[str, Operation],
        *,
        broker: str | Sequence[str],
        keys: ClientKeys | None = None,
        concurrency: int = 2,
    ) -> None:
        self.name = validate_driver_name(name)
        self._operations = dict(operations)
        self._worker = Worker(PREFIX + name, self._answer, broker=broker, key=keys, concurrency=concurrency)

    def _answer(self, request: Request) -> bytes:
        try:
            command = json.loads(request[0])
            operation = self._operations[command["op"]]
        except (ValueError, TypeError, LookupError):
            known = ", ".join(self._operations)
            text = f'expected one frame of JSON, {{"op": …}}, where op is one of: {known}'
            raise ServiceError(UNKNOWN_OPERATION, text) from None
        if (op := command["op"]) in _ADMIN_ONLY and request.user and not request.admin:
            raise ServiceError(Code.NOT_ALLOWED, f"role {request.user} may not {op} {self.name}: only an admin may")
        return json.dumps(operation(command, request)).encode()

    def __enter__(self) -> Self:
        self._warn_if_name_taken()
        self._worker.start()
        return self

    def _warn_if_name_taken(self) -> None:
        keys = self._worker.keys
        with suppress(ZmdpError), Client(self._worker.broker, timeout=1.0, retries=0, key=keys) as client:
            if client.available(self._worker.service):
                log.warning(
                    "another driver named %s exists, or has just died; status and drain reach only one of them, so "
                    "choose another --name",
                    self.name,
                )

    def __exit__(self, *exception: object) -> None:
        self._worker.stop()
        self._worker.wait()


def drivers(client: Client) -> list[str]:
    """Return the names of the drivers at the broker, sorted."""
    answer = json.loads(client.request("mmi.services")[0])
    names = (str(row["name"]) for row in answer["services"] if row["workers"] or row.get("hops"))
    found = (name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))
    return sorted(filter(_NAME.fullmatch, found))  # NAME/… is where the slots of the fleet NAME report


def ask(client: Client, driver: str, op: str, **arguments: Any) -> dict[str, Any]:
    """Ask `driver` to perform `op` and return its answer.

    Raises `ServiceNotFound` if there is no such driver, otherwise as `Client.request`.
    """
    try:
        reply = client.request(PREFIX + driver, json.dumps({"op": op, **arguments}).encode(), wait=False)
    except ServiceNotFound as error:
        there = ", ".join(drivers(client)) or "none"
        text = f"no Spark driver named {driver!r} at the broker; available drivers: {there}"
        raise ServiceNotFound(text, service=PREFIX + driver, code=error.code) from None
    found: dict[str, Any] = json.loads(reply[0])
    return found


def ask_all(client: Client, op: str, **arguments: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ask each driver that has the operation, and yield its name and its answer.  Raises as `Client.request`."""
    for driver in drivers(client):
        try:
            yield driver, ask(client, driver, op, **arguments)
        except (RequestTimeout, ServiceNotFound):  # the driver is ending
            continue
        except ServiceError as error:
            if error.code != UNKNOWN_OPERATION:
                raise
