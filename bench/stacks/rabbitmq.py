"""RabbitMQ: rabbitmq-server and pika; RPC with direct reply-to, transient messages.

Workers acknowledge, so that another worker gets the request of one that dies, as with zmdp; without this, it was not
faster.

The client is pika's asyncio adapter.  A worker that only echoes is a SelectConnection, which sends in batches; one
that works is a BlockingConnection, which sends each reply before it takes the next request.  `prefetch` is how many
requests a worker may hold: with 1 the server gives requests only to idle workers; 0 is AMQP's default, no limit.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import processes

from .load import Ask
from .peer import Peer, Work, echo

if TYPE_CHECKING:
    import pika

HOME = Path("/usr/lib/rabbitmq/bin")
"""Debian's programs on PATH change to the user rabbitmq and to its folder; these are the programs that they run."""
QUEUE = "bench"
REPLY_TO = "amq.rabbitmq.reply-to"


@dataclass
class RabbitMQ(Peer):
    """RabbitMQ with transient messages."""

    name: str = "RabbitMQ"
    prefetch: int = 100
    needs: ClassVar[dict[str, str]] = {
        "rabbitmq-server": "Debian: apt-get install rabbitmq-server",
        "epmd": "it comes with Erlang, which rabbitmq-server needs",
        "pika": "pip install pika",
    }

    @contextmanager
    def server(self, folder: Path) -> Iterator[processes.Server]:
        with start(folder) as server:
            yield server

    def serve(self, address: str, work: Work, ready: Callable[[], None]) -> None:
        (_serve_batches if work is echo else _serve_one_by_one)(address, self.prefetch, work, ready)

    @asynccontextmanager
    async def client(self, address: str) -> AsyncIterator[Ask]:
        connection, channel = await connect(address)
        waiting: dict[str, asyncio.Future[bytes]] = {}
        numbers = itertools.count()
        loop = asyncio.get_running_loop()

        def replied(channel: Any, method: Any, properties: "pika.BasicProperties", body: bytes) -> None:
            del channel, method
            waiting.pop(properties.correlation_id).set_result(body)

        consuming: asyncio.Future[Any] = loop.create_future()
        channel.basic_consume(REPLY_TO, replied, auto_ack=True, callback=consuming.set_result)
        await consuming
        properties_of = _properties()

        async def ask(body: bytes) -> bytes:
            number = str(next(numbers))
            future = waiting[number] = loop.create_future()
            channel.basic_publish("", QUEUE, body, properties_of(correlation_id=number, reply_to=REPLY_TO))
            return await future

        try:
            yield ask
        finally:
            connection.close()


@dataclass
class Durable(RabbitMQ):
    """Persistent messages in a durable queue, which the server confirms when they are on disk."""

    name: str = "RabbitMQ, persistent"
    queue_type: str = "classic"

    @asynccontextmanager
    async def client(self, address: str) -> AsyncIterator[Ask]:
        connection, channel = await connect(address)
        loop = asyncio.get_running_loop()
        waiting: dict[int, asyncio.Future[None]] = {}
        oldest, numbers = 1, itertools.count(1)

        def confirmed(frame: Any) -> None:
            nonlocal oldest
            tag = frame.method.delivery_tag
            first = oldest if frame.method.multiple else tag
            for each in range(first, tag + 1):
                if (future := waiting.pop(each, None)) is not None:
                    if frame.method.NAME == "Basic.Ack":
                        future.set_result(None)
                    else:
                        future.set_exception(RuntimeError("RabbitMQ refused a message"))
            if frame.method.multiple:
                oldest = tag + 1

        declared: asyncio.Future[Any] = loop.create_future()
        arguments = {"x-queue-type": self.queue_type}
        channel.queue_declare("durable", durable=True, arguments=arguments, callback=declared.set_result)
        await declared
        confirming: asyncio.Future[Any] = loop.create_future()
        channel.confirm_delivery(confirmed, callback=confirming.set_result)
        await confirming
        persistent = _properties()(delivery_mode=2)

        async def ask(body: bytes) -> bytes:
            future = waiting[next(numbers)] = loop.create_future()
            channel.basic_publish("", "durable", body, persistent)
            await future
            return body

        try:
            yield ask
        finally:
            connection.close()


