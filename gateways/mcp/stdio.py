"""MCP over stdin and stdout, for the program that has started this one."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import cast

import anyio
from mcp.server.stdio import stdio_server

from ...mdp.cli.shutdown import Shutdown, in_loop
from ..gateway import Gateway
from ..upstream import NOTHING_IN_PROGRESS
from .protocol import McpServer

log = logging.getLogger("zmdp.gateway")


async def serve(gateway: Gateway, server: McpServer) -> int:
    """Serve until stdin ends, SIGTERM or SIGINT; calls in progress are cancelled.  Return the exit code."""
    lines = await _lines(gateway.settings.max_body)
    serving = asyncio.ensure_future(_serve(server, lines))
    watching = asyncio.ensure_future(server.watch())
    stop = in_loop(serving.cancel)
    with Shutdown(stop, stop, limit=gateway.settings.drain_timeout, unfinished=lambda: NOTHING_IN_PROGRESS, logger=log):
        log.info("ready on stdin and stdout, for the program that has started this one; with --bind, it listens")
        try:
            await asyncio.wait({serving})
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await gateway.upstream.close()
    if not serving.cancelled():
        serving.result()
    return 0


async def _serve(server: McpServer, lines: AsyncIterator[bytes] | None) -> None:
    async with stdio_server(cast("anyio.AsyncFile[str] | None", lines)) as (received, sent):
        await server.run(received, sent, server.create_initialization_options())


async def _lines(limit: int) -> AsyncIterator[bytes] | None:
    """Return the lines of stdin, read without a thread, which SIGTERM could not end; None if stdin is a file."""
    reader = asyncio.StreamReader(limit)
    loop = asyncio.get_running_loop()
    try:
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    except (OSError, ValueError):
        return None
    return _read(reader, limit)


async def _read(reader: asyncio.StreamReader, limit: int) -> AsyncIterator[bytes]:
    try:
        async for line in reader:
            yield line
    except ValueError:
        log.error("stopped: a message has more than %d bytes (--max-body)", limit)
