"""What a Flux gateway reports through its control service (docs/how-to/gateways.md)."""

import asyncio
from typing import Any

from ..control import connections
from .server import FluxConnection, FluxGateway


def status(gateway: FluxGateway) -> dict[str, Any]:
    """Return what is particular to Flux."""
    return {
        **connections(gateway.connections, _described),
        "outstanding": sum(each.outstanding for each in gateway.connections),
        "requests": gateway.upstream.requests,
        "memory": gateway.memory,
        "rank": gateway.instance.rank,
    }


def _described(connection: FluxConnection) -> dict[str, Any]:
    return {
        "peer": "",  # a UNIX socket
        "kind": "flux",
        "user": connection.user,
        "outstanding": connection.outstanding,
        "unread_bytes": connection.unread_bytes(),
        "up_seconds": round(asyncio.get_running_loop().time() - connection.opened, 3),
    }
