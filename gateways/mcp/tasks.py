"""Tasks: calls of durable tools, which Titanic keeps (MCP's extension `io.modelcontextprotocol/tasks`, SEP-2663).

tools/call      submits the request, and answers with a task; to a client without the extension, with the task's id
tasks/get       the task, with its result once it has one; or the tool `task_result`
tasks/cancel    cancels the request and deletes it; or the tool `task_cancel`

The SDK has no tasks yet, but lets servers add methods.  The gateway keeps nothing: a task's id is the tool's name, the
ticket's UUID, which begins with the time of its creation, and a mark of the role that created it.  Titanic keeps the
tasks of roles apart if the broker knows the roles.  Otherwise the mark makes ids of other roles invalid, and the UUID
is the secret.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final
from uuid import UUID

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from ...clients.calls.reply import Reply
from ...mdp.errors import InvalidUUID, ServiceError, UnknownTicket
from ...mdp.services import About
from ...titanic.api.client import AsyncTicket
from ..access import Caller
from ..gateway import Gateway
from ..http.jobs.titanic_client import TitanicClients
from .calls import Context, collected
from .tools import TASK_CANCEL, TASK_RESULT, ServiceTool, failure, service_name

EXTENSION: Final = "io.modelcontextprotocol/tasks"
POLL_MILLISECONDS: Final = 1000
MARK: Final = 8
"""Characters of the mark of a role."""
_ID: Final[Mapping[str, Any]] = {"type": "string", "description": "The id that the call of a durable tool returned."}
TOOLS: Final = (
    types.Tool(
        name=TASK_RESULT,
        title="Result of a task",
        description="Return the result of a task; if it has none yet, wait up to `wait` seconds, and say so.",
        input_schema={
            "type": "object",
            "properties": {"task_id": _ID, "wait": {"type": "number", "minimum": 0, "default": 0}},
            "required": ["task_id"],
        },
        annotations=types.ToolAnnotations(read_only_hint=True),
    ),
    types.Tool(
        name=TASK_CANCEL,
        title="Cancel a task",
        description="Cancel a task, or delete the result of one that has ended.",
        input_schema={"type": "object", "properties": {"task_id": _ID}, "required": ["task_id"]},
        annotations=types.ToolAnnotations(destructive_hint=True, idempotent_hint=True),
    ),
)
"""For clients that do not know tasks."""


class TaskParams(types.RequestParams):
    """The parameters of tasks/get, tasks/update and tasks/cancel."""

    task_id: str


def knows_tasks(context: Context) -> bool:
    """Return whether a client has declared the extension."""
    declared = context.session.client_capabilities
    extensions = (declared and declared.extensions) or {}
    return EXTENSION in extensions and context.protocol_version in MODERN_PROTOCOL_VERSIONS


class Tasks:
    """The tasks of all callers.

    Args:
        gateway: The gateway.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._titanics = TitanicClients(gateway)

    async def create(self, caller: Caller, tool: ServiceTool, arguments: Mapping[str, Any]) -> str:
        """Submit a request and return the id of its task, once it is stored.  Raises `Problem` or `ZmdpError`."""
        body = tool.body(arguments)
        with self._gateway.admit(sum(map(len, body))):
            ticket = await self._titanics.of(caller).submit(tool.service, *body, group=caller.role)
        uuid = UUID(ticket.uuid).hex
        return f"{tool.name}.{uuid}.{_mark(caller, uuid)}"

    async def get(self, caller: Caller, task_id: str, context: Context) -> dict[str, Any]:
        """Return a task, with its result if it has one.  Raises `MCPError`, `Problem` or `ZmdpError`."""
        result = await self.result(caller, task_id, 0.0, context)
        task = state(task_id, "working" if result is None else "completed")
        return (
            task
            if result is None
            else {**task, "result": result.model_dump(mode="json", by_alias=True, exclude_none=True)}
        )

    async def result(
        self, caller: Caller, task_id: str, seconds: float, context: Context
    ) -> types.CallToolResult | None:
        """Return the result of a task, or None if it has none in time.  Raises as `get`."""
        tool, ticket = await self._found(caller, task_id)
        try:
            with self._gateway.admit():
                if not await ticket.ready() and not seconds:
                    return None
                async with asyncio.timeout(seconds or None), aclosing(_parts(ticket)) as parts:
                    return await collected(self._gateway, tool, parts, context)
        except TimeoutError:
            return None
        except UnknownTicket:
            raise _unknown(task_id) from None
        except ServiceError as error:
            return failure(error.text)

    async def cancel(self, caller: Caller, task_id: str) -> None:
        """Cancel a task and delete it.  Raises as `get`."""
        _, ticket = await self._found(caller, task_id)
        with self._gateway.admit():
            await ticket.close()

    async def _found(self, caller: Caller, task_id: str) -> tuple[ServiceTool, AsyncTicket[Reply, Reply]]:
        name, _, rest = task_id.partition(".")
        uuid, _, mark = rest.partition(".")
        service = service_name(name)
        if service is None or mark != _mark(caller, uuid) or not caller.may_call(service.encode()):
            raise _unknown(task_id)
        try:
            ticket = self._titanics.of(caller).ticket(uuid)
        except InvalidUUID:
            raise _unknown(task_id) from None
        about = await self._gateway.descriptions.newest(service)
        return ServiceTool(service, about if about.codec else About(codec="json")), ticket  # its workers may be gone


def state(task_id: str, status: str) -> dict[str, Any]:
    """Return a task in this state, in the form of the extension."""
    now = datetime.now(UTC)
    created = UUID(task_id.split(".")[1]).int >> 80  # milliseconds, as in each UUID of version 7
    return {
        "taskId": task_id,
        "status": status,
        "createdAt": datetime.fromtimestamp(created / 1000, UTC).isoformat(),
        "lastUpdatedAt": now.isoformat(),
        "ttlMs": None,
        "pollIntervalMs": POLL_MILLISECONDS,
    }


async def _parts(ticket: AsyncTicket[Reply, Reply]) -> AsyncGenerator[Reply, None]:
    async with aclosing(ticket.partials()) as partials:
        async for part in partials:
            yield part
    yield await ticket.result()


def _mark(caller: Caller, uuid: str) -> str:
    return sha256(f"{caller.role or ''}/{uuid}".encode()).hexdigest()[:MARK]


def _unknown(task_id: str) -> MCPError:
    text = f"there is no task {task_id[:200]!r}: it was cancelled, its result has expired, or it is another role's"
    return MCPError(types.INVALID_PARAMS, text)
