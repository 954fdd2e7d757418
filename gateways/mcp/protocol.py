"""The MCP server: its tools, and the tasks of durable ones."""

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, cast

import mcp_types as types
from mcp.server import NotificationOptions, Server
from mcp.server.session import ServerSession
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, ToolsListChanged
from mcp.shared.exceptions import MCPError

from ...mdp.errors import ZmdpError
from ...mdp.http.problems import Problem
from ...version import __version__
from ..access import Caller
from ..gateway import Gateway
from .calls import Context, call, explained
from .catalogue import Catalogue
from .tasks import EXTENSION, TOOLS, TaskParams, Tasks, knows_tasks, state
from .tools import TASK_CANCEL, TASK_RESULT, failure, text_result

MAX_SESSIONS: Final = 10_000
"""Sessions of clients that speak MCP before 2026-07-28."""

log = logging.getLogger("zmdp.gateway")


class McpServer(Server[Any]):
    """Answers the clients of MCP.

    Args:
        gateway: The gateway.
        catalogue: The services that are tools.
    """

    def __init__(self, gateway: Gateway, catalogue: Catalogue) -> None:
        self._gateway = gateway
        self._catalogue = catalogue
        self._tasks = Tasks(gateway)
        self._bus = InMemorySubscriptionBus()
        self.listeners = ListenHandler(self._bus)
        self._sessions: OrderedDict[str, ServerSession] = OrderedDict()
        """Of clients that speak MCP before 2026-07-28, which are told of changes without a subscription."""
        super().__init__(
            "zmdp", version=__version__, title="zmdp", on_list_tools=self._list, on_call_tool=self._call_tool,
            on_subscriptions_listen=self.listeners,
        )  # fmt: skip
        self.extensions[EXTENSION] = {}
        self.add_request_handler("tasks/get", TaskParams, self._get_task)
        self.add_request_handler("tasks/update", TaskParams, self._update_task)
        self.add_request_handler("tasks/cancel", TaskParams, self._cancel_task)
        self.add_notification_handler("notifications/initialized", types.NotificationParams, self._initialized)

    def create_initialization_options(
        self, notification_options: NotificationOptions | None = None, *arguments: Any, **named: Any
    ) -> Any:
        """Return the first answer to clients before 2026-07-28."""
        options = notification_options or NotificationOptions(tools_changed=True)
        return super().create_initialization_options(options, *arguments, **named)

    async def watch(self) -> None:
        """Tell clients whenever the tools have changed, until cancelled."""
        await self._catalogue.watch(self._changed)

    async def _changed(self) -> None:
        await self._bus.publish(ToolsListChanged())
        for name, session in list(self._sessions.items()):
            try:
                await session.send_tool_list_changed()
            except Exception as error:  # noqa: BLE001 - whatever a connection that has ended raises
                log.debug("a client is not told of changes any more: %s", error)
                self._sessions.pop(name, None)

    async def _initialized(self, context: Context, params: types.NotificationParams) -> None:
        del params
        self._sessions[context.request.headers.get("mcp-session-id", "") if context.request else ""] = context.session
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    # ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _list(self, context: Context, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        del params
        try:
            tools = await self._catalogue.tools(_caller(context))
        except (ZmdpError, Problem) as error:
            raise _error(error) from None
        plain = not knows_tasks(context)
        shown = [each.described(as_task=plain and each.durable) for each in tools]
        if plain and any(each.durable for each in tools):
            shown.extend(TOOLS)
        return types.ListToolsResult(tools=shown)

    async def _call_tool(self, context: Context, params: types.CallToolRequestParams) -> Any:
        caller, arguments = _caller(context), params.arguments or {}
        if params.name in (TASK_RESULT, TASK_CANCEL):
            return await self._task_tool(context, caller, params.name, arguments)
        tool = await self._catalogue.tool(params.name, caller)
        if tool is None:
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name[:200]!r}")
        try:
            if not tool.durable:
                return await call(self._gateway, caller, tool, arguments, context)
            task_id = await self._tasks.create(caller, tool, arguments)
        except (ZmdpError, Problem) as error:
            return explained(error, tool, self._gateway.settings.timeout)
        if knows_tasks(context):
            return {"resultType": "task", **state(task_id, "working")}
        return text_result(f"task {task_id} runs: get its result with {TASK_RESULT}", {"task_id": task_id})

    async def _task_tool(
        self, context: Context, caller: Caller, name: str, arguments: Mapping[str, Any]
    ) -> types.CallToolResult:
        task_id, wait = arguments.get("task_id"), arguments.get("wait", 0)
        if not isinstance(task_id, str) or isinstance(wait, bool) or not isinstance(wait, int | float) or not wait >= 0:
            return failure(f"{name} needs task_id, a text; wait is a number of seconds")
        try:
            if name == TASK_CANCEL:
                await self._tasks.cancel(caller, task_id)
                return text_result(f"task {task_id} is cancelled")
            seconds = min(wait, self._gateway.settings.timeout)
            result = await self._tasks.result(caller, task_id, seconds, context)
        except MCPError as error:
            return failure(error.error.message)
        except (ZmdpError, Problem) as error:
            return failure(str(error))
        return text_result(f"task {task_id} has no result yet: ask again") if result is None else result

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _get_task(self, context: Context, params: TaskParams) -> dict[str, Any]:
        try:
            return await self._tasks.get(_caller(context), params.task_id, context)
        except (ZmdpError, Problem) as error:
            raise _error(error) from None

    async def _update_task(self, context: Context, params: TaskParams) -> dict[str, Any]:
        """Acknowledge: no task waits for input."""
        del context, params
        return {}

    async def _cancel_task(self, context: Context, params: TaskParams) -> dict[str, Any]:
        try:
            await self._tasks.cancel(_caller(context), params.task_id)
        except (ZmdpError, Problem) as error:
            raise _error(error) from None
        return {}


def _caller(context: Context) -> Caller:
    return Caller.anybody if context.request is None else cast(Caller, context.request.state.caller)


def _error(error: ZmdpError | Problem) -> MCPError:
    return MCPError(types.INTERNAL_ERROR, error.detail if isinstance(error, Problem) else str(error))
