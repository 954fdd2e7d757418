"""What an HTTP gateway reports through its control service (docs/gateways.md)."""

import asyncio
from typing import Any

from ....mdp.http.server import Server
from ..control import connections
from .gateway import Gateway
from .websocket import WebSocketConnection


def status(gateway: Gateway, server: Server) -> dict[str, Any]:
    """Return what is particular to HTTP."""
    return {
        **connections(server.connections, _described),
        "outstanding": gateway.outstanding,
        "requests": gateway.accepted,
        "memory": gateway.memory,
    }


def _described(connection: Any) -> dict[str, Any]:
    transport = connection.transport
    is_websocket = isinstance(connection, WebSocketConnection)
    host, port, *_ = transport.get_extra_info("peername") or ("a peer", 0)
    return {
        "peer": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "kind": "websocket" if is_websocket else "http",
        "user": connection.role if is_websocket else "",
        "outstanding": connection.outstanding,
        "unread_bytes": transport.get_write_buffer_size(),
        "up_seconds": round(asyncio.get_running_loop().time() - connection.opened, 3),
    }
