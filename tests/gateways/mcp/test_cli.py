"""The command `mdp-gateway mcp` as a process: stdio and HTTP, roles, other clients, and kills of everything."""

import asyncio
import signal
import subprocess
import sys
from contextlib import ExitStack, asynccontextmanager

import httpx
import httpx2
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from support.http_gateways import TITANIC, await_services
from support.mcp_gateways import tools
from support.mcp_tasks import Tasks, ended
from support.offered import offered
from support.processes import BIN, TIMEOUT_SECONDS, process, run
from support.titanics import QUICK, serving

from zmdp.mdp.program.extras import install_command
from zmdp.testing import free_endpoint, running_broker
from zmdp.workers import Worker

GATEWAY = ("python", "-m", "zmdp.gateways.cli")
TASKS = 200


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    with running_broker(drain_timeout=0.0) as broker:
        endpoint = broker.endpoints[0]
        with offered(tools()[0], endpoint), serving(endpoint, str(tmp_path_factory.mktemp("db") / "titanic.db")):
            await_services(endpoint, *TITANIC)
            yield endpoint


@pytest.fixture(scope="module")
def roles(tmp_path_factory):
    """An access file with two roles; return it and their tokens."""
    path = tmp_path_factory.mktemp("access") / "access.toml"
    tokens = [run(*GATEWAY, "token", role, "--access", str(path)).stdout.decode().strip() for role in ("shop", "lab")]
    path.write_text(path.read_text().replace("[roles.lab]", '[roles.lab]\ncall = ["report.*"]'))
    return path, *tokens


def listening(endpoint, *options, bind="127.0.0.1:0"):
    return process(*GATEWAY, "mcp", "--bind", bind, "--broker", endpoint, *options)


@asynccontextmanager
async def connected(url, token="", **how):
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=TIMEOUT_SECONDS) as http,
        Client(streamable_http_client(url, http_client=http), **how) as client,
    ):
        yield client


def stdio(endpoint):
    started = StdioServerParameters(
        command=sys.executable, args=[*GATEWAY[1:], "mcp", "--broker", endpoint]
    )  # fmt: skip
    return stdio_client(started)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_stdio(endpoint, mode):
    async def main():
        async with Client(stdio(endpoint), mode=mode) as client:
            assert (await client.call_tool("words-count", {"text": "a b"})).structured_content == {"result": 2}

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stdio_ends_on_signals(endpoint, number):
    command = [str(BIN / GATEWAY[0]), *GATEWAY[1:], "mcp", "--broker", endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as gateway:
        assert gateway.stderr is not None
        assert "ready on stdin and stdout" in gateway.stderr.readline()
        gateway.send_signal(number)
        assert gateway.wait(TIMEOUT_SECONDS) == 0


@pytest.mark.parametrize("stdin", [b"", b"no json\n"])
def test_stdio_ends_with_its_input(endpoint, stdin):
    ended = run(*GATEWAY, "mcp", "--broker", endpoint, stdin=stdin)
    assert ended.returncode == 0
    assert b"Traceback" not in ended.stderr


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_http_for_roles(endpoint, roles, mode):
    access, shop, lab = roles

    async def main(url):
        async with connected(url, shop, mode=mode) as client, connected(url, lab, mode=mode) as other:
            assert (await client.call_tool("words-count", {"text": "a b"})).structured_content == {"result": 2}
            assert [each.name for each in (await other.list_tools()).tools if each.name.startswith("words")] == []
            with pytest.raises(Exception, match="there is no tool"):
                await other.call_tool("words-count", {"text": "a b"})
            task_id = (await client.call_tool("report-build", {"month": "May"})).structured_content["task_id"]
            for name in ("task_result", "task_cancel"):
                refused = await other.call_tool(name, {"task_id": task_id})
                assert "another role's" in refused.content[0].text
            result = await client.call_tool("task_result", {"task_id": task_id, "wait": 30})
            assert result.structured_content == {"width": 3, "name": "May"}

    with listening(endpoint, "--access", str(access)) as gateway:
        url = gateway.line("http://", "stdout")
        assert httpx.post(url, json={}).status_code == 401
        assert httpx.post(url, json={}, headers={"authorization": "Bearer no"}).status_code == 401
        asyncio.run(main(url))
        assert gateway.end() == 0


def test_a_role_is_a_group(endpoint, roles):
    access, shop, _ = roles

    async def main(url):
        async with connected(url, shop) as client:
            return (await client.call_tool("which-group", {"text": ""})).content[0].text

    with (
        Worker(
            "which.group",
            lambda request: [str(request.options.get("group")).encode()],
            broker=endpoint,
            about={"tool": {}},
        ),
        listening(endpoint, "--access", str(access)) as gateway,
    ):
        assert asyncio.run(main(gateway.line("http://", "stdout"))) == "shop"


def test_a_message_over_stdio_that_is_too_large(endpoint):
    large = run(*GATEWAY, "mcp", "--broker", endpoint, "--max-body", "1000", stdin=b"x" * 5000)
    assert large.returncode == 0
    assert b"--max-body" in large.stderr
    assert b"Traceback" not in large.stderr


def test_pages_of_other_sites_and_names_are_refused(endpoint):
    with listening(endpoint) as gateway:
        url = gateway.line("http://", "stdout")
        assert httpx.post(url, json={}, headers={"origin": "https://evil.example"}).status_code == 403
        assert httpx.post(url, json={}, headers={"host": "evil.example"}).status_code == 421


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_it_stops_while_clients_listen(endpoint, mode):
    async def main(gateway, url):
        async with connected(url, mode=mode) as client:
            await client.list_tools()
            if mode == "auto":
                async with client.listen(tools_list_changed=True):
                    gateway.send_signal(signal.SIGTERM)
                    assert await asyncio.to_thread(gateway.wait) == 0
            else:
                gateway.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(gateway.wait) == 0

    with listening(endpoint) as gateway:
        asyncio.run(main(gateway, gateway.line("http://", "stdout")))


def test_fastmcp(endpoint):
    fastmcp = pytest.importorskip("fastmcp")

    async def main(url):
        told = []

        async def show(progress, total, message):
            told.append(message)

        async with fastmcp.Client(url) as client:
            assert "words-count" in {each.name for each in await client.list_tools()}
            assert (await client.call_tool("words-count", {"text": "a b"})).structured_content == {"result": 2}
            result = await client.call_tool("words-each", {"text": "a b"}, progress_handler=show)
            assert result.structured_content == {"result": ["a", "b"]}
            assert told == ["a", "b"]

    with listening(endpoint) as gateway:
        asyncio.run(main(gateway.line("http://", "stdout")))


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("--bind", "0.0.0.0:0"), 1, "refused to listen on 0.0.0.0"),
        (("--bind", "8080"), 2, "expected HOST:PORT"),
        (("--tls-key", "x"), 2, "requires --tls-cert"),
        (("--access", "missing.toml"), 2, "mdp-gateway token creates it"),
    ],
)
def test_invalid_usage(in_this_process, options, code, text):
    ended = in_this_process("mdp-gateway", "mcp", *options)
    assert ended.returncode == code
    assert text in ended.stderr.decode()


