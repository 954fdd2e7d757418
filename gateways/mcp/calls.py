"""Calls of tools: PARTIALs are progress, a call that is cancelled cancels its request, and errors are results."""

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import mcp_types as types
from mcp.server import ServerRequestContext

from ...clients.calls.reply import Reply
from ...mdp.errors import BrokerUnreachable, RequestTimeout, ServiceError, ZmdpError
from ...mdp.http.problems import Problem
from ..access import Caller
from ..gateway import Gateway
from .tools import ServiceTool, failure

Context = ServerRequestContext[Any, Any]


class Progress:
    """Reports the PARTIALs of a call as progress, if the client has asked for it."""

    def __init__(self, context: Context) -> None:
        self._session = context.session
        self._last = 0.0

    async def report(self, value: Any) -> None:
        """Report a value: an increasing number is the progress, a text is a message for people."""
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        self._last = float(value) if number and value > self._last else self._last + 1
        await self._session.report_progress(self._last, message=value if isinstance(value, str) else None)


async def call(
    gateway: Gateway, caller: Caller, tool: ServiceTool, arguments: Mapping[str, Any], context: Context
) -> types.CallToolResult:
    """Call a service and return its result.  Raises `Problem` or `ZmdpError`."""
    body = tool.body(arguments)
    seconds = gateway.settings.timeout
    with gateway.admit(sum(map(len, body))):
        parts = gateway.upstream.client.stream(
            tool.service, *body, deadline=seconds, group=caller.role or "", options=gateway.options(caller)
        )
        async with aclosing(parts):
            return await collected(gateway, tool, parts, context)


async def collected(
    gateway: Gateway, tool: ServiceTool, parts: AsyncIterator[Reply], context: Context
) -> types.CallToolResult:
    """Return the result in the parts of a reply, and report each PARTIAL as progress."""
    progress, values, size = Progress(context), [], 0
    last: Any = None
    try:
        async for part in parts:
            length = sum(map(len, part))
            gateway.charge(length)
            size += length
            value = tool.value(part)
            if part.final:
                last = value
            else:
                values.append(value)
                await progress.report(value)
        return tool.result(tool.joined(values, last))
    finally:
        gateway.memory -= size


def explained(error: ZmdpError | Problem, tool: ServiceTool, seconds: float) -> types.CallToolResult:
    """Return the result that tells an agent about an error of a call."""
    if isinstance(error, ServiceError):
        return failure(error.text)
    if isinstance(error, RequestTimeout) and not isinstance(error, BrokerUnreachable):
        text = f"{tool.service} has not answered within {seconds:g} s"
        return failure(f"{text} (--timeout); its workers can make it durable, so that its calls may take longer")
    return failure(error.detail if isinstance(error, Problem) else str(error))
