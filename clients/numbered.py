"""The synchronous shell of X1: any number of requests at once over one connection, from any number of threads."""

import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import zmq

from ..mdp.errors import BusyError, ClosedError, RequestTimeout
from .futures import FutureThread, ReplyFuture
from .inbox import Inbox
from .reply import Reply
from .session import Call, Outcome
from .sharing import Answer, Follower, Parts, SharedConnection


class Numbered:
    """Requests over X1, for threads.  It has a thread of its own only if futures are asked for."""

    def __init__(
        self,
        endpoints: Sequence[str],
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        heartbeat: float,
        liveness: int,
        max_outstanding: int,
    ) -> None:
        self._shared = SharedConnection(
            endpoints, context, heartbeat=heartbeat, liveness=liveness, max_outstanding=max_outstanding
        )
        self._futures = FutureThread(self._shared)
        self._received: deque[Inbox] = deque()
        """For each outcome of what `send` sent, where to take it from."""
        self._unreceived: dict[Call, None] = {}

    def request(
        self,
        service: bytes,
        body: Sequence[bytes],
        timeout: float | None,
        *,
        wait: bool = True,
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Send a request and wait for all of its reply; raises what it fails with."""
        answer, shared = Answer(), self._shared
        call: Call | None = None
        try:
            with shared.lock:
                call = shared.begin(answer, service, body, timeout=timeout, wait=wait, headers=headers, options=options)
                if shared.driver is not None:  # else this thread is about to drive
                    shared.send()
                shared.wait(answer.__bool__, taker=answer)
                if not answer:
                    shared.check_open()
        except BaseException:
            if call is not None:
                shared.cancel(call)
            raise
        finally:
            shared.cancel_unwanted()
        return answer.take()

    def stream(
        self,
        service: bytes,
        body: Sequence[bytes],
        *,
        timeout: float | None,
        silence: float | None,
        wait: bool = True,
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Generator[Reply, None, None]:
        """Send a request and yield each part of its reply as it arrives; raises what it fails with."""
        parts, shared = Parts(), self._shared
        with shared.lock:
            call = shared.begin(
                parts, service, body, timeout=timeout, silence=silence, stream=True, wait=wait, headers=headers,
                options=options,
            )  # fmt: skip
            shared.send()
        shared.cancel_unwanted()
        try:
            while True:
                if not parts:
                    shared.next(parts)
                part = parts.take()
                yield part
                if part.final:
                    return
        finally:
            shared.cancel(call)

    def submit(
        self,
        service: bytes,
        body: Sequence[bytes],
        timeout: float | None,
        *,
        wait: bool = True,
        headers: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> "Future[Reply]":
        """Send a request and return the future of its reply."""
        futures, shared = self._futures, self._shared
        future = ReplyFuture(futures)
        with shared.lock:
            call = shared.begin(future, service, body, timeout=timeout, wait=wait, headers=headers, options=options)
            futures.submitted(future, call)
        shared.cancel_unwanted()
        return future

    # ── the Guide's lower level ──────────────────────────────────────────────────────────────────────────────────────

    def send(self, service: bytes, body: Sequence[bytes], timeout: float) -> None:
        """Send a request whose reply `recv` will take."""
        del timeout  # it is sent at once; if there is no connection, when `recv` makes one
        shared = self._shared
        sent = _Sent(self)
        with shared.lock:
            sent.call = shared.begin(sent, service, body, stream=True)
            self._unreceived[sent.call] = None
            shared.send()
        shared.cancel_unwanted()

    def received(self, sent: "_Sent", outcome: Outcome) -> None:
        """An outcome of what `send` sent has come."""
        if sent.add(outcome):
            self._received.append(sent)
        if sent.full and not sent.call.ended:
            self._shared.session.cancel(sent.call)
        if sent.call.ended:
            self._unreceived.pop(sent.call, None)

    def recv(self, timeout: float) -> Reply:
        """The next reply, or part of one, to what `send` sent."""
        shared = self._shared
        with shared.lock:
            if not self._received:
                shared.check_open()
                if not self._unreceived:
                    raise BusyError("nothing was sent: recv() takes the replies to send()")
                shared.wait(lambda: bool(self._received), time.monotonic() + timeout)
            if not self._received:
                shared.check_open()
                text = f"no reply through {shared.session.where}; {len(self._unreceived)} requests are outstanding"
                raise RequestTimeout(text)
            inbox = self._received.popleft()
        shared.cancel_unwanted()
        return inbox.take()

    def reset(self) -> None:
        """Cancel what `send` sent."""
        for call in list(self._unreceived):
            self._shared.cancel(call)
        self._unreceived.clear()
        self._received = deque()

    def close(self) -> None:
        """Cancel all outstanding requests, and close."""
        shared = self._shared
        with shared.lock:
            if shared.closed:
                return
            shared.close(lambda: ClosedError("this client was closed"))
        self._futures.close()
        shared.close_descriptors()


class _Sent(Inbox):
    """The outcomes of a request that `send` sent."""

    call: Call

    def __init__(self, dialog: Numbered) -> None:
        super().__init__()
        self.follower: Follower | None = None
        self._dialog = dialog

    def put(self, outcome: Outcome) -> None:
        self._dialog.received(self, outcome)