def test_the_sdk_is_missing(in_this_process, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp_types", None)
    for name in ("calls", "catalogue", "server", "tasks", "tools"):
        monkeypatch.delitem(sys.modules, f"zmdp.gateways.mcp.{name}", raising=False)
    ended = in_this_process("mdp-gateway", "mcp")
    assert ended.returncode == 2
    assert install_command("mcp") in ended.stderr.decode()


def test_no_task_is_lost_when_everything_is_killed(tmp_path):
    """The gateway, Titanic and the worker are killed in turn while tasks are created and fetched."""
    (tmp_path / "reports.py").write_text(REPORTS)
    broker, bind = free_endpoint(), free_endpoint().removeprefix("tcp://")
    commands = [
        (*GATEWAY, "mcp", "--bind", bind, "--broker", broker),
        ("titanic", "serve", "--broker", broker, "--db", str(tmp_path / "titanic.db"), *QUICK),
        ("mdworker", "reports:services", "--broker", broker, "--heartbeat", "0.2", "--liveness", "10"),
    ]
    ready = ("ready at", "titanic.reply: serving", "report.double: serving")
    url = f"http://{bind}/mcp"

    def restarted(stack, number):
        started = stack.enter_context(process(*commands[number], cwd=tmp_path))
        started.line(ready[number])
        return started

    async def main(stack):
        running = [await asyncio.to_thread(restarted, stack, number) for number in range(len(commands))]
        await asyncio.to_thread(await_services, broker, *TITANIC, "report.double")
        tasks, results = Tasks(wait=False), {}

        async def until_it_works(attempt):
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while True:
                    try:
                        async with connected(url, extensions=[tasks]) as client:
                            return await attempt(client)
                    except (Exception, BaseExceptionGroup):  # noqa: BLE001 - what the SDK raises when servers die
                        await asyncio.sleep(0.05)

        async def create(client):
            while len(tasks.created) < TASKS:
                result = await client.call_tool("report-double", {"number": len(tasks.created)})
                assert not result.is_error or not result.content

        async def fetch(client):
            for task_id in tasks.created:
                if task_id not in results:
                    task = await ended(client.session, task_id)
                    results[task_id] = task["result"]["structuredContent"]["result"]

        creating = asyncio.ensure_future(until_it_works(create))
        for round_ in range(6):
            wanted = min(TASKS, (round_ + 1) * TASKS // 8)
            while len(tasks.created) < wanted:
                await asyncio.sleep(0.01)
            number = round_ % len(running)
            await asyncio.to_thread(running[number].kill)
            running[number] = await asyncio.to_thread(restarted, stack, number)
        await creating
        for each in running[::2]:  # the worker is not needed any more for what has ended
            await asyncio.to_thread(each.kill)
        running[0] = await asyncio.to_thread(restarted, stack, 0)
        running[2] = await asyncio.to_thread(restarted, stack, 2)
        await until_it_works(fetch)
        assert len(results) >= TASKS

    with running_broker(broker, drain_timeout=0.0), ExitStack() as stack:
        asyncio.run(main(stack))


REPORTS = """
from zmdp import Services, Tool

services = Services()


@services.service("report.double", tool=Tool(durable=True))
def double(number: int) -> int:
    return 2 * number
"""
