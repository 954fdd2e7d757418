"""The command `mdp-gateway mcp`."""

import asyncio
import logging
from typing import Final

import click

from ...mdp.cli.console import CONTEXT_SETTINGS, SectionedCommand, log_level_option, log_to_stderr
from ...mdp.program.extras import needs_extra
from ...mdp.security.keys import ClientKeys
from ..serving import SECTIONS, Serving, bind_option, serving_options
from ..upstream import Upstream, raise_descriptor_limit

TIMEOUT_SECONDS: Final = 50.0
"""Less than the minute that clients wait for an answer, so that the gateway says what is wrong before they give up."""
BIND_HELP: Final = (
    "Listen here for MCP's streamable HTTP, at the path /mcp, rather than serve the program that has started this one; "
    "port 0 for a free one."
)


@click.command(cls=SectionedCommand, sections=SECTIONS, context_settings=CONTEXT_SETTINGS)
@click.option(
    "--expose",
    multiple=True,
    metavar="PATTERN",
    help="Services that are tools though their workers do not say so (tool=True), such as 'images.*'. Can be repeated.",
)
@serving_options(bind=bind_option(None, BIND_HELP), timeout=TIMEOUT_SECONDS)
@log_level_option
def cli(
    *, expose: tuple[str, ...], broker: tuple[str, ...], keys: ClientKeys | None, serving: Serving, log_level: str
) -> int:
    """Let agents call services as tools (MCP, the Model Context Protocol).

    \b
    mdp-gateway mcp                        over stdio: {"command": "mdp-gateway",
                                           "args": ["mcp"]} in a client's settings
    mdp-gateway mcp --bind 127.0.0.1:8090  over HTTP: http://127.0.0.1:8090/mcp

    Tools are the services that are declared with tool=True, and those that --expose names.  A tool that is declared
    with Tool(durable=True) returns a task, which Titanic keeps: it outlives the agent and this gateway.

    Over stdio, the program that starts this one may call every tool.  Over HTTP, the URL is printed to stdout, and
    tokens and roles are those of `mdp-gateway http`: each role calls what its access file allows, and is a group of its
    own for the services' limits.  Logs go to stderr.

    SIGTERM or Ctrl-C finishes the calls in progress, and exits at the latest after --drain-timeout.  Over stdio, they
    and the end of the input cancel them.

    \b
    Exit codes:
      0  stopped, all calls were finished
      1  cannot listen; or stopped before that, by --drain-timeout or a signal
      2  invalid usage, or a package is missing
    """
    with needs_extra("mcp"):
        from ...mdp.http.server import run  # noqa: PLC0415 - the help does not need what these import
        from .. import program  # noqa: PLC0415
        from ..gateway import Gateway  # noqa: PLC0415
        from . import stdio  # noqa: PLC0415
        from .catalogue import Catalogue  # noqa: PLC0415
        from .protocol import McpServer  # noqa: PLC0415
        from .streamable_http import McpHttpServer  # noqa: PLC0415
    serving.check()
    rules, settings, tls = serving.rules(), serving.settings(), serving.tls()
    log_to_stderr(log_level)
    logging.getLogger("mcp").setLevel(logging.WARNING)  # it logs the ids of sessions, which are secrets
    raise_descriptor_limit(settings.max_connections)
    listener = None if serving.bind is None else serving.listener()

    async def main() -> int:
        upstream = Upstream(broker, keys=keys, timeout=settings.timeout)
        gateway = Gateway(upstream, settings, rules, on_behalf=keys is not None)
        server = McpServer(gateway, Catalogue(gateway, expose))
        if listener is None:
            return await stdio.serve(gateway, server)
        return await program.serve(gateway, McpHttpServer(gateway, server, listener, tls), serving.warning())

    return asyncio.run(main()) if listener is None else run(main)