def _properties() -> "type[pika.BasicProperties]":
    import pika

    return pika.BasicProperties


@contextmanager
def start(folder: Path) -> Iterator[processes.Server]:
    """Run a server with its own files and names."""
    port, distribution, names = processes.free_port(), processes.free_port(), processes.free_port()
    (folder / "plugins").write_text("[].\n")
    (folder / "rabbitmq.conf").write_text("log.console = false\nlog.file.level = error\nheartbeat = 600\n")
    env = {
        "HOME": str(folder),
        "ERL_EPMD_PORT": str(names),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": f"bench{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_CONF_ENV_FILE": str(folder / "rabbitmq-env.conf"),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
        "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "generated"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_PID_FILE": str(folder / "pid"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
    }
    (folder / "rabbitmq-env.conf").touch()
    program = HOME / "rabbitmq-server" if (HOME / "rabbitmq-server").exists() else "rabbitmq-server"
    # Started here, or Erlang would start one that stays.
    with (
        processes.running("epmd", "-port", str(names), "-address", "127.0.0.1", env=env, cwd=folder) as epmd,
        processes.running(program, env=env, cwd=folder) as process,
    ):
        address = f"amqp://guest:guest@127.0.0.1:{port}/%2F?heartbeat=600"
        process.eventually(processes.listening(port))
        process.eventually(lambda: _accepts(address))
        yield processes.Server(address, [process.pid, epmd.pid])


def _accepts(address: str) -> bool:
    """Return whether it accepts clients and has the queue: the port is open before everything else is ready."""
    import pika

    try:
        connection = pika.BlockingConnection(pika.URLParameters(address))
    except (pika.exceptions.AMQPError, OSError):
        return False
    connection.channel().queue_declare(QUEUE)
    connection.close()
    return True


async def connect(address: str) -> tuple[Any, Any]:
    """Return a connection of pika's asyncio adapter, and a channel."""
    import pika
    from pika.adapters.asyncio_connection import AsyncioConnection

    opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    connection = AsyncioConnection(
        pika.URLParameters(address),
        on_open_callback=lambda connection: connection.channel(on_open_callback=opened.set_result),
        on_open_error_callback=lambda _, error: opened.set_exception(error),
    )
    return connection, await opened


def _serve_batches(address: str, prefetch: int, work: Work, ready: Callable[[], None]) -> None:
    import pika

    def handle(channel: Any, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        reply = pika.BasicProperties(correlation_id=properties.correlation_id)
        channel.basic_publish("", properties.reply_to, work(body), reply)
        channel.basic_ack(method.delivery_tag)

    def opened(channel: Any) -> None:
        channel.basic_qos(prefetch_count=prefetch)
        channel.basic_consume(QUEUE, handle, callback=lambda _: ready())

    connection = pika.SelectConnection(
        pika.URLParameters(address), on_open_callback=lambda each: each.channel(on_open_callback=opened)
    )
    connection.ioloop.start()


def _serve_one_by_one(address: str, prefetch: int, work: Work, ready: Callable[[], None]) -> None:
    import pika

    def handle(channel: Any, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        reply = pika.BasicProperties(correlation_id=properties.correlation_id)
        channel.basic_publish("", properties.reply_to, work(body), reply)
        channel.basic_ack(method.delivery_tag)

    channel = pika.BlockingConnection(pika.URLParameters(address)).channel()
    channel.basic_qos(prefetch_count=prefetch)
    channel.basic_consume(QUEUE, handle)
    ready()
    channel.start_consuming()
