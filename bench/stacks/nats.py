"""NATS: nats-server and nats-py; request and reply through a queue group.

Uses nats-py's default settings and asyncio's default event loop, as zmdp does.  nats-py awaits a subscription's
callback before it calls it for the next message, so even handlers that await run one at a time in a process; with
`tasks`, the application avoids this by starting a task for each message.
"""

import asyncio
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import processes

from .load import Ask
from .peer import Peer, Work, echo, pause

SYNCS_ALWAYS = (2, 10)
"""The first version that can sync before it acknowledges."""


@dataclass
class NATS(Peer):
    """Core NATS.  Its server gives a request to any member of the queue group, because it does not know which are
    busy."""

    name: str = "NATS"
    tasks: bool = False
    needs: ClassVar[dict[str, str]] = {
        "nats-server": "Debian: apt-get install nats-server",
        "nats": "pip install nats-py",
    }

    @contextmanager
    def server(self, folder: Path) -> Iterator[processes.Server]:
        port = processes.free_port()
        with processes.running("nats-server", "-a", "127.0.0.1", "-p", str(port), cwd=folder) as process:
            process.eventually(processes.listening(port))
            yield processes.Server(f"nats://127.0.0.1:{port}", [process.pid])

    def serve(self, address: str, work: Work, ready: Callable[[], None]) -> None:
        asyncio.run(self._serve(address, work, ready))

    async def _serve(self, address: str, work: Work, ready: Callable[[], None]) -> None:
        import nats

        connection = await nats.connect(address)

        async def handle(message: "nats.aio.msg.Msg") -> None:
            await message.respond(work(message.data))
            if work is not echo:
                # So that its reply goes out before the next request blocks the process: nats-py's flusher is a task.
                await asyncio.sleep(0)
                await asyncio.sleep(0)

        async def handle_awaiting(message: "nats.aio.msg.Msg") -> None:
            await message.respond(await work(message.data))

        running = set()

        async def handle_in_task(message: "nats.aio.msg.Msg") -> None:
            task = asyncio.create_task(handle_awaiting(message))
            running.add(task)
            task.add_done_callback(running.discard)

        callback = handle if work is not pause else handle_in_task if self.tasks else handle_awaiting
        await connection.subscribe("bench", queue="workers", cb=callback)
        await connection.flush()
        ready()
        await asyncio.Event().wait()

    @asynccontextmanager
    async def client(self, address: str) -> AsyncIterator[Ask]:
        import nats

        connection = await nats.connect(address)

        async def ask(body: bytes) -> bytes:
            return (await connection.request("bench", body, timeout=60)).data

        try:
            yield ask
        finally:
            await connection.close()


@dataclass
class JetStream(NATS):
    """JetStream: the server stores messages in a file before it acknowledges them; with `always`, it also syncs the
    file."""

    name: str = "JetStream"
    always: bool = True

    def missing(self) -> str | None:
        why = super().missing()
        if why is None and self.always and version() < SYNCS_ALWAYS:
            shown = ".".join(map(str, version()))
            why = f"nats-server {shown} accepts before it syncs: sync_interval: always takes 2.10 or newer"
        return why

    @contextmanager
    def server(self, folder: Path) -> Iterator[processes.Server]:
        port = processes.free_port()
        sync = "sync_interval: always" if self.always else ""
        config = f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}/stored"\n{sync} }}\n'
        (folder / "nats.conf").write_text(config)
        with processes.running("nats-server", "-c", folder / "nats.conf", cwd=folder) as process:
            process.eventually(processes.listening(port))
            yield processes.Server(f"nats://127.0.0.1:{port}", [process.pid])

    @asynccontextmanager
    async def client(self, address: str) -> AsyncIterator[Ask]:
        import nats

        connection = await nats.connect(address)
        stream = connection.jetstream()
        await stream.add_stream(name="bench", subjects=["durable"])  # in a file, unless told

        async def ask(body: bytes) -> bytes:
            await (await stream.publish_async("durable", body))
            return body

        try:
            yield ask
        finally:
            await connection.close()


def version() -> tuple[int, ...]:
    """Return the version of the installed server."""
    done = subprocess.run(["nats-server", "--version"], capture_output=True, text=True, check=True)
    return tuple(int(each) for each in re.findall(r"\d+", done.stdout)[:3])
