"""The command `mdp-gateway flux`."""

import asyncio
import logging
import os
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Final

import click

from ...gateways.upstream import NOTHING_IN_PROGRESS
from ...mdp.cli import notify
from ...mdp.cli.console import (
    CONTEXT_SETTINGS,
    EXIT_FAILED,
    Number,
    brokers_option,
    key_options,
    limit_option,
    log_level_option,
    log_to_stderr,
    options,
    version_option,
)
from ...mdp.cli.shutdown import Shutdown, drain_timeout_option, in_loop
from ...mdp.errors import SettingError
from ...mdp.program.logs import counted
from ...mdp.security.keys import ClientKeys
from .gateway import FluxGateway, FluxSettings

DEFAULT_DRAIN_SECONDS: Final = 10.0
MAX_PATH: Final = 107
"""Bytes of a UNIX socket's path."""

log = logging.getLogger("zmdp.gateway")


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "--socket", "path", metavar="PATH", required=True, help="Where to listen; Flux finds it through FLUX_URI."
)
@brokers_option("Broker to use. Can be repeated, or separate endpoints with commas.")
@key_options
@click.option(
    "--size",
    type=Number("brokers", whole=True),
    default=1,
    help="Wait until the tree has so many brokers before giving them ranks.",
)
@click.option("--allow-guests", is_flag=True, help="Admit users other than the gateway's own, as guests.")
@options(*(limit_option(each) for each in fields(FluxSettings) if each.metadata))
@drain_timeout_option(
    DEFAULT_DRAIN_SECONDS,
    "How long the requests of programs, and to them, may take to finish after SIGTERM or Ctrl-C.",
)
@log_level_option
@version_option()
def cli(
    *,
    path: str,
    broker: tuple[str, ...],
    keys: ClientKeys | None,
    size: int,
    allow_guests: bool,
    drain_timeout: float,
    log_level: str,
    **limits: int,
) -> int:
    """Let Flux programs call services and offer them, through a UNIX socket.

    Prints the URI for their FLUX_URI when it is ready.

    SIGTERM or Ctrl-C finishes the requests in progress, ends the connections, and exits, at the latest after
    --drain-timeout; a second signal exits immediately.

    \b
    mdp-gateway flux --socket /tmp/flux &
    FLUX_URI=local:///tmp/flux flux ping echo

    \b
    Exit codes:
      0  stopped, all requests were finished
      1  cannot listen; or stopped before that, by --drain-timeout or a second signal
      2  invalid usage
    """
    log_to_stderr(log_level)
    absolute = str(Path(path).absolute())
    if len(absolute.encode()) > MAX_PATH:
        raise SettingError(f"--socket {absolute} is too long: a socket's path has at most {MAX_PATH} bytes")
    settings = FluxSettings(absolute, size, allow_guests, **limits)
    return asyncio.run(_serve(FluxGateway(broker, settings, keys=keys), drain_timeout))


async def _serve(gateway: FluxGateway, drain_timeout: float) -> int:
    ready, stopping = asyncio.Event(), asyncio.Event()
    serving = asyncio.ensure_future(_serve_until(stopping, ready, gateway, drain_timeout))

    def stop() -> None:
        stopping.set()
        if not ready.is_set():
            serving.cancel()  # it waits for its broker

    def end() -> None:
        gateway.remove_socket()
        os._exit(EXIT_FAILED)  # whatever it waits for, such as a broker that does not answer

    def unfinished() -> str:
        left = gateway.in_progress
        return f"{counted(left, 'request')} of programs or to them" if left else NOTHING_IN_PROGRESS

    with (
        Shutdown(in_loop(stop), in_loop(end), limit=drain_timeout, unfinished=unfinished, logger=log),
        suppress(asyncio.CancelledError),
    ):
        return await serving
    return 0


async def _serve_until(
    stopping: asyncio.Event, ready: asyncio.Event, gateway: FluxGateway, drain_timeout: float
) -> int:
    """Serve until `stopping` is set.  Return the exit code."""
    async with gateway:
        click.echo(gateway.uri)
        sys.stdout.flush()
        log.info("ready as rank %d; Ctrl-C stops it", gateway.instance.rank)
        ready.set()
        notify.ready(notify.event_loop())
        await stopping.wait()
        left = await gateway.drain(drain_timeout)
        if left:
            log.error("gave up %s, which had %g s to finish", counted(left, "request"), drain_timeout)
    return EXIT_FAILED if left else 0
