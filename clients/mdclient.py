"""The synchronous client."""

import os
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, Self

import zmq

from ..mdp import tracing, wire
from ..mdp.codecs import Codec, Coder
from ..mdp.defaults import DEFAULT_ENDPOINT
from ..mdp.errors import ClosedError, SettingError, ZmdpError
from ..mdp.transport.sockets import end, own_context
from .arguments import (
    DEFAULT_RETRIES,
    DEFAULT_TIMEOUT,
    check_plain,
    checked_body,
    checked_endpoints,
    checked_most,
    checked_protocol,
    checked_retries,
    checked_timeout,
)
from .lazypirate import LazyPirate
from .numbered import Numbered
from .reply import Reply

MAX_OUTSTANDING: Final = 10_000


class Client:
    """Calls services through a broker.

    `broker` is an endpoint or several; each time the connection is lost the next is tried.  `timeout` (seconds) and
    `retries` say how long to wait: for `timeout × (1 + retries)` in all.  `codec` is what `call` uses.  `heartbeat`
    (seconds) and `liveness` (intervals) say how soon a silent broker is left, while a request is outstanding; what is
    outstanding is then sent again, so a service may see a request more than once.  At most `max_outstanding` requests
    are; more wait for a place.  `context` is the ZeroMQ context, needed only for `inproc://` endpoints.

        with Client("tcp://127.0.0.1:5555") as client:
            client.request("echo", b"hello")                        # [b'hello']
            client.call("sum", [1, 2, 3])                           # 6
            futures = [client.submit("echo", b"%d" % n) for n in range(100)]

    Any number of threads may use one client.  Everything raised is in `zmdp.mdp.errors`.

    `protocol` is `"X1"` (docs/x1.md), or for brokers that do not speak that, `"0.2"` or `"0.1"`: then there is one
    request at a time, from one thread; `timeout` is the silence after which it is sent again on a new connection,
    `retries` times (C4, C5); there are no headers, no options, no `submit`, and silence may be the only sign of a
    failure.  With `envelope`, a 0.2 client works behind a ROUTER–DEALER proxy (X1 and 0.1 always do): its messages
    begin with an empty frame.
    """

    def __init__(
        self,
        broker: str | Sequence[str] = DEFAULT_ENDPOINT,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int = DEFAULT_RETRIES,
        protocol: str = "X1",
        envelope: bool = False,
        codec: str | Codec = "json",
        heartbeat: float = 1.0,
        liveness: int = 5,
        max_outstanding: int = MAX_OUTSTANDING,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        endpoints = checked_endpoints(broker)
        self.protocol = checked_protocol(protocol)
        self._timeout = checked_timeout(timeout)
        self._retries = checked_retries(retries)
        self._coder = Coder(codec)
        self._closed = False
        self._process = os.getpid()
        self._own_context = context is None
        self._context = own_context() if context is None else context
        self._dialog: Numbered | LazyPirate
        try:
            if protocol == "X1":
                self._dialog = Numbered(
                    endpoints,
                    self._context,
                    heartbeat=heartbeat,
                    liveness=liveness,
                    max_outstanding=checked_most(max_outstanding),
                )
            else:
                self._dialog = LazyPirate(
                    endpoints, self._context, protocol=protocol, envelope=envelope, linger=timeout
                )
        except BaseException:
            if self._own_context:
                end(self._context)
            raise

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def request(
        self,
        service: str | bytes,
        *frames: bytes,
        timeout: float | None = None,
        retries: int | None = None,
        wait: bool = True,
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Call `service` with `frames` (none: one empty frame) and return the frames of its reply.

        If the service streams, they are the frames of all PARTIALs, then those of the FINAL.  `timeout` and `retries`
        give the request's deadline, which travels with it as its ttl.  Without `wait` it fails at once if nobody offers
        the service.  `headers` reach the handler; `options` are the service's own (docs/x1.md).

        Raises `RequestTimeout` (a `TimeoutError`), `BrokerUnreachable`, `ServiceNotFound`, `ServiceError` if the
        handler failed, `RetryLater`, `WorkerLost`, `RequestRejected`, `SettingError` for arguments that cannot be sent.
        """
        name, body = wire.service_name(service), checked_body(frames)
        dialog = self._usable()
        if isinstance(dialog, LazyPirate):
            return dialog.request(name, body, **self._tries(timeout, retries, wait, headers, options))
        headers, finish = tracing.calling(name.decode(), headers)
        try:
            reply = dialog.request(
                name, body, self._patience(timeout, retries), wait=wait, headers=headers, options=options
            )
        except BaseException as error:
            finish(error)
            raise
        if finish is not tracing.untraced:
            finish(None)
        return reply

    def stream(
        self,
        service: str | bytes,
        *frames: bytes,
        timeout: float | None = None,
        retries: int | None = None,
        deadline: float | None = None,
        wait: bool = True,
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Generator[Reply, None, None]:
        """Call `service` and yield the frames of each PARTIAL as it comes, then those of the FINAL.

        The request is sent when the first part is asked for; leaving the loop early cancels it.  `timeout` and
        `retries` say how long nothing may come; `deadline` (seconds) is the time for the whole of it, as its ttl.  It
        is only sent again while no part has come.

        Raises `StreamInterrupted` for what goes wrong after a part, else as `request`.
        """
        name, body = wire.service_name(service), checked_body(frames)
        dialog = self._usable()
        if isinstance(dialog, LazyPirate):
            return dialog.stream(name, body, **self._tries(timeout, retries, wait, headers, options or deadline))
        silence = self._patience(timeout, retries)
        if deadline is not None:
            checked_timeout(deadline)
        settings = {"timeout": deadline, "silence": silence, "wait": wait, "options": options}
        return _traced(dialog, name, body, headers, settings)

    def call(
        self, service: str | bytes, value: Any = None, *, codec: str | Codec | None = None, **settings: Any
    ) -> Any:
        """Call `service` with a value and return the value it replies with.

        Both are encoded by `codec` (default: the client's, which is `json`), which the worker must use as well.  What
        the service streams before its FINAL is left out: see `call_stream`.  `settings` are those of `request`.

        Raises `CodecError` for what cannot be encoded or decoded, else as `request`.
        """
        coder = self._coder if codec is None else Coder(codec)
        reply = self.request(service, *coder.encode(value), **settings)
        return coder.decode(reply[reply.collected :])

    def call_stream(
        self, service: str | bytes, value: Any = None, *, codec: str | Codec | None = None, **settings: Any
    ) -> Generator[Any, None, None]:
        """Call `service` with a value and yield each value as it comes; that of the FINAL unless it is None.

        `settings` are those of `stream`.  Raises as `call` and `stream`.
        """
        coder = self._coder if codec is None else Coder(codec)
        parts = self.stream(service, *coder.encode(value), **settings)
        return _decoded(coder, parts)

    def submit(
        self,
        service: str | bytes,
        *frames: bytes,
        timeout: float | None = None,
        retries: int | None = None,
        wait: bool = True,
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> "Future[Reply]":
        """As `request`, but return a `concurrent.futures.Future` at once; any number may be outstanding.

        `future.cancel()` cancels the request.  Callbacks run in a thread of the client's own, one after the other: they
        may use the client, but while one blocks the others wait.
        """
        name, body = wire.service_name(service), checked_body(frames)
        dialog = self._usable()
        if isinstance(dialog, LazyPirate):
            raise SettingError("submit() takes protocol X1: MDP/0.2 does not number requests")
        headers, finish = tracing.calling(name.decode(), headers)
        try:
            future = dialog.submit(
                name, body, self._patience(timeout, retries), wait=wait, headers=headers, options=options
            )
        except BaseException as error:
            finish(error)
            raise
        if finish is not tracing.untraced:
            future.add_done_callback(lambda done: finish(None if done.cancelled() else done.exception()))
        return future

    def available(self, service: str | bytes, *, timeout: float | None = None, retries: int | None = None) -> bool:
        """Whether at least one worker offers `service` now (`mmi.service`).  Raises as `request`."""
        return self.request("mmi.service", wire.service_name(service), timeout=timeout, retries=retries) == [b"200"]

    # ── the Guide's lower level ──────────────────────────────────────────────────────────────────────────────────────

    def send(self, service: str | bytes, *frames: bytes) -> None:
        """Send a request and do not wait: any number may be sent before the replies are taken with `recv`.

        Replies come in the order of completion.  With 0.2 and 0.1, which do not number requests, nothing is sent again.
        """
        name, body = wire.service_name(service), checked_body(frames)
        self._usable().send(name, body, self._timeout)

    def recv(self, timeout: float | None = None) -> Reply:
        """The next reply, or part of one (`.final` tells), to what `send` sent.

        Raises `RequestTimeout` if none comes within `timeout` seconds; `recv` can be called again.  Raises what a
        request failed with, such as `ServiceError`.
        """
        return self._usable().recv(self._timeout if timeout is None else checked_timeout(timeout))

    def reset(self) -> None:
        """Forget what is outstanding: replies to earlier `send`s will not be received."""
        self._usable().reset()

    def _usable(self) -> Numbered | LazyPirate:
        # A forked process has neither the threads nor the I/O threads of its parent, and perhaps a lock that is held.
        if os.getpid() != self._process:
            raise ClosedError("this client belongs to the process that made it: make one after fork()")
        return self._dialog

    # ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _patience(self, timeout: float | None, retries: int | None) -> float:
        if timeout is None and retries is None:
            return self._timeout * (1 + self._retries)
        seconds = self._timeout if timeout is None else checked_timeout(timeout)
        return seconds * (1 + (self._retries if retries is None else checked_retries(retries)))

    def _tries(
        self, timeout: float | None, retries: int | None, wait: bool, headers: object, options: object
    ) -> dict[str, Any]:
        check_plain(wait, headers, options)
        return {
            "timeout": self._timeout if timeout is None else checked_timeout(timeout),
            "retries": self._retries if retries is None else checked_retries(retries),
        }

    def close(self) -> None:
        """Cancel what is outstanding and close the connection.  Harmless when repeated, and in a forked process."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._dialog.close()
        if self._own_context:
            end(self._context)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _decoded(coder: Coder, parts: Generator[Reply, None, None]) -> Generator[Any, None, None]:
    try:
        for part in parts:
            value = coder.decode(part)
            if value is not None or not part.final:
                yield value
    finally:
        parts.close()


def _traced(
    dialog: Numbered, name: bytes, body: Sequence[bytes], headers: Mapping[str, str] | None, settings: dict[str, Any]
) -> Generator[Reply, None, None]:
    headers, finish = tracing.calling(name.decode(), headers)
    error: BaseException | None = None
    try:
        yield from dialog.stream(name, body, headers=headers, **settings)
    except ZmdpError as failure:
        error = failure
        raise
    finally:
        finish(error)
