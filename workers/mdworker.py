"""The synchronous worker: a handler behind a service."""

import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq

from ..mdp import wire
from ..mdp.codecs import Codec
from ..mdp.defaults import DEFAULT_ENDPOINT
from ..mdp.errors import ClosedError, RequestCancelled, SettingError
from ..mdp.transport.sockets import checked_endpoint, end, own_context
from .capacity import Capacity
from .connection import ready_options
from .crew import Crew
from .handling import Final, Frames, Handling, check_settings, failed, handling, is_async
from .request import Request
from .session import WorkerSession

Handler = Callable[[Request], Frames | Iterator[Frames]] | Callable[[Any], Any]
"""A function or a generator function of a request; with a codec, of a value."""
H = TypeVar("H", bound=Handler)

log = logging.getLogger("zmdp.worker")


class Worker:
    """Offers `service` through a broker.

    The `handler` gets a `Request`, the list of the body's frames.  What a function returns is the FINAL; what a
    generator yields are PARTIALs, and what it returns is the FINAL.  Each is one frame (`bytes`), several (a list of
    `bytes`), or None for an empty one.

        worker = Worker("echo", lambda request: request)
        worker.run()

    or, with the class as a decorator of the handler:

        worker = Worker("count")

        @worker
        def count(request):
            yield b"counting"
            return b"%d" % len(request[0])

    `concurrency` is the number of threads that run the handler, over one connection (before X1 each over its own).
    `heartbeat` (seconds) and `liveness` (intervals) should be the broker's; where they differ, the worker adapts.  A
    handler that has neither returned nor yielded for `handler_timeout` seconds (default: no limit) is reported in the
    log, and its request goes to another worker.  A handler that raises does not end the worker: the traceback is
    logged, and the client gets the exception's type and text as `ServiceError`; a handler that raises `ServiceError`
    itself chooses both.  `name` is what operators see (default: the program's name).

    With a `codec` (`"json"`, `"msgpack"`, `"arrow"`, or an object with `encode` and `decode`) the handler gets a value
    and gives values, and `current_request()` has the rest:

        worker = Worker("sum", sum, codec="json")

    `protocol` is `"X1"`; or, for brokers that do not speak that, `"0.2"` or `"0.1"`.

    Raises `SettingError` for a setting out of range.
    """

    def __init__(
        self,
        service: str | bytes,
        handler: Handler | None = None,
        *,
        broker: str = DEFAULT_ENDPOINT,
        concurrency: int = 1,
        heartbeat: float = 1.0,
        liveness: int = 5,
        handler_timeout: float | None = None,
        codec: str | Codec | None = None,
        protocol: str = "X1",
        name: str = "",
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        check_settings(concurrency, handler_timeout)
        self.service = wire.service_name(service)
        self.broker = checked_endpoint(broker)
        self.concurrency = concurrency
        self.heartbeat = heartbeat
        self.liveness = liveness
        self.handler_timeout = handler_timeout
        self._handling = Handling(codec)
        self._handler: Handler | None = None
        if handler is not None:
            self(handler)
        self.protocol = protocol
        self.name = name
        self._context = context
        self._own_context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._crews: list[Crew] = []
        self._changed = threading.Condition()
        self._expected: set[str] = set()
        """Threads that have not begun, by name."""
        self._serving = 0
        """Threads that have not ended."""
        self._stopping = False
        self._current: Request | None = None
        self._session()  # checks the settings

    def __call__(self, handler: H) -> H:
        """Make `handler` this worker's handler; returns it unchanged."""
        if is_async(handler):
            raise SettingError(f"the handler of {self.service.decode()!r} is for asyncio: it takes an AsyncWorker")
        self._handler = handler
        return handler

    # ── running the handler ──────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Serve until `stop` is called, from a signal handler or another thread; Ctrl-C stops as well.

        Requests that have begun are finished; those that have not are returned to the broker.
        """
        try:
            self.start()
            self.wait()
        except KeyboardInterrupt:  # perhaps while the threads were started
            self.stop()
            self.wait()

    def start(self) -> None:
        """Serve in threads, and return at once.  Call `stop` and `wait` afterwards, or use a `with` block."""
        if self._crews:
            raise ClosedError("this worker is running, or has run: make another")
        if self._handler is None:
            raise SettingError(
                f"worker for {self.service.decode()!r} has no handler: pass one, or decorate it with the worker"
            )
        crews = 1 if self.protocol == "X1" else self.concurrency
        try:
            for number in range(crews):
                self._open(number)
            for number in range(self.concurrency):
                self._start(
                    f"{self.service.decode()}-{number}", self._serve, self._crews[number % crews], self._handler
                )
        except BaseException:
            self._give_up_start()
            raise

    @property
    def started(self) -> bool:
        """Whether it serves, or has served."""
        return bool(self._crews)

    def stop(self) -> None:
        """Take no more requests; `run` and `wait` return when those that have begun are finished."""
        self._stopping = True
        for crew in self._crews:
            crew.stop()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all threads have ended after `stop`, for at most `timeout` seconds.  Returns whether they have."""
        # Not Thread.join(): if Ctrl-C interrupts it, it considers the thread ended.
        with self._changed:
            if not self._changed.wait_for(lambda: not self._serving, timeout):
                return False
        self._end()
        return True

    def __enter__(self) -> Self:
        if self._handler is not None:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self.wait()

    def _serve(self, crew: Crew, handler: Handler) -> None:
        while (request := crew.receive()) is not None:
            self._handle(crew, handler, request)

    def _handle(self, crew: Crew, handler: Handler, request: Request) -> None:
        try:
            with handling(request):
                result = handler(self._handling.argument(request))
                if isinstance(result, Iterator):
                    result = self._stream(crew, result, request)
                body = self._handling.frames(result)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises, SystemExit too, the worker goes on
            crew.end(request, failed(error, request))
        else:
            crew.end(request, body)

    def _stream(self, crew: Crew, parts: Iterator[Any], request: Request) -> Any:
        """Send what a generator yields as PARTIALs; returns what it returns, or yields as `Final`."""
        close = parts.close if isinstance(parts, Generator) else lambda: None
        while True:
            try:
                part = next(parts)
            except StopIteration as end:
                return end.value
            if isinstance(part, Final):
                close()
                return part
            if request.cancelled or not crew.partial(request, self._handling.frames(part)):
                close()
                raise RequestCancelled("nobody waits for the rest of the stream")

    # ── the Guide's loop ─────────────────────────────────────────────────────────────────────────────────────────────

    def recv(self, reply: Frames = None, *, timeout: float | None = None) -> Request | None:
        """The Guide's loop: send `reply` as the FINAL of the last request, and wait for the next.

            with Worker("echo") as worker:
                reply = None
                while (request := worker.recv(reply)) is not None:
                    reply = request

        `reply` is not looked at the first time.  Heartbeats go on between two calls.  Returns None after `timeout`
        seconds (then `reply` was sent), or once `stop` was called.
        """
        if self._handler is not None:
            raise ClosedError("this worker has a handler: use run(), or make a worker without one")
        if not self._crews:
            self._open(0)
        (crew,) = self._crews
        if self._current is not None:
            crew.end(self._current, self._handling.frames(reply))
        self._current = crew.receive(math.inf if timeout is None else time.monotonic() + timeout)
        return self._current

    def send_partial(self, part: Frames) -> bool:
        """In the Guide's loop: send a PARTIAL of the request that `recv` gave.  False if the request was lost."""
        if self._current is None or not self._crews:
            raise ClosedError("there is no request to reply to: call recv() first")
        return self._crews[0].partial(self._current, self._handling.frames(part))

    def close(self) -> None:
        """End the Guide's loop: DISCONNECT and close.  A request without a reply goes to another worker."""
        self.stop()
        if self._handler is None:
            if self._current is not None:
                self._crews[0].abandon(self._current)
            self.wait()

    def _end(self) -> None:
        """All threads have ended: have the last messages get out."""
        for crew in self._crews:
            crew.dispose()
        if self._own_context is not None:
            end(self._own_context)
            self._own_context = None

    # ── connections and threads ──────────────────────────────────────────────────────────────────────────────────────

    def _session(self) -> WorkerSession:
        return WorkerSession(
            self.service, protocol=self.protocol, heartbeat=self.heartbeat, liveness=self.liveness,
            capacity=Capacity(self.concurrency, prefetch=True) if self.protocol == "X1" else None,
            handler_timeout=self.handler_timeout, options=ready_options(self.name),
        )  # fmt: skip

    def _open(self, number: int) -> None:
        """Open a connection, and start its I/O thread."""
        context = self._context
        if context is None:
            # Its own, which can be terminated at the end: only that waits until the last messages are out.
            context = self._own_context = self._own_context or own_context()
        level = logging.DEBUG if number else logging.WARNING  # they are mostly lost together, and one warning is enough
        crew = Crew(self._session(), checked_endpoint(self.broker), context, level)
        self._crews.append(crew)
        if self._stopping:
            crew.stop()
        self._start(f"{self.service.decode()}-io-{number}", crew.watch)

    def _start(self, name: str, run: Callable[..., None], *arguments: Any) -> None:
        with self._changed:
            self._expected.add(name)
            self._serving += 1
        thread = threading.Thread(target=self._run, args=(name, run, *arguments), name=name, daemon=True)
        thread.start()

    def _run(self, name: str, run: Callable[..., None], *arguments: Any) -> None:
        with self._changed:
            if name not in self._expected:
                return  # its start was interrupted
            self._expected.discard(name)
        try:
            run(*arguments)
        finally:
            with self._changed:
                self._serving -= 1
                self._changed.notify_all()

    def _give_up_start(self) -> None:
        """Some threads could not be started, or Ctrl-C came meanwhile: end the others."""
        self.stop()
        with self._changed:  # a thread whose start was interrupted may come yet: it finds that it is not expected
            self._serving -= len(self._expected)
            self._expected.clear()
        for crew in self._crews:
            if not crew.watched:
                crew.abort()
        if not self._serving:
            self._end()
