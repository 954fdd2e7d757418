"""Shared by both kinds of workers: what surrounds the call of a handler.

A request becomes a handler's argument, and the result becomes frames, or a failure.  Each call has a context of its
own.  A process that a handler has forked ends with the call.
"""

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from contextvars import Context as TaskContext
from contextvars import copy_context
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NamedTuple, NoReturn

from ..mdp import tracing
from ..mdp.codecs import Codec, Coder
from ..mdp.codes import Code
from ..mdp.errors import CodecError, HandlerError, RequestCancelled, ServiceError
from ..mdp.limits import MAX_BODY, MAX_BODY_FRAMES
from ..mdp.program.logs import fields_of
from .session.request import Request

Frame = bytes | bytearray | memoryview
Frames = Frame | Sequence[Frame] | None
"""What a handler may yield or return: one frame, several (a list or tuple), or None for one empty frame."""

MAX_CAUSES = 20
"""Exceptions of a group that the client is told."""
MAX_ERROR_CHARACTERS = 1000
"""Characters of an exception's text that are sent to the client."""

log = logging.getLogger("zmdp.worker")


class Failed(NamedTuple):
    """A failure, as a worker reports it to the client."""

    code: int
    text: str
    detail: tuple[bytes, ...] = ()


_NOT_RUN = {
    CoroutineType: "a coroutine", GeneratorType: "a generator", AsyncGeneratorType: "an async generator",
}  # fmt: skip

Outcome = list[bytes] | Failed
"""The frames of a FINAL, or the failure of the request."""


def current_request() -> Request:
    """Return the request that is being handled, for handlers that get a decoded value and for code that they call.

        def greet(word):
            return f"{word}, {current_request().headers['user']}"

    Returns:
        The request.

    Raises:
        LookupError: No request is being handled.
    """
    request: Request = tracing.current.get()
    return request


class Last:
    """The last value of a stream, sent as the FINAL: for async generators, which cannot return a value.

        async def parts(request):
            yield b"a part"
            yield Last(b"that was all")

    Args:
        value: What the handler would return.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value


class Unreadable(CodecError):
    """The client sent a body that the worker's codec cannot decode."""


class HandlerAdapter:
    """Converts requests to a handler's arguments, and its results to frames; with a codec, from and to values."""

    def __init__(self, codec: str | Codec | None) -> None:
        self._coder = None if codec is None else Coder(codec)
        self.plain = self._coder is None
        """Whether the argument is the request itself."""

    def argument(self, request: Request) -> Any:
        """Return the handler's argument: the request, or with a codec the decoded value.  Raises `Unreadable`."""
        if self._coder is None:
            return request
        try:
            return self._coder.decode(request)
        except CodecError as error:
            raise Unreadable(str(error)) from error.__cause__

    def frames(self, result: object) -> list[bytes]:
        """Return a handler's result as at least one frame (C7).  Raises `HandlerError` or `CodecError`."""
        if self._coder is None:  # the most frequent results: the rest takes 20 % of a request
            if type(result) is bytes and len(result) <= MAX_BODY:
                return [result]
            if isinstance(result, list) and len(result) == 1:
                frame = result[0]
                if type(frame) is bytes and len(frame) <= MAX_BODY:
                    return [frame]
        check_result(result)
        if isinstance(result, Last):
            result = result.value
        return _checked(_frames(result) if self._coder is None else self._coder.encode(result))


def check_result(result: object) -> None:
    """Raise `HandlerError` if a handler has returned something that it should have run."""
    if type(result) in _NOT_RUN:
        if isinstance(result, CoroutineType):
            result.close()  # else Python warns that it was never awaited
        raise HandlerError(
            f"a handler returned {_NOT_RUN[type(result)]} that was not run, as a plain function does that wraps one of "
            "another kind: declare the wrapper as the kind that it wraps, such as an `async def` that awaits"
        )


def failed(error: BaseException, request: Request) -> Failed:
    """Return the failure to report to the client for an exception.  Only the log gets the traceback.

    A group with a single exception, as a TaskGroup raises it, stands for that one.
    """
    raised, causes = error, _causes(error)
    if len(causes) == 1:
        (error,) = causes
    if isinstance(error, ServiceError):
        problem = _problem(error)
        if problem is None:
            text = "%s: the handler failed with %d: %s"
            log.info(text, request.service, error.code, error.text, extra=fields_of(request))
            return Failed(error.code, error.text, (error.detail or b"",))  # a detail marks the service's own errors
        text = "%s: the handler raised an invalid ServiceError: %s"
        log.error(text, request.service, problem, exc_info=error, extra=fields_of(request))
        return Failed(Code.FAILED, f"invalid ServiceError ({problem}): {error}"[:MAX_ERROR_CHARACTERS])
    if isinstance(error, RequestCancelled) or (request.cancelled and not isinstance(error, Exception)):
        log.info("%s: a request was cancelled", request.service, extra=fields_of(request))
        return Failed(Code.CANCELLED, "cancelled")
    if isinstance(error, Unreadable):
        log.info("%s: %s", request.service, error, extra=fields_of(request))
        return Failed(Code.MALFORMED, str(error))
    log.error("%s: the handler failed", request.service, exc_info=raised, extra=fields_of(request))
    text = _text_of(error)
    if causes[0] is not error:  # a group
        text += ": " + "; ".join(map(_text_of, causes))
    return Failed(Code.FAILED, text[:MAX_ERROR_CHARACTERS])


