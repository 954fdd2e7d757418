"""Servers that clients call directly, without a broker (FLP, C46): `FreelanceWorker` and `AsyncFreelanceWorker`."""

import asyncio
from typing import Any, Final, Self, Unpack

from ....mdp.program.arguments import check_known, name_of
from ....mdp.security.access import Access
from ....mdp.transport.endpoints import checked_endpoint
from ....workers.aio import AsyncWorker
from ....workers.aio_handling import AsyncHandler, BlockingWatch, HandlerCalls
from ....workers.base import AnyHandler, BaseWorker
from ....workers.mdworker import Handler, Worker
from ....workers.settings import HandlerArguments
from .server_socket import Listening, public_endpoint
from .servers import AsyncServer, ThreadedServer
from .session import FreelanceServerSession

DEFAULT_SERVICE = "freelance"
"""The name that requests show to the handler, and that the log shows."""
_OWN_ARGUMENTS: Final = ("endpoint", "handler", "bind", "service", "access", "insecure")


class _FreelanceBase(BaseWorker[AnyHandler]):
    """The settings of both kinds of servers.  `FreelanceWorker` describes them."""

    def __init__(
        self,
        endpoint: str,
        handler: AnyHandler | None = None,
        *,
        bind: str | None = None,
        service: str | bytes = DEFAULT_SERVICE,
        access: Access | None = None,
        insecure: bool = False,
        **arguments: Unpack[HandlerArguments],
    ) -> None:
        check_known("a Freelance worker", arguments, (*_OWN_ARGUMENTS, *HandlerArguments.__annotations__))
        self.endpoint = public_endpoint(endpoint)
        self.bind = self.endpoint if bind is None else checked_endpoint(bind)
        self.access = access
        self.insecure = insecure
        super().__init__(service, handler, broker=self.endpoint, key="", **arguments)

    def copy(self, *, broker: Any = None) -> Self:
        """Return a server with the same handler and settings that has not been started.

            server = worker.copy(broker="tcp://10.0.0.2:5555")

        Args:
            broker: Replaces its own endpoint.

        Returns:
            The new server.

        Raises:
            SettingError: The endpoint is invalid.
        """
        made = super().copy(broker=broker)
        if broker is not None:
            made.endpoint = made.bind = public_endpoint(broker)
        return made

    def _server_session(self) -> FreelanceServerSession:
        return FreelanceServerSession(self.service, self.settings, concurrency=self.settings.concurrency)

    @property
    def _listening(self) -> Listening:
        return Listening(self.endpoint, self.bind, self.access, self.insecure)


class FreelanceWorker(_FreelanceBase[Handler], Worker):
    """A server that clients call directly, without a broker.

    It is used like a `Worker`, and has the same handlers:

        worker = FreelanceWorker("tcp://127.0.0.1:5555", lambda request: request)
        worker.run()

    A client gets one reply: what a generator yields arrives together with its return value.  A handler's failure is
    sent as a reply that our clients recognize, and that others receive as three frames.

    Args:
        endpoint: The public endpoint, by which clients know this server, and to which they connect.
        handler: As in `Worker`.
        bind: Where it listens, if not there: for example `"tcp://*:5555"`, or an address behind a proxy.
        service: The name that requests show to the handler.
        concurrency: Threads that run the handler (default 1).
        codec: As in `Worker`.
        name: As in `Worker`.
        access: Admit only the keys that this access file lists (`zmdp.mdp.security.access.load`), whose `secret_key` is
            that of the server.
        insecure: Admit everybody, even if other machines can connect.
        context: ZeroMQ context to use, needed for `inproc://` endpoints.

    Raises:
        SettingError: A setting is invalid.
        TypeError: There is no such setting.
        BindError: It cannot listen, when it starts.
    """

    def _connect(self, number: int) -> ThreadedServer:
        return ThreadedServer(self._server_session(), self._listening, self._open_context())


class AsyncFreelanceWorker(_FreelanceBase[AsyncHandler], AsyncWorker):
    """A server that clients call directly, without a broker, with an asyncio handler.

    It is used like an `AsyncWorker`, and has the same handlers.  They must not block the event loop, which also answers
    PINGs.

        worker = AsyncFreelanceWorker("tcp://127.0.0.1:5555", reply)
        asyncio.run(worker.run())

    Args:
        endpoint: The public endpoint, by which clients know this server, and to which they connect.
        handler: As in `AsyncWorker`.
        bind: Where it listens, if not there: for example `"tcp://*:5555"`, or an address behind a proxy.
        service: The name that requests show to the handler.
        access: Admit only the keys that this access file lists (`zmdp.mdp.security.access.load`), whose `secret_key` is
            that of the server.
        insecure: Admit everybody, even if other machines can connect.
        arguments: Those of `FreelanceWorker`; `concurrency` is the maximum number of concurrent requests (default 64).

    Raises:
        SettingError: A setting is invalid.
        TypeError: There is no such setting.
        BindError: It cannot listen, when it starts.
    """

    def _connect(self, number: int, handler: AsyncHandler, loop: asyncio.AbstractEventLoop) -> AsyncServer:
        calls = HandlerCalls(handler, self._adapter)
        watch = BlockingWatch(loop, self.service.decode(), name_of(handler))
        return AsyncServer(self._server_session(), self._listening, self._open_context(), calls, loop, watch)


def freelance_worker(
    worker: Worker | AsyncWorker,
    endpoint: str,
    *,
    bind: str | None = None,
    access: Access | None = None,
    insecure: bool = False,
) -> FreelanceWorker | AsyncFreelanceWorker:
    """Return a server with the handler of `worker`, which has not been started.

        freelance_worker(worker, "tcp://10.0.0.1:5555", bind="tcp://*:5555").run()

    Args:
        worker: The worker whose handler and settings the server has.
        endpoint: The public endpoint, by which clients know this server, and to which they connect.
        bind: Where it listens, if not there: for example `"tcp://*:5555"`, or an address behind a proxy.
        access: Admit only the keys that this access file lists (`zmdp.mdp.security.access.load`), whose `secret_key` is
            that of the server.
        insecure: Admit everybody, even if other machines can connect.

    Returns:
        The server.

    Raises:
        SettingError: A setting is invalid.
    """
    kind = AsyncFreelanceWorker if isinstance(worker, AsyncWorker) else FreelanceWorker
    settings = worker.settings
    return kind(
        endpoint, worker._handler, bind=bind, service=worker.service, access=access, insecure=insecure,
        concurrency=settings.concurrency, codec=settings.codec, name=settings.name, context=settings.context,
    )  # fmt: skip
