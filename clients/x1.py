"""X1 for threads: any number of requests at once over one connection, from any number of threads."""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ..mdp import tracing
from ..mdp.errors import BusyError, ClosedError, RequestTimeout, ZmdpError
from .call import Call, Outcome
from .dialog import Ask
from .futures import Futures
from .inbox import Inbox
from .reply import Reply
from .settings import ConnectionSettings
from .sharing import SharedConnection, SingleOutcome, StreamInbox, Waiter


class X1Dialog:
    """Requests over X1, made by threads.  It starts threads of its own only for futures."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._shared = SharedConnection(settings)
        self._futures = Futures(self._shared)
        self._arrived: deque[Inbox] = deque()
        """The inboxes of the outcomes that `recv` has not returned yet, one entry for each outcome."""
        self._unfinished: dict[_SentRequest, None] = {}
        """The requests made with `send` that have not ended, in the order in which they were sent."""
        self._takers: deque[_Taker] = deque()
        """The threads that wait in `recv`."""

    @property
    def endpoint(self) -> str:
        """The endpoint of the broker in use."""
        return self._shared.connection.endpoint

    def request(self, ask: Ask) -> Reply:
        """Send a request and return the whole reply.  Raises the request's error."""
        timeout = ask.timeout * (1 + ask.retries)
        headers, finish = tracing.calling(ask.service.decode(), ask.headers, timeout)
        outcome, shared = SingleOutcome(), self._shared
        try:
            shared.begin(outcome, ask, headers, timeout=timeout)
            shared.wait(outcome)
            reply = outcome.take()
        except BaseException as error:
            shared.cancel(outcome)
            finish(error)
            raise
        if finish is not tracing.untraced:
            finish(None)
        return reply

    def stream(self, ask: Ask) -> Generator[Reply, None, None]:
        """Send a request and yield each part of the reply as it arrives.  Raises the request's error."""
        headers, finish = tracing.calling(ask.service.decode(), ask.headers, ask.deadline)
        parts, shared = StreamInbox(), self._shared
        error: ZmdpError | None = None
        try:
            silence = ask.timeout * (1 + ask.retries)
            shared.begin(parts, ask, headers, timeout=ask.deadline, silence=silence, stream=True)
            while True:
                if not parts:
                    shared.wait(parts)
                part = parts.take()
                yield part
                if part.final:
                    return
        except ZmdpError as failure:
            error = failure
            raise
        finally:
            shared.cancel(parts)
            finish(error)
            error = None  # its traceback refers to this frame

    def submit(self, ask: Ask, convert: Callable[[Reply], Any] | None = None) -> "Future[Any]":
        """Send a request and return the future of its reply, or of what `convert` makes of it."""
        timeout = ask.timeout * (1 + ask.retries)
        headers, finish = tracing.calling(ask.service.decode(), ask.headers, timeout)
        try:
            future = self._futures.submit(ask, headers, timeout, convert)
        except BaseException as error:
            finish(error)
            raise
        if finish is not tracing.untraced:
            future.add_done_callback(lambda done: finish(None if done.cancelled() else done.exception()))
        return future

    # ── the Guide's lower level ──────────────────────────────────────────────────────────────────────────────────────

    def send(self, service: bytes, body: Sequence[bytes], *, timeout: float) -> None:
        """Send a request whose reply `recv` returns.  Without a connection, it is sent when `recv` makes one."""
        sent = _SentRequest(self)
        self._unfinished[sent] = None
        try:
            self._shared.begin(sent, Ask(service, body, timeout), stream=True)
        except BaseException:
            self._unfinished.pop(sent, None)
            raise
        self._shared.send()

    def received(self, sent: "_SentRequest", outcome: Outcome) -> None:
        """Take an outcome of a request made with `send`."""
        if sent not in self._unfinished:
            return  # it was abandoned
        if sent.add(outcome):
            self._arrived.append(sent)
        if sent.full and sent.call is not None:
            self._shared.session.cancel(sent.call)
        if sent.full or not isinstance(outcome, Reply) or outcome.final:
            self._unfinished.pop(sent, None)
        for taker in list(self._takers):
            taker.wake()

    def recv(self, *, timeout: float) -> Reply:
        """Return the next reply, or part of one, to a request made with `send`."""
        shared, until = self._shared, time.monotonic() + timeout
        if not self._arrived:
            shared.check_open()
            if not self._unfinished:
                raise BusyError("nothing was sent: recv() returns the replies to send()")
        taker = _Taker(self._arrived)
        self._takers.append(taker)
        try:
            while True:
                shared.wait(taker, until)
                if taker:
                    with suppress(IndexError):  # another thread has taken it
                        return self._arrived.popleft().take()
                shared.check_open()
                if time.monotonic() >= until:
                    break
        finally:
            self._takers.remove(taker)
        text = f"no reply through {self.endpoint} within {timeout:g} s; outstanding requests: {len(self._unfinished)}"
        raise RequestTimeout(text)

    def reset(self) -> None:
        """Cancel every request made with `send` and discard what has arrived for them."""
        abandoned, self._unfinished = self._unfinished, {}
        for sent in list(abandoned):
            self._shared.cancel(sent)
        self._arrived.clear()

    def close(self) -> None:
        """Cancel every outstanding request and close the connection."""
        if self._shared.close(lambda: ClosedError("this client was closed")):
            self._futures.close()


class _SentRequest(Inbox):
    """The outcomes of one request made with `send`."""

    def __init__(self, dialog: X1Dialog) -> None:
        super().__init__()
        self.call: Call | None = None
        self._dialog = dialog

    def put(self, outcome: Outcome) -> bool:
        self._dialog.received(self, outcome)
        return False


class _Taker(Waiter):
    """The wait of a thread for the outcome of any request made with `send`."""

    def __init__(self, arrived: deque[Inbox]) -> None:
        super().__init__()
        self._arrived = arrived

    def __bool__(self) -> bool:
        return bool(self._arrived)
