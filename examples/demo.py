"""The program behind `make demo`: a broker, workers and requests, as separate processes on this machine."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from stage import (
    BIN,
    HEARTBEAT,
    PATIENCE,
    a_text,
    process,
    rows,
    say,
    scene,
    start_broker,
    wait_for,
    wait_until,
    worker,
)

from zmdp.clients import AsyncClient, Client, RequestError
from zmdp.titanic import Titanic, UnknownTicket


def stream(client: Client, text: bytes) -> None:
    """Print a reply as it streams in."""
    say(">>> for part in client.stream('text.count', text): ...")
    parts = 0
    for part in client.stream("text.count", text):
        title, words = (frame.decode() for frame in part)
        if part.final:
            say(f"    FINAL    {title:<24} {words:>7} words, after {parts} PARTIALs")
            continue
        parts += 1
        if parts <= 5 or parts % 20 == 0:
            say(f"    PARTIAL  {title:<24} {words:>7} words" + ("   …" if parts >= 5 else ""))


def take_over(stack: ExitStack, client: Client, endpoint: str, text: bytes) -> bool:
    """Kill a worker while it works.  Return whether another one took over its request."""
    service = "text.phrases"
    first = stack.enter_context(worker("text_services:phrases", endpoint))
    wait_for(client, service)
    say(f"    worker {first.pid} offers {service!r}; a client asks for the most frequent phrases (a second of work)")
    with ThreadPoolExecutor(1) as pool, Client(endpoint, timeout=PATIENCE, retries=0) as caller:
        asked = time.monotonic()
        reply = pool.submit(caller.request, service, text)
        wait_until(lambda: any(row["busy"] for row in rows(client, service)), "the worker to begin")
        second = stack.enter_context(worker("text_services:phrases", endpoint))
        wait_for(client, service, 2)
        say(f"    worker {second.pid} offers it too, and is idle")
        os.kill(first.pid, signal.SIGKILL)
        killed = time.monotonic()
        say(f"    kill -9 {first.pid}, {killed - asked:.1f} s into the request; the client just waits")
        wait_until(
            lambda: any(row["pid"] == second.pid and row["held"] for row in rows(client, service)), "the other worker"
        )
        say(f"    {(time.monotonic() - killed) * 1000:.0f} ms later worker {second.pid} has the request")
        pid, *found = reply.result()
        say(f"    {time.monotonic() - killed:.1f} s after the kill the client has its reply from {pid.decode()}:")
        for phrase in found[:4]:
            say(f"        {phrase.decode()}")
    stats = json.loads(client.request("mmi.stats")[0])
    say(f"    mmi.stats: redispatched {stats['redispatched']}, dropped {stats['dropped'] or 'none'}")
    return int(pid) == second.pid and stats["redispatched"] == 1


def fail(client: Client) -> None:
    """Make requests that fail, each for a different reason."""
    for asked, request in (
        ("client.request('nobody', wait=False)", lambda: client.request("nobody", wait=False)),
        ("client.request('nobody', timeout=0.2, retries=0)", lambda: client.request("nobody", timeout=0.2, retries=0)),
        ("client.request('sleep', b'two seconds')", lambda: client.request("sleep", b"two seconds")),
        (
            "client.request('sleep', b'5000', timeout=0.2, …)",
            lambda: client.request("sleep", b"5000", timeout=0.2, retries=0),
        ),
    ):
        try:
            request()
        except RequestError as error:
            say(f">>> {asked}\n    {type(error).__name__}: {error}")


async def in_flight(stack: ExitStack, broker: subprocess.Popen[str], endpoint: str) -> subprocess.Popen[str]:
    """Kill the broker while 500 requests are outstanding.  Return the broker that replaces it."""
    async with AsyncClient(endpoint, timeout=PATIENCE) as client:
        say("    500 × group.create_task(client.request('sleep', b'5', number)), at 4 workers")
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(client.request("sleep", b"5", b"%d" % number)) for number in range(500)]
            while sum(task.done() for task in asking) < 100:
                await asyncio.sleep(0)
            os.kill(broker.pid, signal.SIGKILL)
            killed = time.monotonic()
            say(f"    kill -9 {broker.pid}, the broker, with {sum(not task.done() for task in asking)} outstanding")
            broker, _ = start_broker(stack, endpoint)
        answered = sorted(int(task.result()[1]) for task in asking) == list(range(500))
        say(f"    {time.monotonic() - killed:.1f} s after the kill: each of the 500 has its reply: {answered}")
        if not answered:
            raise SystemExit("demo: requests were lost")
        return broker


def keep(stack: ExitStack, client: Client, endpoint: str) -> bool:
    """Show a request that survives Titanic itself.  Return whether its reply came."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    serve = (str(BIN / "titanic"), "serve", "--broker", endpoint, "--db", str(folder / "titanic.db"))
    quiet = ("--heartbeat", HEARTBEAT, "--lease", "2", "--log-level", "error")
    titanic = stack.enter_context(process(*serve, *quiet))
    wait_for(client, "titanic.request")
    say(f"$ titanic serve                          pid {titanic.pid}, keeps requests in {folder.name}/titanic.db")
    ticket = Titanic(client).submit("text.late", b"a letter", key="letter-1", priority=5)
    say(f">>> ticket = Titanic(client).submit('text.late', b'a letter', …)   nobody offers it\n    {ticket.uuid}")
    os.kill(titanic.pid, signal.SIGKILL)
    titanic.wait()
    say(f"    kill -9 {titanic.pid}, which is Titanic")
    titanic = stack.enter_context(process(*serve, *quiet))
    wait_for(client, "titanic.reply")
    say(f"$ titanic serve                          pid {titanic.pid}, on the same file: it has the request, no reply")
    say(f">>> ticket.ready()\n    {ticket.ready()}")
    late = (str(BIN / "mdworker"), "zmdp.workers.examples:echo", "--service", "text.late", "--broker", endpoint)
    running = stack.enter_context(process(*late, "--heartbeat", HEARTBEAT, "--log-level", "error"))
    say(f"    worker {running.pid} starts, and offers 'text.late'")
    reply = ticket.result(timeout=PATIENCE)
    say(f">>> ticket.result()\n    {list(reply)}")
    ticket.close()
    say(">>> ticket.close(); ticket.ready()")
    try:
        ticket.ready()
    except UnknownTicket as error:
        say(f"    UnknownTicket: {error}")
        return list(reply) == [b"a letter"]
    return False


