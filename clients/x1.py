"""X1 for threads: any number of requests at once over one connection, from any number of threads."""

import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future

from ..mdp import tracing
from ..mdp.errors import BusyError, ClosedError, RequestTimeout, ZmdpError
from .call import Call, Outcome
from .dialog import Ask
from .futures import FutureThread, ReplyFuture
from .inbox import Inbox
from .reply import Reply
from .settings import ConnectionSettings
from .sharing import Follower, SharedConnection, SingleOutcome, StreamInbox


class X1Dialog:
    """Requests over X1, made by threads.  It starts a thread of its own only for futures."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._shared = SharedConnection(settings)
        self._futures = FutureThread(self._shared)
        self._arrived: deque[Inbox] = deque()
        """For each outcome that `recv` has not returned yet, the inbox that holds it."""
        self._unfinished: dict[Call, None] = {}
        """The requests made with `send` that have not ended, in the order in which they were sent."""

    @property
    def endpoint(self) -> str:
        """The endpoint of the broker in use."""
        return self._shared.connection.endpoint

    def request(self, ask: Ask) -> Reply:
        """Send a request and return the whole reply.  Raises the request's error."""
        headers, finish = tracing.calling(ask.service.decode(), ask.headers, ask.timeout * (1 + ask.retries))
        outcome, shared = SingleOutcome(), self._shared
        call: Call | None = None
        try:
            with shared.lock:
                call = shared.begin(outcome, ask, headers, timeout=ask.timeout * (1 + ask.retries))
                if shared.driver is not None:  # otherwise this thread is about to drive
                    shared.send()
                shared.wait(outcome.__bool__, receiver=outcome)
                if not outcome:
                    shared.check_open()
            reply = outcome.take()
        except BaseException as error:
            if call is not None:
                shared.cancel(call)
            finish(error)
            raise
        finally:
            shared.cancel_unwanted()
        if finish is not tracing.untraced:
            finish(None)
        return reply

    def stream(self, ask: Ask) -> Generator[Reply, None, None]:
        """Send a request and yield each part of the reply as it arrives.  Raises the request's error."""
        headers, finish = tracing.calling(ask.service.decode(), ask.headers, ask.deadline)
        parts, shared = StreamInbox(), self._shared
        call: Call | None = None
        error: ZmdpError | None = None
        try:
            with shared.lock:
                silence = ask.timeout * (1 + ask.retries)
                call = shared.begin(parts, ask, headers, timeout=ask.deadline, silence=silence, stream=True)
                shared.send()
            shared.cancel_unwanted()
            while True:
                if not parts:
                    shared.next(parts)
                part = parts.take()
                yield part
                if part.final:
                    return
        except ZmdpError as failure:
            error = failure
            raise
        finally:
            if call is not None:
                shared.cancel(call)
            finish(error)

    def submit(self, ask: Ask) -> "Future[Reply]":
        """Send a request and return the future of its reply."""
        headers, finish = tracing.calling(ask.service.decode(), ask.headers, ask.timeout * (1 + ask.retries))
        futures, shared = self._futures, self._shared
        future = ReplyFuture(futures)
        try:
            with shared.lock:
                call = shared.begin(future, ask, headers, timeout=ask.timeout * (1 + ask.retries))
                futures.submitted(future, call)
            shared.cancel_unwanted()
        except BaseException as error:
            finish(error)
            raise
        if finish is not tracing.untraced:
            future.add_done_callback(lambda done: finish(None if done.cancelled() else done.exception()))
        return future

    # ── the Guide's lower level ──────────────────────────────────────────────────────────────────────────────────────

    def send(self, service: bytes, body: Sequence[bytes], *, timeout: float) -> None:
        """Send a request whose reply `recv` returns.  Without a connection, it is sent when `recv` makes one."""
        shared = self._shared
        sent = _SentRequest(self)
        with shared.lock:
            sent.call = shared.begin(sent, Ask(service, body, timeout), stream=True)
            self._unfinished[sent.call] = None
            shared.send()
        shared.cancel_unwanted()

    def received(self, sent: "_SentRequest", outcome: Outcome) -> None:
        """Take an outcome of a request made with `send`."""
        if sent.add(outcome):
            self._arrived.append(sent)
        if sent.full and not sent.call.ended:
            self._shared.session.cancel(sent.call)
        if sent.call.ended:
            self._unfinished.pop(sent.call, None)

    def recv(self, *, timeout: float) -> Reply:
        """Return the next reply, or part of one, to a request made with `send`."""
        shared = self._shared
        with shared.lock:
            if not self._arrived:
                shared.check_open()
                if not self._unfinished:
                    raise BusyError("nothing was sent: recv() returns the replies to send()")
                shared.wait(lambda: bool(self._arrived), time.monotonic() + timeout)
            if not self._arrived:
                shared.check_open()
                count = len(self._unfinished)
                text = f"no reply through {self.endpoint} within {timeout:g} s; outstanding requests: {count}"
                raise RequestTimeout(text)
            inbox = self._arrived.popleft()
        shared.cancel_unwanted()
        return inbox.take()

    def reset(self) -> None:
        """Cancel every request made with `send` and discard what has arrived for them."""
        for call in list(self._unfinished):
            self._shared.cancel(call)
        self._unfinished.clear()
        self._arrived = deque()

    def close(self) -> None:
        """Cancel every outstanding request and close the connection."""
        shared = self._shared
        with shared.lock:
            if shared.closed:
                return
            shared.close(lambda: ClosedError("this client was closed"))
        self._futures.close()
        shared.close_descriptors()


class _SentRequest(Inbox):
    """The outcomes of one request made with `send`."""

    call: Call

    def __init__(self, dialog: X1Dialog) -> None:
        super().__init__()
        self.follower: Follower | None = None
        self._dialog = dialog

    def put(self, outcome: Outcome) -> None:
        self._dialog.received(self, outcome)
