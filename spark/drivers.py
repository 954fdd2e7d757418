"""The control service of a driver: a batch or fleet NAME offers `spark.control.NAME`
(`mdp/program/control_services.py`).

All drivers have the operations `status` and `drain`; batches also have `catalogue`, `cancel`, `reload` and `history`.
"""

import json
import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from ..clients import Client, control
from ..mdp.codes import Code
from ..mdp.errors import ServiceError, ZmdpError
from ..mdp.program.control_services import SPARK, UNKNOWN_OPERATION, validate_name
from ..mdp.security.keys import ClientKeys
from ..workers import Request, Worker

log = logging.getLogger("zmdp.spark")

Operation = Callable[[Mapping[str, Any], Request], Mapping[str, Any]]
"""Takes the JSON object in a request, and the request; returns the reply's object.  May raise `ServiceError`."""

names = partial(control.programs, prefix=SPARK)
ask = partial(control.ask, prefix=SPARK)
ask_all = partial(control.ask_all, prefix=SPARK)


@contextmanager
def control_service(
    name: str, operations: Mapping[str, Operation], *, broker: str | Sequence[str], keys: ClientKeys | None = None
) -> Generator[None]:
    """Offer the control service of the driver `name` while the `with` block lasts.

    Raises `SettingError` if the name is not valid.
    """
    service = SPARK + validate_name(name)
    with suppress(ZmdpError), Client(broker, timeout=1.0, retries=0, key=keys) as client:
        if client.available(service):
            log.warning(
                "another driver named %s exists, or has just died; status and drain reach only one of them, so "
                "choose another --name",
                name,
            )
    handler = control_handler(name, operations, admin_only={"drain", "reload"})
    with Worker(service, handler, broker=broker, key=keys, concurrency=2):
        yield


def control_handler(
    name: str, operations: Mapping[str, Operation], *, admin_only: Collection[str] = ()
) -> Callable[[Request], bytes]:
    """Return the handler of the control service of the program `name`, which has these operations.

    If the broker has access control, those named in `admin_only` are for admins.
    """

    def handle(request: Request) -> bytes:
        try:
            command = json.loads(request[0])
            op = command["op"]
            operation = operations[op]
        except (ValueError, TypeError, LookupError, RecursionError):
            text = f'expected one frame of JSON, {{"op": …}}, where op is one of: {", ".join(operations)}'
            raise ServiceError(UNKNOWN_OPERATION, text) from None
        if op in admin_only and request.user and not request.admin:
            raise ServiceError(
                Code.NOT_ALLOWED, f"role {request.user} may not ask {name} for {op!r}: only an admin may"
            )
        return json.dumps(operation(command, request)).encode()

    return handle