def main() -> None:
    """Run all scenes.  Exit with an error if one went wrong."""
    started = time.monotonic()
    text = a_text()
    with ExitStack() as stack:
        scene(1, "A broker and some workers, each a process of its own")
        broker, endpoint = start_broker(stack)
        client = stack.enter_context(Client(endpoint))
        offered: Counter[str] = Counter()
        for target, service in (
            ("zmdp.workers.examples:echo", "echo"),
            ("text_services:count", "text.count"),
            *[("zmdp.workers.examples:sleep", "sleep")] * 4,
        ):
            running = stack.enter_context(worker(target, endpoint))
            offered[service] += 1
            wait_for(client, service, offered[service])
            say(f"$ mdworker {target:<29} pid {running.pid}, offers {service!r}")

        scene(2, "A request and its reply")
        say(">>> client.request('echo', b'hello', b'world')")
        say(str(list(client.request("echo", b"hello", b"world"))))

        scene(3, f"A streamed reply: words of {len(text) // 1000} kB of text, chapter by chapter")
        stream(client, text)

        scene(4, "Who is there? The broker answers mmi.* itself")
        for question, about in (
            ("mmi.service", b"echo"),
            ("mmi.service", b"nobody"),
            ("mmi.services", b"sleep"),
            ("mmi.workers", b"echo"),
        ):
            say(f"    {question} {about.decode():<8} → {client.request(question, about)[0].decode()}")

        scene(5, "A worker is killed in the middle of a request, another takes it over")
        taken_over = take_over(stack, client, endpoint, text)

        scene(6, "A request that fails says why")
        fail(client)

        scene(7, "500 requests are in flight over one connection when the broker is killed")
        broker = asyncio.run(in_flight(stack, broker, endpoint))

        scene(8, "A request that survives its caller, its Titanic, and the lack of workers")
        with ExitStack() as ours:
            kept = keep(ours, client, endpoint)

        scene(9, "The end: SIGTERM drains the broker")
    say(f"    broker exit code {broker.returncode}; the demo took {time.monotonic() - started:.1f} s")
    say("\nNow try it yourself, in three terminals (the commands are in .venv/bin):")
    say("    mdp-broker\n    mdworker zmdp.workers.examples:echo\n    mdclient call echo hello")
    say("\nWith Java 17, `make demo-spark` shows a query, a DataFrame through a service, and executors as workers.")
    if not (taken_over and kept) or broker.returncode:
        raise SystemExit("demo: something did not work as it should; see above")


if __name__ == "__main__":
    main()
