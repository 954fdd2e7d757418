"""A worker process or the client process of a peer.

    python -m stacks.child worker|client TARGET SETTINGS ADDRESS PLAN

A worker prints `ready`; the client prints a line of JSON for each load of its plan.
"""

import asyncio
import importlib
import json
import os
import sys
from typing import Any

from . import load, peer


def main() -> None:
    role, target, settings, address, plan = sys.argv[1:]
    module, _, name = target.partition(":")
    made = getattr(importlib.import_module(module), name)(**json.loads(settings))
    if role == "worker":
        made.serve(address, getattr(peer, plan), lambda: print("ready", flush=True))
    elif made.synchronous:
        for each in json.loads(plan):
            with made.caller(address, each["outstanding"]) as caller:
                window = load.Window(_with_me(each["pids"]))
                load.closed_sync(caller, each["outstanding"], each["warm"], window, each["seconds"])
                tell(window.figures())
    else:
        asyncio.run(client(made, address, json.loads(plan)))


async def client(made: peer.Peer, address: str, plan: list[dict[str, Any]]) -> None:
    async with made.client(address) as ask:
        for each in plan:
            if "moments" in each:
                await load.open_loop(ask, [(0.01 * n, False) for n in range(20)], b"1", b"1")  # connects, warms up
                tell(await load.open_loop(ask, each["moments"], each["short"].encode(), each["slow"].encode()))
            else:
                window = load.Window(_with_me(each["pids"]))
                size = each.get("size", load.SIZE)
                await load.closed(ask, each["outstanding"], each["warm"], window, each["seconds"], size=size)
                tell(window.figures())


def _with_me(pids: dict[str, list[int]]) -> dict[str, list[int]]:
    return {**pids, "client": [os.getpid()]}


def tell(figures: dict[str, Any]) -> None:
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
