"""The services that exist now."""

import json
from typing import Any, Final

from ..mdp.http.problems import Problem
from .access import Caller
from .gateway import Gateway

LIST_SECONDS: Final = 3.0
"""How long the broker may take to answer: it does not wait for workers."""


async def list_services(gateway: Gateway, caller: Caller) -> dict[str, Any]:
    """Return the services that the caller may know of and call, as `mmi.services` describes them.

    Raises `Problem` if the caller may not know of any.
    """
    gateway.check_call(caller, b"mmi.services")
    with gateway.admit():
        reply = await gateway.upstream.client.request(
            "mmi.services", b"", timeout=LIST_SECONDS, options=gateway.options(caller)
        )
    found = json.loads(reply[0])
    if not isinstance(found, dict):
        raise Problem("not-allowed", "the broker's access file does not let this role know of services (mmi)")
    found["services"] = [row for row in found["services"] if caller.may_call(row["name"].encode())]
    return found
