"""MCP gateways without a transport, and services that are tools."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from mcp import Client

from zmdp import ServiceError, Services, Tool
from zmdp.gateways.gateway import Gateway, Settings
from zmdp.gateways.mcp.catalogue import Catalogue
from zmdp.gateways.mcp.protocol import McpServer
from zmdp.gateways.upstream import Upstream


@dataclass
class Job:
    width: int
    name: str = "x"


def tools() -> tuple[Services, dict[str, Any]]:
    """Return services that are tools, and what their handlers have seen."""
    services, seen = Services(), {"begun": asyncio.Event(), "cancelled": asyncio.Event()}

    @services.service("words.count", tool=True)
    def count(text: str) -> int:
        """Count the words of a text."""
        return len(text.split())

    @services.service("words.each", tool=Tool(title="Words", read_only=True, destructive=False))
    def each(text: str) -> Iterator[str]:
        yield from text.split()

    @services.service("images.resize", tool=True)
    def resize(job: Job) -> Job:
        if job.width == 13:
            raise ServiceError(418, "13 is unlucky")
        return job

    @services.service("nothing", tool=True)
    def nothing() -> None:
        pass

    @services.service("images.packed", tool=True, codec="msgpack")
    def packed(job: Job | None = None) -> list[Job]:
        return [job or Job(1)]

    @services.service("hold", tool=True)
    async def hold(text: str) -> str:
        seen["begun"].set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            seen["cancelled"].set()
            raise
        return text

    @services.service("report.build", tool=Tool(durable=True))
    def build(month: str) -> Job:
        if not month:
            raise ServiceError(418, "which month?")
        return Job(len(month), month)

    @services.service("report.pages", tool=Tool(durable=True))
    def pages(number: int) -> Iterator[int]:
        yield from range(number)

    @services.service("hidden")
    def hidden() -> int:
        return 1

    return services, seen


@asynccontextmanager
async def mcp_server(endpoint: str, *expose: str, **settings: Any) -> AsyncIterator[McpServer]:
    """Run the server of a gateway, which clients reach in memory; afterwards nothing may be outstanding."""
    upstream = Upstream(endpoint)
    gateway = Gateway(upstream, Settings(**settings))
    server = McpServer(gateway, Catalogue(gateway, expose))
    watching = asyncio.ensure_future(server.watch())
    try:
        yield server
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        await upstream.close()
    assert (gateway.outstanding, gateway.memory) == (0, 0)


def talk(
    endpoint: str, conversation: Callable[[Client], Awaitable[None]], *expose: str, mode: Any = "auto",
    extensions: Any = (), **settings: Any,
) -> None:  # fmt: skip
    """Have a conversation with a gateway in memory."""

    async def main() -> None:
        async with (
            mcp_server(endpoint, *expose, **settings) as server,
            Client(server, mode=mode, extensions=list(extensions)) as client,
        ):
            try:
                await conversation(client)
            except Exception as error:  # noqa: BLE001 - raised below, without the groups that the client puts around it
                failed.append(error)

    failed: list[Exception] = []
    asyncio.run(main())
    if failed:
        raise failed[0]
