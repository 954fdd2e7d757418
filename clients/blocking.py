"""The requests of `Client`: made by threads, and carried out by an event loop in a thread of its own."""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from ..mdp import tracing
from ..mdp.errors import BusyError, RequestTimeout, ZmdpError
from .calls.ask import Ask, Dialog
from .calls.reply import Inbox, Outcome, Reply, ThreadInbox
from .calls.settings import ConnectionSettings
from .futures import ClientThreads, ReplyFuture
from .legacy.dialog import LegacyDialog
from .loop_thread import PendingOutcome
from .x1.dialog import X1Dialog


class BlockingDialog:
    """A dialog whose requests any number of threads make.  Every method that waits raises the request's error.

    Only outstanding requests refer to it from the loop.  So a dialog that nobody closes, and for which nobody waits,
    is collected, and is closed then.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        dialog: Dialog = X1Dialog(settings) if settings.protocol == "X1" else LegacyDialog(settings)
        self._dialog = dialog
        self._threads = ClientThreads(
            self, "zmdp-client", dialog.endpoint, closing=dialog.close, closed=settings.end_context
        )
        self._loop = self._threads.loop
        self._arrived: SimpleQueue[Inbox] = SimpleQueue()
        """The inboxes of the outcomes that `recv` has not returned yet, one entry for each outcome."""
        self._unfinished: dict[_SentRequest, None] = {}
        """The requests made with `send` that have not ended, in the order in which they were sent."""

    @property
    def endpoint(self) -> str:
        """The endpoint of the broker in use."""
        return self._dialog.endpoint

    def request(self, ask: Ask) -> Reply:
        """Send a request and return the whole reply."""
        outcome = PendingOutcome()
        finish = self._send(outcome, ask)
        try:
            reply: Reply = outcome.wait()
        except BaseException as error:
            if not isinstance(error, ZmdpError):  # Ctrl-C: it has not ended
                self._loop.call(self._cancel, outcome)
            if finish is not None:
                finish(error)
            raise
        if finish is not None:
            finish(None)
        return reply

    def stream(self, ask: Ask) -> Generator[Reply, None, None]:
        """Send a request and yield each part of the reply as it arrives, the FINAL last."""
        parts = ThreadInbox()
        finish = self._send(parts, ask)
        error: ZmdpError | None = None
        ended = False
        try:
            while True:
                part = parts.get()
                ended = part.final
                yield part
                if ended:
                    return
        except ZmdpError as failure:
            error, ended = failure, True
            raise
        finally:
            if not ended:
                self._loop.call(self._cancel, parts)
            if finish is not None:
                finish(error)
            error = None  # its traceback refers to this frame

    def submit(self, ask: Ask, convert: Callable[[Reply], Any] | None = None) -> "Future[Any]":
        """Send a request and return the future of its reply, or of the value that `convert` makes of it."""
        future = ReplyFuture(self._threads, self._cancel_future, convert)
        finish = self._send(future, ask)
        if finish is not None:
            future.add_done_callback(partial(_finish, finish))
        return future

    def _cancel_future(self, future: "Future[Any]") -> None:
        self._loop.call(self._cancel, future)

    def _send(self, receiver: Any, ask: Ask) -> tracing.Finish | None:
        """Hand a request to the loop.  If it is traced, return the function to call when it has ended."""
        headers, finish = ask.headers, None
        if tracing.concerns_calls():
            headers, finish = tracing.calling(ask.service.decode(), headers, ask.timeout)
        try:
            self._loop.call(self._begin, receiver, ask, ask.encoded(headers))
        except BaseException as error:
            self._loop.call(self._cancel, receiver)  # Ctrl-C may have come after it was handed over
            if finish is not None:
                finish(error)
            raise
        return finish

    # ── in the loop ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, receiver: Any, ask: Ask, options: bytes) -> None:
        try:
            receiver.call = self._dialog.begin(receiver, ask, options)
        except Exception as error:  # noqa: BLE001 - raised where the request was made
            receiver.put(error.with_traceback(None))

    def _cancel(self, receiver: Any) -> None:
        if receiver.call is not None:
            self._dialog.cancel(receiver.call)

    # ── the Guide's lower level ──────────────────────────────────────────────────────────────────────────────────────

    def send(self, service: bytes, body: Sequence[bytes]) -> None:
        """Send a request whose reply `recv` returns."""
        sent = _SentRequest(self._dialog, self._arrived, self._unfinished)
        self._unfinished[sent] = None
        self._loop.call(self._begin, sent, Ask(service, body, stream=True), b"")

    def recv(self, *, timeout: float) -> Reply:
        """Return the next reply, or part of one, to a request made with `send`."""
        if not self._unfinished and self._arrived.empty():
            raise BusyError("nothing was sent: recv() returns the replies to send()")
        try:
            inbox = self._arrived.get(timeout=timeout)
        except Empty:
            count = len(self._unfinished)
            text = f"no reply through {self.endpoint} within {timeout:g} s; outstanding requests: {count}"
            raise RequestTimeout(text) from None
        return inbox.take()

    def reset(self) -> None:
        """Cancel every request made with `send` and discard its outcomes."""
        for sent in [*self._unfinished]:
            sent.abandoned = True
            self._unfinished.pop(sent, None)
            self._loop.call(self._cancel, sent)
        with suppress(Empty):
            while True:
                self._arrived.get_nowait()

    def close(self) -> None:
        """Cancel every outstanding request, close the connection, and end the threads."""
        self._threads.close()


def _finish(finish: tracing.Finish, done: "Future[Any]") -> None:
    finish(None if done.cancelled() else done.exception())


class _SentRequest(Inbox):
    """The outcomes of one request made with `send`."""

    def __init__(self, dialog: Dialog, arrived: "SimpleQueue[Inbox]", unfinished: "dict[_SentRequest, None]") -> None:
        super().__init__()
        self.abandoned = False
        self._dialog = dialog
        self._arrived = arrived
        self._unfinished = unfinished

    def put(self, outcome: Outcome) -> None:
        """Take a part, the reply or the error."""
        if self.abandoned:
            return
        if self.add(outcome):
            self._arrived.put(self)
        if self.full:
            self._dialog.cancel(self.call)
        if self.full or not isinstance(outcome, Reply) or outcome.final:
            self._unfinished.pop(self, None)
