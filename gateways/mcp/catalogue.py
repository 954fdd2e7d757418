"""The services that are tools, for each caller; and a watch for changes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

from ...mdp.errors import ZmdpError
from ...mdp.http.problems import Problem
from ...mdp.program.control_services import SPARK
from ...mdp.security.access import Permissions
from ..access import Caller
from ..gateway import Gateway
from .tools import MAX_NAME, ServiceTool, service_name

WATCH_SECONDS: Final = 2.0
_OWN: Final = ("mmi.", "titanic.", SPARK)
"""Prefixes of the services of zmdp's own programs, which a pattern such as `*` does not expose."""


class Catalogue:
    """The services that are tools.

    Args:
        gateway: Lists and describes the services.
        expose: Patterns of services that are tools without having been declared so.
    """

    def __init__(self, gateway: Gateway, expose: Sequence[str]) -> None:
        self._gateway = gateway
        self._exposed = Permissions("exposed", call=tuple(expose))

    async def tools(self, caller: Caller) -> list[ServiceTool]:
        """Return the tools that the caller may call, by name.  Raises `Problem` or `ZmdpError`."""
        rows = (await self._gateway.list_services(caller))["services"]
        offered = [row["name"] for row in rows if row["workers"] or row["remote_credit"]]
        found = await self._gateway.descriptions.of_all(offered, newest=True)
        tools = [ServiceTool(name, about) for name, about in sorted(found.items())]
        return [each for each in tools if self._is_tool(each)]

    async def tool(self, name: str, caller: Caller) -> ServiceTool | None:
        """Return the tool of this name, or None if there is none that the caller may call."""
        service = service_name(name)
        if service is None or not caller.may_call(service.encode()):
            return None
        tool = ServiceTool(service, await self._gateway.descriptions.newest(service))
        return tool if self._is_tool(tool) else None

    def _is_tool(self, tool: ServiceTool) -> bool:
        meant = tool.about.tool is not None or self._exposes(tool.service)
        return meant and len(tool.name) <= MAX_NAME

    def _exposes(self, service: str) -> bool:
        return self._exposed.may_call(service.encode()) and not service.startswith(_OWN)

    async def watch(self, changed: Callable[[], Awaitable[object]]) -> None:
        """Call `changed` whenever the tools have changed, until cancelled."""
        seen: object = None
        told: object = None
        while True:
            with suppress(ZmdpError, Problem):
                rows = (await self._gateway.list_services(Caller.anybody))["services"]
                now = [(row["name"], row["workers"]) for row in rows]
                if now != seen:
                    self._gateway.descriptions.forget()
                    tools = await self.tools(Caller.anybody)
                    shown = [each.described(as_task=False) for each in tools]
                    if told is not None and shown != told:
                        await changed()
                    seen, told = now, shown
            await asyncio.sleep(WATCH_SECONDS)
