"""Runs a gateway that listens, and reads its access file again on SIGHUP."""

import asyncio
import gc
import logging
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import click

from ..mdp.cli import notify
from ..mdp.cli.shutdown import Shutdown, in_loop
from ..mdp.errors import SettingError
from ..mdp.http.server import Server
from ..mdp.program.logs import counted
from ..mdp.security.access import SETTLE_SECONDS, FileState, state_of
from .access import load
from .gateway import Gateway
from .upstream import NOTHING_IN_PROGRESS

log = logging.getLogger("zmdp.gateway")


def reload(gateway: Gateway) -> None:
    """Read the access file again, once nobody writes it.  If it is invalid, what it said before still applies."""
    access = gateway.access
    if access is None:
        log.info("nothing to reload: the gateway was started without --access")
    else:
        asyncio.get_running_loop().call_later(SETTLE_SECONDS, _read_again, gateway, access.path, state_of(access.path))


def _read_again(gateway: Gateway, path: Path, seen: FileState) -> None:
    error: SettingError | None = None
    try:
        with notify.reloading():
            access = load(path)
    except SettingError as raised:
        error = raised
    if state_of(path) != seen:
        reload(gateway)
    elif error is not None:
        log.error("what the access file said before still applies: %s", error)
    else:
        gateway.access = access
        log.info("read the access file again: %s", counted(len(access.roles), "role"))


async def serve(gateway: Gateway, server: Server, warning: str = "") -> int:
    """Print the server's URL, and serve until SIGTERM or SIGINT.  Return the exit code.

    `warning`, if it is not empty, is logged.
    """

    def unfinished() -> str:
        left = server.outstanding
        return counted(left, "request") if left else NOTHING_IN_PROGRESS

    stop = in_loop(server.stop)
    with Shutdown(
        stop, stop, limit=gateway.settings.drain_timeout, unfinished=unfinished,
        reload=in_loop(partial(reload, gateway)), logger=log,
    ):  # fmt: skip
        click.echo(server.url)
        sys.stdout.flush()
        log.info("ready at %s for the broker at %s; Ctrl-C stops it", server.url, gateway.upstream.endpoints)
        if warning:
            log.warning("%s", warning)
        gc.freeze()  # objects that exist now are never collected
        notify.ready(notify.event_loop())
        try:
            await server.run()
        finally:
            with suppress(asyncio.CancelledError):
                await gateway.upstream.close()
    return int(server.cut_off)
