"""The process that `mdp-broker --http` starts: see `zmdp.mdp.cli.web`.

    python -m zmdp.dashboard DESCRIPTOR LOG-LEVEL LOG-FORMAT

DESCRIPTOR is that of a listening socket; settings arrive on stdin.
"""

import asyncio
import gc
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, Final

from ..clients import AsyncClient
from ..mdp.http.server import Server, run
from ..mdp.program import logs
from ..mdp.program.control_services import SPARK
from ..mdp.security.keys import ClientKeys
from .broker.observer import Observer
from .broker.pages import BrokerSection
from .shell.shell import Shell
from .shell.visitors import Visitors, limits_for, visitors_of
from .spark.drivers import ControlServices
from .spark.pages import SparkSection

NICENESS: Final = 5
"""Lower priority than the broker's, which comes first when the processor is busy."""
MAX_SETTINGS_BYTES: Final = 16 << 20


async def serve(listener: socket.socket) -> int:
    """Serve until stdin ends."""
    told = asyncio.StreamReader(limit=MAX_SETTINGS_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), sys.stdin)
    first = await told.readline()
    if not first:
        return 0
    settings = json.loads(first)
    keys = settings.get("keys")
    loaded = None if keys is None else ClientKeys(*(key.encode() for key in keys))
    visitors = Visitors(visitors_of(settings["access"]))
    limits = limits_for(everybody=visitors.access is None, local=not settings["open"])
    async with AsyncClient(settings["endpoint"], key=loaded or "") as client:
        observer = Observer(client)
        broker = BrokerSection(observer)
        pages_of_spark = SparkSection(observer, ControlServices(client, observer, SPARK))
        sections = [broker.section(), pages_of_spark.section()]
        shell = Shell(broker.name, sections, visitors)
        server = Server(shell.application, limits, listener)
        tasks = [asyncio.ensure_future(server.run()), asyncio.ensure_future(observer.run())]
        gc.freeze()  # objects that exist now are never collected
        reader = asyncio.ensure_future(_follow(told, visitors))
        try:
            done, _ = await asyncio.wait([*tasks, reader], return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            for task in (*tasks, reader):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, reader, return_exceptions=True)
    return 0


async def _follow(told: asyncio.StreamReader, visitors: Visitors) -> None:
    """Apply each line of settings from the broker, until it closes the pipe."""
    while line := await told.readline():
        settings: dict[str, Any] = json.loads(line)
        visitors.access = visitors_of(settings["access"])


def main() -> None:
    """Entry point of the process."""
    descriptor, level, form = sys.argv[1:]
    logs.configure(level, form)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the broker does, which may still have requests to finish
    with suppress(OSError):
        os.nice(NICENESS)
    listener = socket.socket(fileno=int(descriptor))
    sys.exit(run(lambda: serve(listener)))


if __name__ == "__main__":
    main()
