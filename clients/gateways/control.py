"""The control service through which a gateway reports its status: `gateway.control.NAME`.

A request is one frame with the JSON object `{"op": "status"}`; the reply is one frame of JSON (docs/gateways.md).
"""

import json
import os
import re
import socket
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from heapq import nlargest
from typing import Any, Final, Protocol, TypeVar

import click

from ... import __version__
from ...mdp.codes import Code
from ...mdp.errors import ServiceError, SettingError
from ...workers.handling import Final as Last
from ...workers.request import Request
from .upstream import Upstream

PREFIX: Final = "gateway.control."
UNKNOWN_OPERATION: Final = 422
MAX_LISTED: Final = 500
"""Connections in a status: those with the most outstanding requests."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
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
    if name is None:
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
        return None if with_key else f"{kind}-{host}-{number}"
    if not _NAME.fullmatch(name):
        raise SettingError(f"{name!r} is not a valid name: use up to 100 letters, digits, '.', '_' and '-'")
    return name


def offer(upstream: Upstream, kind: str, name: str, listen: str, status: Status) -> None:
    """Offer the control service until the gateway's side that faces the broker is closed."""
    started = time.monotonic()
    told = {"kind": kind, "name": name, "version": __version__, "host": socket.gethostname(), "pid": os.getpid()}

    async def answer(request: Request) -> AsyncGenerator[Any, None]:
        try:
            operation = json.loads(request[0])["op"]
        except (ValueError, TypeError, LookupError, RecursionError):
            operation = None
        if operation != "status":
            raise ServiceError(UNKNOWN_OPERATION, 'expected one frame of JSON, {"op": "status"}')
        if request.user and not request.admin:
            raise ServiceError(Code.NOT_ALLOWED, f"role {request.user} may not see who is connected: only an admin may")
        up = round(time.monotonic() - started, 3)
        yield Last([json.dumps({**told, "listen": listen, "up_seconds": up, **status()}).encode()])

    upstream.offer(PREFIX + name, answer, concurrency=2)
