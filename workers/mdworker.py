"""The synchronous worker, which runs its handler in threads."""

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final, Self

from ..mdp.errors import ClosedError, RequestCancelled
from ..mdp.program import process
from ..mdp.program.loading import check_not_importing
from ..mdp.tracing import OPENTELEMETRY, current, handling
from .base import BaseWorker
from .handling import Frames, Last, Outcome, RequestContexts, end_forked, failed
from .session.request import Request
from .threaded import ThreadedConnection

Handler = Callable[[Request], Frames | Iterator[Frames]] | Callable[[Any], Any]
"""A function or a generator function of a request; with a codec, of a value."""

SIGNAL_SECONDS: Final = 1.0
"""How often a waiting thread looks for signals: one that comes just before a wait, or to another thread, does not
interrupt it."""

log = logging.getLogger("zmdp.worker")


class Worker(BaseWorker[Handler]):
    """Offers `service` through a broker.

    The `handler` gets a `Request`, a list of the body's frames.  A function's return value is sent as the FINAL.  A
    generator's yields are sent as PARTIALs, its return value as the FINAL.  Each is one frame (`bytes`), several (a
    list of `bytes`), or None for one empty frame.

        worker = Worker("echo", lambda request: request)
        worker.run()

    or, in a program that does something else meanwhile, `worker.start()`, and at its end `worker.stop()` and
    `worker.wait()`; or, with the worker as a decorator:

        worker = Worker("count")

        @worker
        def count(request):
            yield b"counting"
            return b"%d" % len(request[0])

    If a handler raises, the traceback is logged, and the client gets a `ServiceError` with the exception's type and
    text; the worker carries on.  A handler that raises `ServiceError` itself chooses the code and the text.

    Args:
        service: The name of the service.
        handler: The function; it can be set later, with the worker as a decorator.
        broker: Endpoint of the broker, or several in order of preference; by default those in `$MDP_BROKER`, or else
            tcp://127.0.0.1:5555.  Brokers with keys of their own are written as `ENDPOINT=KEY`.  The worker moves on
            when it loses a broker, or the broker drains.  With X1 it returns to the first once that is back, after the
            requests it holds.
        concurrency: Threads that run the handler (default 1), over one connection; with 0.2 and 0.1, over one
            connection each.
        heartbeat: Heartbeat interval in seconds.  It should be the broker's; if it is not, the worker adapts.
        liveness: Silent heartbeat intervals after which the broker is considered dead.
        handler_timeout: Seconds that a handler may neither return nor yield; then this is logged, and its request goes
            to another worker.  By default there is no limit.
        codec: `"json"`, `"msgpack"`, `"arrow"`, or an object with `encode` and `decode`: the handler gets a value and
            returns values, as in `Worker("sum", sum, codec="json")`, and `current_request()` returns the request.
        protocol: `"X1"`, or for third-party brokers `"0.2"` or `"0.1"`.
        name: Shown to operators; by default the program's name.
        about: What callers are told about the service (`Client.describe`), as a dict of JSON values of up to 32 kB:
            `{"version": "1.4", "description": "…"}` (X1).
        limit: How many requests of the service may run at once and how many may start in a time, at all of its workers
            together (X1; docs/how-to/limits.md).
        per_group: The same for each group of requests that callers name.
        dialect: Add an option `dialect` to the requests of MDP/0.1 and 0.2 clients (X1).
        key: The secret certificate file of this worker's key, for brokers that require one (docs/how-to/security.md);
            by default `$MDP_KEY`.
        broker_key: The broker's public key, which `key` needs: a certificate file, or 40 characters of Z85; by default
            `$MDP_BROKER_KEY`.
        context: ZeroMQ context to use, needed for `inproc://` endpoints.

    Raises:
        SettingError: A setting is invalid.
        TypeError: There is no such setting.
    """

    _asyncio = False
    _prefetch = True
    _wrong_handler = "for asyncio: it needs an AsyncWorker"

    def _reset(self) -> None:
        super()._reset()
        self._connections: list[ThreadedConnection] = []
        self._changed = threading.Condition()
        self._expected: set[str] = set()
        """Names of the threads that have not begun."""
        self._running_threads = 0
        """Threads that have not ended."""
        self._current: Request | None = None

    # ── running the handler ──────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Serve until `stop` is called, from a signal handler or another thread, or until Ctrl-C.

        Requests in progress are finished; those that have not started are returned to the broker.
        """
        try:
            self.start()
            self.wait()
        except KeyboardInterrupt:  # perhaps while the threads were starting
            self.stop()
            self.wait()

    def start(self) -> None:
        """Serve in threads, and return immediately.  Call `stop` and `wait` afterwards, or use a `with` block.

            with worker:
                client.request("echo", b"hello")

        Raises:
            SettingError: There is no handler.
            ClosedError: The worker was started before.
        """
        check_not_importing()
        handler = self._begin_start()
        contexts = RequestContexts()
        try:
            for number in range(self._connection_count):
                self._open(number)
            for number in range(self.settings.concurrency):
                connection = self._connections[number % self._connection_count]
                self._start(f"{self.service.decode()}-{number}", self._serve, connection, handler, contexts)
        except BaseException:
            self._give_up_start()
            raise

    def stop(self) -> None:
        """Take no more requests.

            worker.stop()

        `run` and `wait` return when those in progress are finished.
        """
        self._stopping = True
        for connection in self._connections:
            connection.stop()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all threads have ended.

            worker.stop()
            ended = worker.wait(timeout=10)

        Args:
            timeout: Seconds to wait; None waits forever.

        Returns:
            Whether they have ended.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        # Not Thread.join(): after Ctrl-C interrupts that, it considers the thread ended.
        with self._changed:
            while self._running_threads:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, SIGNAL_SECONDS))
        self._end()
        return True

    def turning(self) -> bool:
        """Ask the worker's connections for a sign of life, for a watchdog that restarts a program that hangs.

            if worker.turning():
                tell_watchdog()

        Call it at intervals of some seconds.  Handlers do not matter, however long they take.

        Returns:
            Whether each connection has given the sign that the previous call asked for; True for the first call.
        """
        # Each is asked, even if another has not answered.
        return False not in [connection.turning() for connection in self._connections]

    def __enter__(self) -> Self:
        if self._handler is not None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.wait()

    def _serve(self, connection: ThreadedConnection, handler: Handler, contexts: RequestContexts) -> None:
        request = connection.receive()
        while request is not None:
            following = None
            try:
                following = contexts.new().run(self._handle, connection, handler, request)
            except Exception as error:  # noqa: BLE001 - an error in our own code: the caller gets it
                connection.fail(request, error)
            request = following  # the body of the last one may be large, and the next one be long in coming
            if request is None:
                request = connection.receive()

    def _handle(self, connection: ThreadedConnection, handler: Handler, request: Request) -> Request | None:
        """Handle a request, in a context of its own.  Return the next one if it has arrived."""
        outcome: Outcome
        try:
            if OPENTELEMETRY in sys.modules:
                with handling(request):
                    outcome = self._reply(connection, handler, request)
            else:
                current.set(request)
                outcome = self._reply(connection, handler, request)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises, even SystemExit, the worker goes on
            if process.pid != self._pid:
                end_forked(request, error)
            outcome = failed(error, request)
        else:
            if process.pid != self._pid:
                end_forked(request)
        return connection.end(request, outcome)

    def _reply(self, connection: ThreadedConnection, handler: Handler, request: Request) -> list[bytes]:
        """Return the FINAL; what a generator yields before it is sent as PARTIALs."""
        result = handler(request if self._adapter.plain else self._adapter.argument(request))
        if hasattr(result, "__next__") and isinstance(result, Iterator):  # isinstance alone: 2 % of a request
            result = self._stream(connection, result, request)
        return self._adapter.frames(result)

    def _stream(self, connection: ThreadedConnection, parts: Iterator[Any], request: Request) -> Any:
        """Send what a generator yields as PARTIALs.  Return its return value, or the `Last` that it yields."""
        try:
            while True:
                try:
                    part = next(parts)
                except StopIteration as end:
                    return end.value
                if isinstance(part, Last):
                    return part
                if request.cancelled or not connection.partial(request, self._adapter.frames(part)):
                    raise RequestCancelled("the client no longer wants the stream")
        finally:
            if isinstance(parts, Generator):
                parts.close()

    # ── the Guide's loop ─────────────────────────────────────────────────────────────────────────────────────────────

    def recv(self, reply: Frames = None, *, timeout: float | None = None) -> Request | None:
        """Send `reply` as the FINAL of the last request, and wait for the next, in the style of the ZeroMQ Guide.

            with Worker("echo") as worker:
                reply = None
                while (request := worker.recv(reply)) is not None:
                    reply = request

        Heartbeats continue between calls.

        Args:
            reply: The reply to the last request; the first call ignores it.
            timeout: Seconds to wait; None waits forever.

        Returns:
            The next request, or None after `timeout` seconds (the reply was sent all the same), or once `stop` was
            called.

        Raises:
            ClosedError: The worker has a handler.
            HandlerError: The reply cannot be sent.
        """
        if self._handler is not None:
            raise ClosedError("this worker has a handler: use run(), or make a worker without one")
        if not self._connections:
            try:
                self._open(0)
            except BaseException:
                self._give_up_start()
                raise
        (connection,) = self._connections
        request = None
        if self._current is not None:
            request = connection.end(self._current, self._adapter.frames(reply))
            self._current = request
        if request is None:
            request = connection.receive(math.inf if timeout is None else time.monotonic() + timeout)
        self._current = request
        return request

    def send_partial(self, part: Frames) -> bool:
        """Send a PARTIAL of the request that `recv` returned.

            worker.send_partial(b"half of it")

        Args:
            part: One frame, several, or None for an empty one.

        Returns:
            False if the request was lost.

        Raises:
            ClosedError: There is no request to reply to.
            HandlerError: The part cannot be sent.
        """
        if self._current is None or not self._connections:
            raise ClosedError("there is no request to reply to: call recv() first")
        return self._connections[0].partial(self._current, self._adapter.frames(part))

    def close(self) -> None:
        """Disconnect from the broker.

            worker.close()

        A request that has no reply yet goes to another worker.
        """
        self.stop()
        if self._handler is None:
            for connection in self._connections:
                for request in connection.requests:  # of which Ctrl-C may have kept `recv` from returning one
                    connection.abandon(request)
            self.wait()

    def _end(self) -> None:
        """Release everything after the threads have ended, and wait until the last messages are out."""
        for connection in self._connections:
            connection.close_descriptors()
        self._end_context()

    # ── connections and threads ──────────────────────────────────────────────────────────────────────────────────────

    def _open(self, number: int) -> None:
        """Open a connection, and start its I/O thread."""
        connection = self._connect(number)
        self._connections.append(connection)
        if self._stopping:
            connection.stop()
        self._start(f"{self.service.decode()}-io-{number}", connection.watch)

    def _connect(self, number: int) -> ThreadedConnection:
        level = logging.DEBUG if number else logging.WARNING  # connections are mostly lost together: warn once
        return ThreadedConnection(self._session(), self._open_context(), self.settings.keys, level)

    def _start(self, name: str, run: Callable[..., None], *arguments: Any) -> None:
        with self._changed:
            self._expected.add(name)
            self._running_threads += 1
        thread = threading.Thread(target=self._run, args=(name, run, *arguments), name=name, daemon=True)
        thread.start()

    def _run(self, name: str, run: Callable[..., None], *arguments: Any) -> None:
        with self._changed:
            if name not in self._expected:
                return  # starting it was interrupted
            self._expected.discard(name)
        try:
            run(*arguments)
        finally:
            with self._changed:
                self._running_threads -= 1
                self._changed.notify_all()

    def _give_up_start(self) -> None:
        """Stop all threads after some could not be started, or after Ctrl-C."""
        self.stop()
        with self._changed:  # a thread whose start was interrupted may still begin: it ends if it is not expected
            self._running_threads -= len(self._expected)
            self._expected.clear()
        for connection in self._connections:
            if not connection.watched:
                connection.abort()
        if not self._running_threads:
            self._end()
