"""Tasks: calls of durable tools, with the extension and without it."""

from functools import partial

import pytest
from mcp.shared.exceptions import MCPError
from support.http_gateways import TITANIC, await_services
from support.mcp_gateways import talk, tools
from support.mcp_tasks import Tasks, ask, ended
from support.offered import offered
from support.titanics import serving

from zmdp.gateways.mcp.tasks import EXTENSION
from zmdp.testing import running_broker

UNKNOWN = "report-build.0198d5a2b7c97d3f8a2f1c2b3d4e5f60.00000000"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    with running_broker(drain_timeout=0.0) as broker:
        endpoint = broker.endpoints[0]
        with offered(tools()[0], endpoint), serving(endpoint, str(tmp_path_factory.mktemp("db") / "titanic.db")):
            await_services(endpoint, *TITANIC)
            yield endpoint


@pytest.fixture
def conversation(endpoint):
    return partial(talk, endpoint)


def test_a_task(conversation):
    tasks = Tasks(wait=False)

    async def call(client):
        assert EXTENSION in client.server_capabilities.extensions
        found = {each.name: each for each in (await client.list_tools()).tools}
        assert found["report-build"].output_schema["required"] == ["width"]
        assert "task_result" not in found
        await client.call_tool("report-build", {"month": "May"})
        (task_id,) = tasks.created
        task = await ended(client.session, task_id)
        assert (task["taskId"], task["status"], task["resultType"]) == (task_id, "completed", "complete")
        assert task["createdAt"] <= task["lastUpdatedAt"]
        assert task["result"]["structuredContent"] == {"width": 3, "name": "May"}
        await ask(client.session, "tasks/update", task_id)
        await ask(client.session, "tasks/cancel", task_id)
        with pytest.raises(MCPError, match="there is no task"):
            await ask(client.session, "tasks/get", task_id)

    conversation(call, extensions=[tasks])


@pytest.mark.parametrize(
    ("name", "arguments", "value"),
    [
        ("report-build", {"month": "May"}, {"width": 3, "name": "May"}),
        ("report-pages", {"number": 3}, {"result": [0, 1, 2]}),
        ("report-pages", {"number": 0}, {"result": []}),
    ],
)
def test_a_client_with_the_extension_waits_for_the_result(conversation, name, arguments, value):
    async def call(client):
        assert (await client.call_tool(name, arguments)).structured_content == value

    conversation(call, extensions=[Tasks()])


def test_a_task_that_fails_has_completed_with_an_error(conversation):
    async def call(client):
        result = await client.call_tool("report-build", {"month": ""})
        assert (result.is_error, result.content[0].text) == (True, "which month?")

    conversation(call, extensions=[Tasks()])


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_client_without_the_extension_gets_an_id_and_two_tools(conversation, mode):
    async def call(client):
        task_id = (await client.call_tool("report-build", {"month": "May"})).structured_content["task_id"]
        result = await client.call_tool("task_result", {"task_id": task_id, "wait": 30})
        assert result.structured_content == {"width": 3, "name": "May"}
        await client.call_tool("task_cancel", {"task_id": task_id})
        gone = await client.call_tool("task_result", {"task_id": task_id})
        assert gone.is_error
        assert "there is no task" in gone.content[0].text

    conversation(call, mode=mode)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "needs task_id"),
        ({"task_id": 1}, "needs task_id"),
        ({"task_id": "x", "wait": "1"}, "needs task_id"),
        ({"task_id": "x"}, "there is no task 'x'"),
        ({"task_id": UNKNOWN}, "there is no task"),
        ({"task_id": "report-build.zz.00000000"}, "there is no task"),
    ],
)
def test_what_is_not_a_task(conversation, arguments, text):
    async def call(client):
        result = await client.call_tool("task_result", arguments)
        assert result.is_error
        assert text in result.content[0].text

    conversation(call)


def test_a_task_that_waits_has_no_result_yet(conversation, endpoint):
    async def call(client):
        task_id = (await client.call_tool("report-pages", {"number": 100_000})).structured_content["task_id"]
        told = await client.call_tool("task_result", {"task_id": task_id})
        assert "has no result yet" in told.content[0].text
        await client.call_tool("task_cancel", {"task_id": task_id})

    conversation(call)


def test_wrong_arguments_are_told_when_the_task_is_done(conversation):
    async def call(client):
        result = await client.call_tool("report-build", {"month": 5})
        assert result.is_error
        assert "expected str, got int" in result.content[0].text

    conversation(call, extensions=[Tasks()])


def test_without_titanic():
    async def call(client):
        result = await client.call_tool("report-build", {"month": "May"})
        assert result.is_error
        assert "start one with `titanic serve`" in result.content[0].text

    with running_broker(drain_timeout=0.0) as broker, offered(tools()[0], broker.endpoints[0]):
        talk(broker.endpoints[0], call)
