"""The control service through which a gateway reports its status: `gateway.control.NAME`.

Its only operation is `status` (docs/how-to/gateways.md).
"""

import os
import socket
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from heapq import nlargest
from typing import Any, Final, Protocol, TypeVar

import click

from ... import __version__
from ...mdp.control import GATEWAY, name_or_default
from ...workers.control import control_handler
from ...workers.handling import Last
from ...workers.request import Request
from .upstream import Upstream

MAX_LISTED: Final = 500
"""Connections in a status: those with the most outstanding requests."""
Status = Callable[[], Mapping[str, Any]]
"""Returns what is particular to a gateway's kind; see `connections`."""

name_option = click.option(
    "--name",
    metavar="NAME",
    help="Its name on the broker's dashboard: it offers gateway.control.NAME. With --key only if this is given.  "
    "[default: KIND-HOST-PORT, or for Flux KIND-HOST-PID]",
)


class Connected(Protocol):
    """A connection of a gateway."""

    @property
    def outstanding(self) -> int:
        """Number of its requests that have not been answered."""


Open = TypeVar("Open", bound=Connected)


def connections(all_open: Collection[Open], describe: Callable[[Open], dict[str, Any]]) -> dict[str, Any]:
    """Return the part of a status that is about connections.

    `describe` returns the row of one: `peer`, `kind`, `user`, `outstanding`, `unread_bytes`, `up_seconds`.
    """
    listed = nlargest(MAX_LISTED, all_open, key=lambda each: each.outstanding)
    return {
        "connections": len(all_open),
        "listed": [describe(each) for each in listed],
        "more": len(all_open) - len(listed),
    }


def name_of(name: str | None, kind: str, number: int, *, with_key: bool) -> str | None:
    """Return the name under which a gateway reports its status; None if it does not.  Raises `SettingError`.

    A gateway with a key does so only if it was given a name: its role may not be allowed to offer the service.
    """
    return None if name is None and with_key else name_or_default(name, kind, number)


def offer(upstream: Upstream, kind: str, name: str, listen: str, status: Status) -> None:
    """Offer the control service until the gateway's side that faces the broker is closed."""
    started = time.monotonic()
    told = {"kind": kind, "name": name, "version": __version__, "host": socket.gethostname(), "pid": os.getpid()}

    def answer(arguments: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
        del arguments, request
        return {**told, "listen": listen, "up_seconds": round(time.monotonic() - started, 3), **status()}

    # Only an admin may see who is connected.
    handle = control_handler(name, {"status": answer}, admin_only={"status"})

    async def handle_async(request: Request) -> AsyncGenerator[Any, None]:
        yield Last([handle(request)])

    upstream.offer(GATEWAY + name, handle_async, concurrency=2)
