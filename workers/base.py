"""Shared by `Worker` and `AsyncWorker`: their handler and settings."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, ClassVar, Generic, Self, TypeVar, Unpack

from ..mdp import wire
from ..mdp.errors import ClosedError, SettingError
from ..mdp.program import process
from ..mdp.program.arguments import check_known, is_async, name_of
from ..mdp.transport.sockets import Context, end, own_context
from .connection import WorkerConnection, ready_options
from .handling import HandlerAdapter
from .session.held import CreditController
from .session.request import Request
from .session.session import WorkerSession
from .settings import WorkerArguments, WorkerSettings

AnyHandler = TypeVar("AnyHandler", bound=Callable[[Any], Any])
Decorated = TypeVar("Decorated", bound=Callable[[Any], Any])


class BaseWorker(Generic[AnyHandler]):
    """A handler and its settings.  `Worker` describes them."""

    default_concurrency: ClassVar[int] = 1
    _asyncio: ClassVar[bool]
    _prefetch: ClassVar[bool] = False
    _connections: Sequence[WorkerConnection]
    _wrong_handler: ClassVar[str]
    """The error message for a handler that this kind of worker cannot call."""

    def __init__(
        self,
        service: str | bytes,
        handler: AnyHandler | None = None,
        *,
        broker: str | Sequence[str] | None = None,
        **arguments: Unpack[WorkerArguments],
    ) -> None:
        check_known("a worker", arguments, ("service", "handler", "broker", *WorkerArguments.__annotations__))
        self.service = wire.service_name(service)
        self.settings = WorkerSettings.of(broker, arguments, default_concurrency=self.default_concurrency)
        """Can be replaced until the worker is started, except for the codec."""
        self._adapter = HandlerAdapter(self.settings.codec)
        self._handler: Any = None
        if handler is not None:
            self(handler)
        self._reset()
        self._session()  # checks the settings

    def _reset(self) -> None:
        """Initialize the state of a worker that has not been started."""
        self.started = False
        """Whether `start` was called."""
        self._stopping = False
        self._own_context: Context | None = None

    def __call__(self, handler: Decorated) -> Decorated:
        """Make `handler` this worker's handler, and return it unchanged: a worker is a decorator."""
        name = self.service.decode()
        if not callable(handler):
            raise SettingError(f"the handler of {name!r} is {handler!r:.100}: it must be a function of a request")
        if self._handler is not None:
            raise SettingError(
                f"the worker of {name!r} has the handler {name_of(self._handler)}: make another worker for "
                f"{name_of(handler)}"
            )
        if is_async(handler) is not self._asyncio:
            raise SettingError(f"the handler of {name!r} is {self._wrong_handler}")
        self._handler = handler
        return handler

    def copy(self, *, broker: str | Sequence[str] | None = None) -> Self:
        """Return a worker with the same handler and settings that has not been started.

            with worker.copy(broker=server.endpoints[0]):
                ...

        Args:
            broker: Replaces its own endpoint, or endpoints.

        Returns:
            The new worker.

        Raises:
            SettingError: An endpoint is invalid.
        """
        made = copy(self)
        if broker is not None:
            made.settings = self.settings.at(broker)
        made._reset()
        return made

    def _begin_start(self) -> Any:
        """Return the handler, unless the worker cannot be started."""
        if self.started:
            raise ClosedError("a worker can be started only once: use a copy()")
        if self._handler is None:
            raise SettingError(
                f"worker for {self.service.decode()!r} has no handler: pass one, or decorate it with the worker"
            )
        self.started = True
        self._pid = process.pid
        return self._handler

    def _session(self) -> WorkerSession:
        settings, controller = self.settings, None
        if settings.protocol == "X1":
            # What has a limit starts when the broker sends it, so nothing is sent ahead.
            controller = CreditController(settings.concurrency, prefetch=self._prefetch and not settings.limits)
        options = ready_options(settings.name, dialect=settings.dialect, about=settings.about, limits=settings.limits)
        return WorkerSession(self.service, settings, options=options, controller=controller)

    @property
    def registered(self) -> bool:
        """Whether the broker has answered, and so knows this worker: at the latest a heartbeat interval after READY."""
        return bool(self._connections) and all(connection.registered for connection in self._connections)

    @property
    def served(self) -> int:
        """How many requests have ended."""
        return sum(connection.served for connection in self._connections)

    @property
    def requests(self) -> list[Request]:
        """The requests that it holds: those in progress, and those that have not started."""
        return [request for connection in self._connections for request in connection.requests]

    @property
    def _connection_count(self) -> int:
        if self.settings.protocol == "X1":
            return 1
        return self.settings.concurrency  # a connection holds one request at a time

    def _open_context(self) -> Context:
        """Return the ZeroMQ context for the sockets: the caller's, or else this worker's own."""
        if self.settings.context is not None:
            return self.settings.context
        # Its own, because only terminating a context waits until the last messages are out.
        self._own_context = self._own_context or own_context()
        return self._own_context

    def _end_context(self) -> None:
        context, self._own_context = self._own_context, None
        if context is not None:
            end(context)
