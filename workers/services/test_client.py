"""`TestClient`: calls services in this process, without a broker."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextvars import Context, copy_context
from typing import Any, Self, TypeVar, overload

from ...mdp import wire
from ...mdp.codes import Code, request_error
from ...mdp.errors import ClosedError, ServiceNotFound, ZmdpError
from ...mdp.services import BaseService, Service, Streaming
from ...mdp.tracing import handling
from ..handling import Failed, Last, RequestContexts, failed
from ..session.request import Request
from .handlers import handler_of
from .lifespan import Lifespans
from .offered import AnyOffered, ServiceGroup

I = TypeVar("I")  # noqa: E741 - in and out
O = TypeVar("O")  # noqa: E741
Part = tuple[list[bytes], bool]
"""The frames of a part, and whether it is the FINAL."""
CLIENT = b"test"
"""The client's address, as handlers see it."""


class TestClient:
    """Calls the services of a `Services` as a `Client` does, with the same validation, middleware and lifespan.

        def test_resize():
            with services.test_client() as client:
                assert client.call(resize, Resize("a.png", 80)) == Size(80, 60)

    Errors are those of `Client`: what a function raises becomes a `ServiceError`.  Plain functions run in the calling
    thread, coroutine functions in an event loop of the client's, each call in a context of its own, as in a worker.

    Args:
        services: The services to call.
    """

    __test__ = False  # it is no test case, whatever pytest thinks of its name

    def __init__(self, services: ServiceGroup) -> None:
        self._lifespans = Lifespans(services)
        self._offered: dict[str, AnyOffered] = {each.name: each for each in services}
        self._handlers = {
            each.name: handler_of(each, self._lifespans.state(each.group)) for each in self._offered.values()
        }
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="zmdp-test-client", daemon=True)
        self._context = copy_context()
        """That of the lifespan."""

    def __enter__(self) -> Self:
        self._thread.start()
        self._context = copy_context()
        try:
            self._wait(self._lifespans.enter(), self._context)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._wait(self._lifespans.leave(), self._context)
        finally:
            self._end()

    @overload
    def call(self, service: Service[None, O], *, headers: Mapping[str, str] | None = ...) -> O: ...
    @overload
    def call(self, service: Service[I, O], value: I, *, headers: Mapping[str, str] | None = ...) -> O: ...
    @overload
    def call(self, service: str, value: Any = ..., *, headers: Mapping[str, str] | None = ...) -> Any: ...
    def call(
        self, service: Service[Any, Any] | str, value: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Call a service with a value and return the value it replies with.

        Args:
            service: The service, or its name.
            value: What it is called with.
            headers: Seen by handler and middleware.

        Returns:
            The value of the reply.

        Raises:
            RequestError: As from `Client.call`: what the function raises becomes a `ServiceError`.
            ClosedError: The function is a coroutine function, and the client's `with` block has not begun or has ended.
        """
        *_, last = self._replies(service, value, headers)
        return last

    @overload
    def stream(self, service: Streaming[None, O], *, headers: Mapping[str, str] | None = ...) -> Iterator[O]: ...
    @overload
    def stream(self, service: Streaming[I, O], value: I, *, headers: Mapping[str, str] | None = ...) -> Iterator[O]: ...
    @overload
    def stream(self, service: str, value: Any = ..., *, headers: Mapping[str, str] | None = ...) -> Iterator[Any]: ...
    def stream(
        self, service: Streaming[Any, Any] | str, value: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> Iterator[Any]:
        """Call a service with a value and yield each value as it comes.

            names = list(client.stream(find, "cat"))

        Args:
            service: The service, or its name.
            value: What it is called with.
            headers: Seen by handler and middleware.

        Yields:
            Each value.

        Raises:
            RequestError: As from `Client.stream`.
            ClosedError: As from `call`.
        """
        return self._replies(service, value, headers)

    def map(self, service: Service[I, O], values: Iterable[I]) -> Iterator[O | ZmdpError]:
        """Call a service for each value, and yield the replies in the same order.

            sizes = list(client.map(resize, [Resize("a.png", 80)] * 3))

        Args:
            service: The service.
            values: What it is called with.

        Yields:
            Each reply; an error is yielded, not raised.
        """
        for value in values:
            try:
                reply: O = self.call(service, value)
                yield reply
            except ZmdpError as error:
                yield error

    def submit(self, service: Service[I, O], value: I) -> "Future[O]":
        """Call a service and return the future of its reply, which is done: nothing runs in the background.

            size = client.submit(resize, Resize("a.png", 80)).result()

        Args:
            service: The service.
            value: What it is called with.

        Returns:
            The future of the reply, or of its error.
        """
        future: Future[O] = Future()
        try:
            future.set_result(self.call(service, value))
        except Exception as error:  # noqa: BLE001 - as a future of Client has it
            future.set_exception(error)
        return future

    # ── one call ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _replies(
        self, service: BaseService[Any, Any] | str, value: Any, headers: Mapping[str, str] | None
    ) -> Generator[Any, None, None]:
        """Yield the value of each part of a reply, and that of its end if it has one."""
        name = service if isinstance(service, str) else service.name
        offered = self._offered.get(name)
        if offered is None:
            there = f"there are {', '.join(self._offered)}"
            raise ServiceNotFound(f"service {name!r}: not declared here; {there}", service=name, code=Code.NO_WORKER)
        known = offered if isinstance(service, str) else service
        options = wire.encode_options({"headers": dict(headers)}) if headers else b""
        request = Request(
            known.request.encode(value), service=name, client=CLIENT, options=wire.Options(options), attempt=1
        )
        context = RequestContexts(self._context).new()
        parts = self._async_parts(request, context) if offered.runs_async else self._parts(request, context)
        for frames, final in parts:
            if not (final and isinstance(known, Streaming) and known.ends(frames)):
                yield known.decode_reply(frames)

    def _parts(self, request: Request, context: Context) -> Generator[Part, None, None]:
        """Yield what a plain function replies."""
        try:
            result = context.run(_called, self._handlers[request.service], request)
            final = isinstance(result, list)
            if final:
                yield result, True
            while not final:
                part, final = context.run(_next_part, request, result)
                yield part, final
        except BaseException as error:
            raise _as_client_sees(error, request) from error

    def _async_parts(self, request: Request, context: Context) -> Generator[Part, None, None]:
        """Yield what a coroutine function replies, which runs in the event loop."""
        if not self._thread.is_alive():
            raise ClosedError("coroutine functions run only within the test client's `with` block")
        result = context.run(_called, self._handlers[request.service], request)
        try:
            while hasattr(result, "__anext__"):
                part = self._wait(_within(request, result.__anext__()), context)
                if isinstance(part, Last):
                    yield part.value, True
                    return
                yield part, False
            yield self._wait(_within(request, result), context), True
        except BaseException as error:
            raise _as_client_sees(error, request) from error
        finally:
            if hasattr(result, "aclose") and self._thread.is_alive():
                self._wait(_within(request, result.aclose()), context)

    def _wait(self, work: Coroutine[Any, Any, Any], context: Context) -> Any:
        async def run() -> Any:
            return await self._loop.create_task(work, context=context)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _called(handler: Callable[[Request], Any], request: Request) -> Any:
    with handling(request):
        return handler(request)


def _next_part(request: Request, parts: Generator[list[bytes], None, list[bytes]]) -> Part:
    """Return the next part of a stream.  Between two parts, `request` is not the current one."""
    with handling(request):
        try:
            return next(parts), False
        except StopIteration as end:
            return end.value, True


async def _within(request: Request, work: Any) -> Any:
    with handling(request):
        return await work


def _as_client_sees(error: BaseException, request: Request) -> BaseException:
    """Return the exception that a client gets for one that a handler raised."""
    if isinstance(error, GeneratorExit | KeyboardInterrupt):
        return error
    outcome: Failed = failed(error, request)
    return request_error(request.service, outcome.code, outcome.text, outcome.detail[0] if outcome.detail else None)
