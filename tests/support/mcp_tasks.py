"""The client's half of MCP's extension for tasks, which the SDK does not have yet."""

import asyncio
from typing import Any, Literal

import mcp_types as types
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.client.session import ClientSession
from pydantic import ConfigDict
from support.processes import TIMEOUT_SECONDS

from zmdp.gateways.mcp.tasks import EXTENSION, TaskParams


class TaskRequest(types.Request[TaskParams, str]):
    """A request about a task."""

    name_param = "taskId"


class Created(types.Result):
    """What is answered instead of a result."""

    result_type: Literal["task"]
    task_id: str
    status: str


class Task(types.Result):
    """A task, or the acknowledgement of a request about it."""

    model_config = ConfigDict(extra="allow")


class Tasks(ClientExtension):
    """Waits for tasks, so that `call_tool` returns their results.

    `created` has the ids of all; with `wait` false, `call_tool` returns at once.
    """

    identifier = EXTENSION

    def __init__(self, *, wait: bool = True) -> None:
        self.created: list[str] = []
        self._wait = wait

    def claims(self) -> list[ResultClaim[Any]]:
        return [ResultClaim(result_type="task", model=Created, resolve=self._resolve)]

    async def _resolve(self, created: Created, context: ClaimContext) -> types.CallToolResult:
        assert created.status == "working"
        self.created.append(created.task_id)
        if not self._wait:
            return types.CallToolResult(content=[], is_error=True)  # so that nobody checks its value
        return types.CallToolResult.model_validate((await ended(context.session, created.task_id))["result"])


async def ask(session: ClientSession, method: str, task_id: str) -> dict[str, Any]:
    """Ask about a task."""
    request = TaskRequest(method=method, params=TaskParams(task_id=task_id))
    return (await session.send_request(request, Task)).model_dump(by_alias=True)


async def ended(session: ClientSession, task_id: str) -> dict[str, Any]:
    """Return a task that has ended."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while (task := await ask(session, "tasks/get", task_id))["status"] == "working":
            await asyncio.sleep(0.02)
    return task
