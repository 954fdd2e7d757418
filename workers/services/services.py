"""`Services`: functions with types, declared as services."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack, overload

from ...mdp.errors import SettingError
from ...mdp.program.arguments import check_known, name_of
from ..settings import WorkerArguments
from .lifespan import checked_lifespan
from .offered import AnyOffered, Lifespan, Middleware, OfferedService, OfferedStreaming, ServiceGroup, ServiceSettings
from .signature import signature_of
from .worker import ServicesWorker

if TYPE_CHECKING:
    from .test_client import TestClient

I = TypeVar("I")  # noqa: E741 - in and out
O = TypeVar("O")  # noqa: E741

DEFAULT_BATCH_WAIT = 0.005
"""Seconds."""


class Decorator(Protocol):
    """Makes a service of a function; the more specific overloads come first."""

    @overload
    def __call__(
        self, function: Callable[[I], Coroutine[Any, Any, O]], /
    ) -> OfferedService[I, O, Callable[[I], Coroutine[Any, Any, O]]]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # as above
        self, function: Callable[[I], AsyncIterator[O]], /
    ) -> OfferedStreaming[I, O, Callable[[I], AsyncIterator[O]]]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # as above
        self, function: Callable[[I], Iterator[O]], /
    ) -> OfferedStreaming[I, O, Callable[[I], Iterator[O]]]: ...
    @overload
    def __call__(self, function: Callable[[I], O], /) -> OfferedService[I, O, Callable[[I], O]]: ...
    @overload
    def __call__(
        self, function: Callable[[], Coroutine[Any, Any, O]], /
    ) -> OfferedService[None, O, Callable[[], Coroutine[Any, Any, O]]]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # as above
        self, function: Callable[[], AsyncIterator[O]], /
    ) -> OfferedStreaming[None, O, Callable[[], AsyncIterator[O]]]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # as above
        self, function: Callable[[], Iterator[O]], /
    ) -> OfferedStreaming[None, O, Callable[[], Iterator[O]]]: ...
    @overload
    def __call__(self, function: Callable[[], O], /) -> OfferedService[None, O, Callable[[], O]]: ...


class BatchDecorator(Protocol):
    """Makes a service, of one value and one reply, of a function that takes and returns lists."""

    @overload
    def __call__(
        self, function: Callable[[list[I]], Coroutine[Any, Any, list[O]]], /
    ) -> OfferedService[I, O, Callable[[list[I]], Coroutine[Any, Any, list[O]]]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[I]], list[O]], /
    ) -> OfferedService[I, O, Callable[[list[I]], list[O]]]: ...


class Services(ServiceGroup):
    """Functions that one program offers as services.

        services = Services()

        @services.service("images.resize")
        def resize(job: Resize) -> Size:
            return Size(...)

        if __name__ == "__main__":
            services.run()                              # or: mdworker images:services

        services.include(others)                        # offer the services of another `Services` too

    A request whose value does not fit the type is refused with 422 and never reaches the function.  A plain
    function runs in a thread, a coroutine function in the event loop.  A generator function's yields are sent as they
    come.  The decorated function can be called as before, and can be given to a client in place of the service's name.

    Args:
        prefix: Comes before the names of all its services.
        lifespan: Returns a context manager, sync or async, which is entered before the first request and left after the
            last one, in each process.  The mapping that it yields is `current_request().state`.
        middleware: Called around each request, the first outermost: see `zmdp.workers.services.handlers`.
        defaults: Settings of all services that do not have their own: see `ServiceSettings`.

    Raises:
        TypeError: There is no such setting.
    """

    def __init__(
        self,
        *,
        prefix: str = "",
        lifespan: Lifespan | None = None,
        middleware: Sequence[Middleware] = (),
        **defaults: Unpack[ServiceSettings],
    ) -> None:
        check_known("Services", defaults, ("prefix", "lifespan", "middleware", *ServiceSettings.__annotations__))
        super().__init__(prefix, checked_lifespan(lifespan), middleware)
        self._defaults = defaults

    @overload
    def service(
        self, name: str, *, batch: int, batch_wait: float = ..., **settings: Unpack[ServiceSettings]
    ) -> BatchDecorator: ...
    @overload
    def service(self, name: str, **settings: Unpack[ServiceSettings]) -> Decorator: ...
    def service(
        self,
        name: Any = None,
        *,
        batch: int | None = None,
        batch_wait: float = DEFAULT_BATCH_WAIT,
        **settings: Unpack[ServiceSettings],
    ) -> Any:
        """Declare the decorated function as the service `name`.

            @services.service("score", batch=32, batch_wait=0.005)
            def score(paths: list[str]) -> list[float]: ...

        The function takes one value or none.  Its annotations are the types; without them, it gets plain values.

        Args:
            name: The service's name, after the prefix.
            batch: The function gets a list of up to so many values, of different requests, and returns a list of as
                many replies; one that is an exception fails only its own request.
            batch_wait: Seconds that the first request of a batch waits for others.
            settings: See `ServiceSettings`.

        Returns:
            A decorator, which makes an `OfferedService` of a function, and an `OfferedStreaming` of a generator
            function.

        Raises:
            SettingError: The function or a setting is invalid, or the name was declared before.
            TypeError: There is no such setting.
        """
        if not isinstance(name, str):
            example = name_of(name).rpartition(".")[2] if callable(name) else "count"
            raise SettingError(f'a service has a name: write @services.service("{example}") above its function')
        check_known("a service", settings, ("name", "batch", "batch_wait", *ServiceSettings.__annotations__))

        def declare(function: Callable[..., Any]) -> AnyOffered:
            if not callable(function):
                raise SettingError(f"@services.service({name!r}) decorates {function!r:.100}: it needs a function")
            signature = signature_of(function, batch=batch is not None)
            kind = OfferedStreaming if signature.streaming else OfferedService
            given = (
                f"{self.prefix}{name}",
                function,
                signature,
                self,
                ServiceSettings(**{**self._defaults, **settings}),
            )
            try:
                offered: AnyOffered = kind(*given, None if batch is None else _checked_batch(batch, batch_wait))
            except SettingError as error:
                raise SettingError(f"{name_of(function)}: {error}") from None
            self._add(offered)
            return offered

        return declare

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def worker(
        self,
        *,
        broker: str | Sequence[str] | None = None,
        only: Sequence[str] = (),
        **arguments: Unpack[WorkerArguments],
    ) -> ServicesWorker:
        """Return a worker that offers the services, for use within an event loop.

            await services.worker(broker="tcp://10.0.0.1:5555").run()

        Args:
            broker: Endpoint of the broker, or several, as for `Worker`.
            only: The names of the services to offer; by default all.
            arguments: Those of `Worker`: `key`, `name` and so on.

        Returns:
            The worker, which has not been started.

        Raises:
            SettingError: A setting is invalid, or there is no such service.
        """
        return ServicesWorker(self, broker=broker, only=only, **arguments)

    def run(
        self,
        *,
        broker: str | Sequence[str] | None = None,
        only: Sequence[str] = (),
        **arguments: Unpack[WorkerArguments],
    ) -> None:
        """Offer the services until Ctrl-C; then finish the requests in progress.

            services.run(only=["images.resize"])

        Args:
            broker: Endpoint of the broker, or several, as for `Worker`.
            only: The names of the services to offer; by default all.
            arguments: Those of `Worker`: `key`, `name` and so on.

        Raises:
            SettingError: A setting is invalid, or there is no such service.
        """
        with suppress(KeyboardInterrupt):
            asyncio.run(self.worker(broker=broker, only=only, **arguments).run())

    def test_client(self) -> "TestClient":
        """Return a client that calls the services in this process, without a broker.

            with services.test_client() as client:
                assert client.call(resize, Resize("a.png", 80)) == Size(80, 60)

        Returns:
            The client, whose `with` block enters the lifespan.
        """
        from .test_client import TestClient  # noqa: PLC0415 - tests alone need it

        return TestClient(self)


def _checked_batch(size: int, wait: float) -> tuple[int, float]:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise SettingError(f"batch is {size!r}: it must be a whole number, 1 or more")
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait < 60:
        raise SettingError(f"batch_wait is {wait!r}: it must be a number of seconds from 0 to 60")
    return size, wait
