"""The synchronous worker: a handler behind a service."""

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq

from ..mdp import wire
from ..mdp.codecs import Codec
from ..mdp.errors import ClosedError, RequestCancelled, SettingError
from ..mdp.server import DEFAULT_ENDPOINT
from ..mdp.sockets import checked_endpoint, end, own_context
from .connection import Connection
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

    `concurrency` is the number of connections, each with a thread of its own and one request at a time.  `heartbeat`
    (seconds) and `liveness` (intervals) should be the broker's; where they differ, the worker adapts.  A handler that
    has neither returned nor yielded for `handler_timeout` seconds (default: no limit) is reported in the log, and its
    request goes to another worker.  A handler that raises does not end the worker: the traceback is logged, and the
    client gets exception type and text as `ServiceError`; a handler that raises `ServiceError` itself chooses both.

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
        self._context = context
        self._own_context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._connections: list[Connection] = []
        self._threads: list[threading.Thread] = []
        self._serving = 0
        """Connections whose threads have not ended."""
        self._unserved: dict[Connection, None] = {}
        """Those whose threads have not begun."""
        self._changed = threading.Condition()
        self._heart: threading.Thread | None = None
        self._ended = threading.Event()
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

        What is worked on is finished, then the broker is told with DISCONNECT.
        """
        try:
            self.start()
            self.wait()
        except KeyboardInterrupt:  # perhaps while the threads were started
            self.stop()
            self.wait()

    def start(self) -> None:
        """Serve in threads, and return at once.  To be followed by `stop` and `wait`, or use a `with` block."""
        if self._connections:
            raise ClosedError("this worker is running, or has run: make another")
        if self._handler is None:
            raise SettingError(
                f"worker for {self.service.decode()!r} has no handler: pass one, or decorate it with the worker"
            )
        try:
            for _ in range(self.concurrency):
                self._connect()
            self._unserved, self._serving = dict.fromkeys(self._connections), len(self._connections)
            for number, connection in enumerate(self._connections):
                name = f"{self.service.decode()}-{number}"
                thread = threading.Thread(target=self._serve, args=(connection, self._handler), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        except BaseException:
            with self._changed:  # a thread whose start was interrupted may come yet: it finds nothing to serve
                unserved, self._unserved = self._unserved, {}
                self._serving -= len(unserved)
            for connection in unserved:
                connection.close()
            if not self._serving:
                self.close()
            raise

    @property
    def started(self) -> bool:
        """Whether it serves, or has served."""
        return bool(self._connections)

    def stop(self) -> None:
        """Take no more requests; `run` and `wait` return when those that are worked on are finished."""
        self._stopping = True
        for connection in self._connections:
            connection.stop()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all has ended after `stop`, for at most `timeout` seconds.  Whether it has."""
        # Not Thread.join(): one that Ctrl-C interrupts takes the thread for ended.
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
        if self._threads:
            self.stop()
            self.wait()
        else:
            self.close()

    def _serve(self, connection: Connection, handler: Handler) -> None:
        with self._changed:
            if connection not in self._unserved:
                return  # it has been closed
            del self._unserved[connection]
        try:
            while (request := connection.receive()) is not None:
                self._handle(connection, handler, request)
        except zmq.ContextTerminated:
            log.warning("%s: the ZeroMQ context was terminated", self.service.decode())
        finally:
            with suppress(zmq.ContextTerminated):
                connection.close()
            with self._changed:
                self._serving -= 1
                self._changed.notify_all()

    def _handle(self, connection: Connection, handler: Handler, request: Request) -> None:
        try:
            with handling(request):
                result = handler(self._handling.argument(request))
                if isinstance(result, Iterator):
                    result = self._stream(connection, result, request)
                body = self._handling.frames(result)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises, SystemExit too, the worker goes on
            sent = connection.error(request, *failed(error, request))
        else:
            sent = connection.final(request, body)
        if not sent:
            log.warning("%s: a reply came too late: the connection was lost meanwhile", request.service)

    def _stream(self, connection: Connection, parts: Iterator[Any], request: Request) -> Any:
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
            if request.cancelled or not connection.partial(request, self._handling.frames(part)):
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
        if not self._connections:
            self._connect()
        (connection,) = self._connections
        if self._current is not None:
            connection.final(self._current, self._handling.frames(reply))
        self._current = connection.receive(None if timeout is None else time.monotonic() + timeout)
        return self._current

    def send_partial(self, part: Frames) -> bool:
        """In the Guide's loop: send a PARTIAL of the request that `recv` gave.  False if the request was lost."""
        if self._current is None or not self._connections:
            raise ClosedError("there is no request to reply to: call recv() first")
        return self._connections[0].partial(self._current, self._handling.frames(part))

    def close(self) -> None:
        """End the Guide's loop: DISCONNECT and close.  Harmless when repeated."""
        self.stop()
        if not self._threads and not self._ended.is_set():
            for connection in self._connections:
                connection.close()
            self._end()

    def _end(self) -> None:
        """The connections are closed: end the heart, and have the last messages get out."""
        self._ended.set()
        if self._heart is not None:
            self._heart.join()
        if self._own_context is not None:
            end(self._own_context)
            self._own_context = None

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _session(self) -> WorkerSession:
        return WorkerSession(
            self.service, protocol=self.protocol, heartbeat=self.heartbeat, liveness=self.liveness
        )  # fmt: skip

    def _connect(self) -> Connection:
        context = self._context
        if context is None:
            # Its own, which can be terminated at the end: only that waits until the last messages are out.
            context = self._own_context = self._own_context or own_context()
        connection = Connection(self._session(), checked_endpoint(self.broker), context, self.handler_timeout)
        self._connections.append(connection)
        if self._stopping:
            connection.stop()
        if self._heart is None:
            self._heart = threading.Thread(target=self._beat, name=f"{self.service.decode()}-heart", daemon=True)
            self._heart.start()
        return connection

    def _beat(self) -> None:
        """Keep the connections whose handlers run alive (C13)."""
        wait = 0.0
        while not self._ended.wait(wait):
            wait = min(self._beat_one(connection) for connection in self._connections)

    def _beat_one(self, connection: Connection) -> float:
        try:
            return connection.beat(time.monotonic())
        except zmq.ContextTerminated:
            return self.heartbeat
        except Exception:  # whatever is wrong with one connection, the others must be kept alive
            log.exception("%s: a heartbeat failed", self.service.decode())
            return self.heartbeat
