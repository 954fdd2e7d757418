"""Handle the requests to a control service (`mdp/program/control.py`)."""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..mdp.codes import Code
from ..mdp.errors import ServiceError
from ..mdp.program.control import UNKNOWN_OPERATION
from .session.request import Request

Operation = Callable[[Mapping[str, Any], Request], Mapping[str, Any]]
"""Takes the JSON object in a request, and the request; returns the reply's object.  May raise `ServiceError`."""


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
