"""What an HTTP gateway reports through its control service (docs/how-to/gateways.md)."""

import asyncio
from typing import Any

from ....mdp.http.connection import Connection
from ....mdp.http.server import Server
from ..control import connections
from .gateway import Gateway


def status(gateway: Gateway, server: Server) -> dict[str, Any]:
    """Return what is particular to HTTP."""
    return {
        **connections(list(server.connections), _described),
        "outstanding": gateway.outstanding,
        "requests": gateway.accepted,
        "memory": gateway.memory,
    }


def _described(connection: Connection) -> dict[str, Any]:
    host, port, *_ = connection.transport.get_extra_info("peername") or ("a peer", 0)
    return {
        "peer": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "kind": "http",
        "user": "",
        "outstanding": connection.outstanding,
        "unread_bytes": connection.unread,
        "up_seconds": round(asyncio.get_running_loop().time() - connection.opened, 3),
    }
