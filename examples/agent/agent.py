"""An agent without a model: it lists tools, calls one, follows another, cancels, and comes back for a task.

    python examples/agent/agent.py

It runs a broker, a worker, Titanic and an MCP gateway, and kills all but the broker while the task runs.
"""

import asyncio
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from zmdp.testing import free_endpoint

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent


class Programs:
    """The programs that the agent needs."""

    def __init__(self, folder: str) -> None:
        self.broker, bind = free_endpoint(), free_endpoint().removeprefix("tcp://")
        self.url = f"http://{bind}/mcp"
        self._commands = {
            "worker": ("mdworker", "reports:services", "--heartbeat", "0.5"),
            "titanic": ("titanic", "serve", "--db", f"{folder}/titanic.db", "--heartbeat", "0.5"),
            "gateway": ("mdp-gateway", "mcp", "--bind", bind),
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, stack: ExitStack, *names: str) -> None:
        """Start programs, which end with `stack`."""
        for name in names:
            command = self._commands.get(name, ("mdp-broker", "--bind", self.broker))
            self._running[name] = stack.enter_context(
                subprocess.Popen(
                    (BIN / command[0], *command[1:], "--log-level", "error"), cwd=HERE, stdout=subprocess.DEVNULL,
                    env={**os.environ, "MDP_BROKER": self.broker},
                )
            )  # fmt: skip
            stack.callback(self._running[name].kill)

    def kill(self, *names: str) -> None:
        """Kill programs with SIGKILL."""
        for name in names:
            self._running[name].kill()
            self._running[name].wait()


async def tools(url: str) -> list[str]:
    """Return the names of the tools, once all programs have started."""
    async with asyncio.timeout(60):
        while True:
            try:
                async with Client(streamable_http_client(url)) as client:
                    found = [each.name for each in (await client.list_tools()).tools]
                    await client.call_tool("words-count", {"text": ""})
                    if "report-build" in found:
                        return found
            except (Exception, BaseExceptionGroup):  # noqa: BLE001 - the programs have not started yet
                await asyncio.sleep(0.1)


async def work(url: str) -> str:
    """Do what an agent does, and return the id of a task that still runs."""
    async with Client(streamable_http_client(url)) as client:
        counted = await client.call_tool("words-count", {"text": "hello big world"})
        print("words-count:", counted.structured_content)

        async def show(progress: float, total: float | None, message: str | None) -> None:
            print("    progress:", message)

        read = await client.call_tool("pages-read", {"pages": 3}, progress_callback=show)
        print("pages-read:", read.structured_content)

        wrong = await client.call_tool("pages-read", {"pages": "three"})
        print("pages-read, refused:", wrong.content[0].text)

        endless = asyncio.ensure_future(client.call_tool("pages-read", {"pages": 1_000_000}, progress_callback=show))
        await asyncio.sleep(0.5)
        endless.cancel()
        print("pages-read, cancelled")

        started = await client.call_tool("report-build", {"month": "May"})
        task_id = str(started.structured_content["task_id"])
        print("report-build: a task,", task_id.partition(".")[0])
        return task_id


async def come_back(url: str, task_id: str) -> None:
    """Fetch the result of a task."""
    async with Client(streamable_http_client(url)) as client:
        while True:
            result = await client.call_tool("task_result", {"task_id": task_id, "wait": 10})
            if result.structured_content is not None:
                break
        print("report-build:", result.structured_content)


def main() -> None:
    """Run the programs and the agent."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        programs = Programs(folder)
        programs.start(stack, "broker", "worker", "titanic", "gateway")
        print("tools:", *asyncio.run(tools(programs.url)))
        task_id = asyncio.run(work(programs.url))
        programs.kill("worker", "titanic", "gateway")
        print("kill -9: the worker, Titanic, the gateway; and the agent is gone, too")
        programs.start(stack, "worker", "titanic", "gateway")
        asyncio.run(tools(programs.url))
        asyncio.run(come_back(programs.url, task_id))


if __name__ == "__main__":
    main()
