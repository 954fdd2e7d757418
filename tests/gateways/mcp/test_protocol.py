"""The MCP gateway with the SDK's own client, in memory, beside a real broker, worker and Titanic."""

import asyncio
from functools import partial

import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError
from support.mcp_gateways import mcp_server, talk, tools
from support.offered import offered
from support.processes import TIMEOUT_SECONDS

from zmdp.testing import running_broker
from zmdp.workers import Worker


@pytest.fixture(scope="module")
def endpoint():
    with running_broker(drain_timeout=0.0) as broker:
        yield broker.endpoints[0]


@pytest.fixture(scope="module")
def seen(endpoint):
    services, seen = tools()
    with offered(services, endpoint):
        yield seen


@pytest.fixture
def conversation(endpoint, seen):
    return partial(talk, endpoint)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_tools_are_the_services_that_are_meant_for_agents(conversation, mode):
    async def listed(client):
        found = {each.name: each for each in (await client.list_tools()).tools}
        assert "hidden" not in found
        assert found["words-count"].description == "Count the words of a text."
        assert found["words-each"].title == "Words"
        assert found["report-build"].output_schema["required"] == ["task_id"]
        assert "task_result" in found

    conversation(listed, mode=mode)


@pytest.mark.parametrize(
    ("name", "arguments", "value"),
    [
        ("words-count", {"text": "a b c"}, {"result": 3}),
        ("images-resize", {"width": 3}, {"width": 3}),
        ("images-packed", {"job": {"width": 3}}, {"result": [{"width": 3}]}),
        ("images-packed", {}, {"result": [{"width": 1, "name": "x"}]}),
        ("nothing", {}, {"result": None}),
        ("words-each", {"text": "a b"}, {"result": ["a", "b"]}),
        ("words-each", {"text": ""}, {"result": []}),
    ],
)
def test_a_call(conversation, name, arguments, value):
    async def call(client):
        result = await client.call_tool(name, arguments)
        assert not result.is_error
        assert result.structured_content == value

    conversation(call)


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("words-count", {"text": 5}, "$: expected str, got int"),
        ("images-resize", {"width": "a"}, "$.width: expected int, got str"),
        ("words-count", {"nope": 5}, "there is no argument 'nope'"),
        ("images-resize", {"width": 13}, "13 is unlucky"),
    ],
)
def test_what_is_wrong_is_told_to_the_agent(conversation, name, arguments, text):
    async def call(client):
        result = await client.call_tool(name, arguments)
        assert result.is_error
        assert text in result.content[0].text

    conversation(call)


@pytest.mark.parametrize("name", ["hidden", "nope", "a.b", "mmi-service"])
def test_what_is_not_a_tool_is_refused(conversation, name):
    async def call(client):
        with pytest.raises(MCPError, match="there is no tool"):
            await client.call_tool(name, {})

    conversation(call)


def test_services_that_the_operator_exposes(conversation):
    async def call(client):
        assert "hidden" in {each.name for each in (await client.list_tools()).tools}
        assert (await client.call_tool("hidden", {})).structured_content == {"result": 1}
        for own in ("mmi-service", "titanic-request"):
            with pytest.raises(MCPError, match="there is no tool"):
                await client.call_tool(own, {})

    conversation(call, "*")


def test_the_values_of_a_stream_are_progress(conversation):
    told = []

    async def show(progress, total, message):
        told.append((progress, total, message))

    async def call(client):
        await client.call_tool("words-each", {"text": "a b"}, progress_callback=show)

    conversation(call)
    assert told == [(1, None, "a"), (2, None, "b")]


def test_numbers_that_grow_are_progress_themselves(endpoint, conversation):
    told = []

    def steps(request):
        yield from (b"10", b"30", b"20", b"true")
        return b"null"

    async def show(progress, total, message):
        told.append(progress)

    async def call(client):
        await client.call_tool("steps", {}, progress_callback=show)

    about = {"tool": {}, "codec": "json", "request": {"type": "null"}, "reply": {"type": "null"}}
    with Worker("steps", steps, broker=endpoint, about=about):
        conversation(call)
    assert told == [10, 30, 31, 32]


def test_cancelling_a_call_cancels_the_request(endpoint, seen):
    async def main():
        async with mcp_server(endpoint) as server, Client(server) as client:
            calling = asyncio.ensure_future(client.call_tool("hold", {"text": "x"}))
            while not seen["begun"].is_set():
                await asyncio.sleep(0.01)
            calling.cancel()
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while not seen["cancelled"].is_set():
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_call_that_takes_too_long(conversation):
    async def call(client):
        result = await client.call_tool("hold", {"text": "x"})
        assert result.is_error
        assert "hold has not answered within 0.3 s (--timeout)" in result.content[0].text

    conversation(call, timeout=0.3)


def test_a_reply_that_is_too_large(conversation):
    async def call(client):
        result = await client.call_tool("words-each", {"text": "abcdefghij " * 100})
        assert result.is_error
        assert "--max-memory" in result.content[0].text

    conversation(call, max_memory=2000)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_client_is_told_when_the_tools_change(endpoint, mode, monkeypatch):
    monkeypatch.setattr("zmdp.gateways.mcp.catalogue.WATCH_SECONDS", 0.05)

    async def main():
        changed = asyncio.Event()
        late = Worker("late.tool", list, broker=endpoint, about={"tool": {}})

        async def heard(message):
            if getattr(message, "method", "") == "notifications/tools/list_changed":
                changed.set()

        async with mcp_server(endpoint) as server, Client(server, mode=mode, message_handler=heard) as client:
            assert "late-tool" not in {each.name for each in (await client.list_tools()).tools}
            async with asyncio.timeout(TIMEOUT_SECONDS):
                if mode == "legacy":
                    with late:
                        await changed.wait()
                else:
                    async with client.listen(tools_list_changed=True) as events:
                        with late:
                            await anext(aiter(events))

    asyncio.run(main())