def _causes(error: BaseException) -> list[BaseException]:
    """Return the first exceptions in a group, and in groups within it; without a group, `error` itself."""
    found: list[BaseException] = []
    left = [error]
    while left and len(found) < MAX_CAUSES:
        each = left.pop()
        if isinstance(each, BaseExceptionGroup):
            left += reversed(each.exceptions)
        else:
            found.append(each)
    return found


def _text_of(error: BaseException) -> str:
    """Return the type and the text of an exception."""
    return "".join(traceback.format_exception_only(error)).strip()


def _problem(error: ServiceError) -> str | None:
    """Return the reason why an ERROR cannot carry `error`, or None: it needs a code of three digits and a text."""
    given: Any = error  # a handler can pass values of any type
    code, text, detail = given.code, given.text, b"" if given.detail is None else given.detail
    if not (isinstance(code, int) and 0 <= code <= 999):
        return f"code is {code!r:.100}: it must be a whole number from 0 to 999"
    if not isinstance(text, str):
        return f"text is of type {type(text).__name__}: it must be str"
    if not isinstance(detail, bytes):
        return f"detail is of type {type(detail).__name__}: it must be bytes or None"
    if 4 * len(text) + len(detail) > MAX_BODY:
        return f"text and detail are longer than {MAX_BODY} bytes"
    return None


def _frames(result: object) -> list[bytes]:
    if result is None:
        return [b""]
    if isinstance(result, bytes | bytearray | memoryview):
        result = [result]
    if not (isinstance(result, list | tuple) and all(isinstance(f, bytes | bytearray | memoryview) for f in result)):
        raise HandlerError(f"a handler returned {result!r:.100}: expected bytes, a list of bytes, or None")
    return [bytes(frame) for frame in result] or [b""]


def _checked(frames: list[bytes]) -> list[bytes]:
    size = sum(map(len, frames))
    if size > MAX_BODY or len(frames) > MAX_BODY_FRAMES:
        raise HandlerError(
            f"a handler returned {size} bytes in {len(frames)} frames: the limits are {MAX_BODY} bytes and "
            f"{MAX_BODY_FRAMES} frames"
        )
    return frames


class RequestContexts:
    """Makes a context for each request, a copy of the one in which the worker was started.

    Every handler sees the variables that a lifespan has set in that context; those that a handler sets are gone with
    its request.

    A program that has used `decimal` has a `decimal.Context` in it, which handlers change and do not replace, as in
    `decimal.getcontext().prec = 6`.  So each request also gets a copy of that.

    Args:
        base: The context that is copied; by default the current one.
    """

    def __init__(self, base: TaskContext | None = None) -> None:
        self.base = copy_context() if base is None else base
        self._decimal: Any = sys.modules.get("decimal")
        self._arithmetic = None if self._decimal is None else _first(self.base, self._decimal.Context)

    def new(self) -> TaskContext:
        """Return the context for a request."""
        context = self.base.copy()
        if self._arithmetic is not None:
            context.run(self._decimal.setcontext, self._arithmetic.copy())
        return context

    def renewed(self, snapshot: TaskContext) -> TaskContext:
        """Prepare the current context, in which a request has set nothing, for the next request.

        `snapshot` is a copy of the context as the last request was given it.  Return such a copy for the next one.
        """
        if self._arithmetic is None:
            return snapshot
        self._decimal.setcontext(self._arithmetic.copy())
        return copy_context()


def _first(context: TaskContext, kind: type) -> Any:
    return next((value for value in context.values() if isinstance(value, kind)), None)


log = logging.getLogger("zmdp.worker")


def end_forked(request: Request, error: BaseException | None = None) -> NoReturn:
    """End this process, which is not the one that received the request: it must not reply over its parent's sockets.

    As in any program, `SystemExit` says with which code.  The child's `error`, or that it has returned, is logged.
    """
    code = error.code if isinstance(error, SystemExit) else 1
    if error is None:
        text = "%s: the handler has returned in a process that it has forked, which ends: end it with os._exit()"
        log.error(text, request.service)
    elif not isinstance(error, SystemExit):
        text = "%s: the handler failed in a process that it has forked, which ends"
        log.error(text, request.service, exc_info=error)
    with suppress(Exception):  # as Python does at the end of a program
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
