"""What both kinds of workers share: from a request to a handler's argument, from its result to frames."""

import inspect
import logging
import traceback
from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

from ..mdp import tracing
from ..mdp.codecs import Codec, Coder
from ..mdp.codes import Code
from ..mdp.errors import CodecError, HandlerError, RequestCancelled, ServiceError, SettingError
from ..mdp.limits import Limits
from .request import Request

Frame = bytes | bytearray | memoryview
Frames = Frame | Sequence[Frame] | None
"""What a handler may yield or return: one frame, several (a list or tuple), or None for one empty frame."""

ROUTING = 20
"""Frames, and kilobytes, of a message that its routing may take."""
MAX_BODY = Limits().max_message - 1000 * ROUTING
MAX_BODY_FRAMES = Limits().max_frames - ROUTING
"""What a broker with its default limits takes.  One with lower limits drops what is over them."""
MAX_ERROR = 1000
"""Characters of an exception that a client is told."""

log = logging.getLogger("zmdp.worker")

_current: ContextVar[Request] = ContextVar("zmdp-request")


def current_request() -> Request:
    """The request that this handler was called for.  Raises `LookupError` outside of a handler.

    For handlers that get a decoded value, or for code that they call.
    """
    return _current.get()


def is_async(handler: object) -> bool:
    """Whether `handler` is a coroutine function, an async generator function, or something that is called as one."""
    if isinstance(handler, partial):
        return is_async(handler.func)
    if not (inspect.isroutine(handler) or inspect.isclass(handler)):
        handler = getattr(handler, "__call__", handler)  # noqa: B004 - what it is, not whether there is one
    return inspect.iscoroutinefunction(handler) or inspect.isasyncgenfunction(handler)


class Final:
    """The FINAL of a stream whose handler cannot return it, an async generator: `yield Final(b"that was all")`."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


class Failed(NamedTuple):
    """How a handler failed, as the client is told."""

    code: int
    text: str
    detail: tuple[bytes, ...] = ()


def check_settings(concurrency: int, handler_timeout: float | None) -> None:
    """Raise `SettingError` for what is out of range."""
    if concurrency < 1:
        raise SettingError(f"concurrency is {concurrency!r}: it must be 1 or more")
    if handler_timeout is not None and not handler_timeout > 0:
        raise SettingError(f"handler_timeout is {handler_timeout!r}: it must be a number of seconds above 0, or None")


class Unreadable(CodecError):
    """The client sent a body that the worker's codec cannot decode."""


class Handling:
    """How a worker's handler is called, and what becomes of its results."""

    def __init__(self, codec: str | Codec | None) -> None:
        self._coder = None if codec is None else Coder(codec)

    def argument(self, request: Request) -> Any:
        """What the handler gets: the request, or with a codec the value in it.  Raises `Unreadable`."""
        if self._coder is None:
            return request
        try:
            return self._coder.decode(request)
        except CodecError as error:
            raise Unreadable(str(error)) from error.__cause__

    def frames(self, result: object) -> list[bytes]:
        """What a handler yielded or returned, as frames; at least one (C7).  Raises `HandlerError`, `CodecError`."""
        if self._coder is None:  # first what handlers give most often
            if type(result) is bytes and len(result) <= MAX_BODY:
                return [result]
            if isinstance(result, list) and len(result) == 1:
                frame = result[0]
                if type(frame) is bytes and len(frame) <= MAX_BODY:
                    return [frame]
        if isinstance(result, Final):
            result = result.value
        return _checked(_frames(result) if self._coder is None else self._coder.encode(result))


class handling:  # noqa: N801 - it is used as a function is, as those of contextlib are
    """Within the block `request` is handled: it is the current one, and its trace context goes on."""

    __slots__ = ("_request", "_token", "_tracing")

    def __init__(self, request: Request) -> None:
        self._request = request

    def __enter__(self) -> None:
        self._token = _current.set(self._request)
        try:
            self._tracing = tracing.handling(self._request.service, self._request)
            self._tracing.__enter__()
        except BaseException:
            _current.reset(self._token)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._tracing.__exit__(kind, value, trace)
        finally:
            _current.reset(self._token)


def failed(error: BaseException, request: Request) -> Failed:
    """What to tell the client of an exception.  The traceback goes to the log, and nowhere else."""
    if isinstance(error, ServiceError) and _sendable(error):
        log.info("%s: the handler failed with %d: %s", request.service, error.code, error.text)
        return Failed(error.code, error.text, (error.detail or b"",))  # a detail frame marks it as the service's own
    if isinstance(error, RequestCancelled) or (request.cancelled and not isinstance(error, Exception)):
        log.info("%s: a request was cancelled", request.service)
        return Failed(Code.CANCELLED, "cancelled")
    if isinstance(error, Unreadable):
        log.info("%s: %s", request.service, error)
        return Failed(Code.MALFORMED, str(error))
    log.error("%s: the handler failed", request.service, exc_info=error)
    return Failed(Code.FAILED, "".join(traceback.format_exception_only(error)).strip()[:MAX_ERROR])


def _sendable(error: ServiceError) -> bool:
    """Whether an ERROR can say so: three digits, a text, perhaps a detail, and not more than a reply may have."""
    detail = b"" if error.detail is None else error.detail
    right = isinstance(error.code, int) and isinstance(error.text, str) and isinstance(detail, bytes)
    return right and 0 <= error.code <= 999 and 4 * len(error.text) + len(detail) <= MAX_BODY


def _frames(result: object) -> list[bytes]:
    if result is None:
        return [b""]
    if isinstance(result, bytes | bytearray | memoryview):
        result = [result]
    if not (isinstance(result, list | tuple) and all(isinstance(f, bytes | bytearray | memoryview) for f in result)):
        raise HandlerError(f"a handler gave {result!r:.100}: it takes bytes, a list of bytes, or None")
    return [bytes(frame) for frame in result] or [b""]


def _checked(frames: list[bytes]) -> list[bytes]:
    size = sum(map(len, frames))
    if size > MAX_BODY or len(frames) > MAX_BODY_FRAMES:
        raise HandlerError(
            f"a handler gave {size} bytes in {len(frames)} frames: a reply may have {MAX_BODY} in {MAX_BODY_FRAMES}"
        )
    return frames
