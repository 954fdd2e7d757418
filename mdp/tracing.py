"""The request that is being handled, and W3C trace context: `traceparent` and `tracestate` of a request are passed on
to the requests that its handler makes.

The header `request-id`, which names a request in log lines, is passed on as well.

In a program that uses OpenTelemetry (has imported `opentelemetry.trace`) there are spans as well: one of kind CLIENT
around each request, one of kind SERVER around each handler, with the time that the request has waited.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from importlib import import_module
from types import TracebackType
from typing import Any, Final, Protocol

TRACE_HEADERS: Final = ("traceparent", "tracestate")
REQUEST_ID: Final = "request-id"
"""The header by which callers name a request, for log lines; it is passed on as well."""
PASSED_ON: Final = (*TRACE_HEADERS, REQUEST_ID)
"""The headers of a request that are passed on to those that its handler makes."""
TTL: Final = "zmdp-ttl"
"""The header that tells the worker which ttl a request of a client with a span began with, in seconds.  The broker
passes on what is left of it, so their difference is the time in the queue, whatever the clocks of both say."""
QUEUE_SECONDS: Final = "mdp.queue_seconds"
"""The attribute of a worker's span with that time."""
MAX_SHOWN_ID: Final = 100
"""Characters of such a name that are shown."""

Headers = Mapping[str, str]
Finish = Callable[[BaseException | None], None]
"""Called when a request has ended, with the exception that it raised, or None."""


class Handled(Protocol):
    """A request that is being handled."""

    service: str

    @property
    def headers(self) -> Headers:
        """The headers that the client sent.  Reading them parses them, so this module does not do it needlessly."""


OPENTELEMETRY: Final = "opentelemetry.trace"
"""The module that a program with spans has imported."""

current: Final[ContextVar[Any]] = ContextVar("zmdp-request")
"""The request (a `Handled`) that is being handled in this context."""
_no_headers: Final[Headers] = {}


def shown_id(given: str) -> str:
    """Return the name that a caller has given a request, safe to show: callers can send anything."""
    return "".join(each if each.isprintable() and each != " " else "?" for each in given[:MAX_SHOWN_ID])


def opentelemetry_trace() -> Any:
    """Return the module `opentelemetry.trace` if this program has imported it, else None."""
    return sys.modules.get(OPENTELEMETRY)


def tracer() -> Any:
    """Return the tracer of the provider that the program has configured."""
    return opentelemetry_trace().get_tracer("zmdp")


def concerns_calls() -> bool:
    """Return whether `calling` has anything to do: a request is being handled, or there are spans."""
    return current.get(None) is not None or OPENTELEMETRY in sys.modules


def calling(service: str, headers: Headers | None, ttl: float | None = None) -> tuple[Headers | None, Finish]:
    """Return the headers for a request to `service` with the trace context added, and what to call when it has ended.

    The caller's own headers take precedence.  With a span, the headers contain the request's `ttl`, in seconds.
    """
    traced = opentelemetry_trace() is not None
    request = current.get(None)
    if request is not None:
        handled = request.headers
        # With spans, the trace context is that of the span.
        passed = {name: handled[name] for name in ((REQUEST_ID,) if traced else PASSED_ON) if name in handled}
        if passed:
            headers = _merged(passed, headers)
    return _calling_with_span(service, headers, ttl) if traced else (headers, untraced)


def untraced(error: BaseException | None) -> None:
    """Do nothing: the `Finish` of a request without a span."""
    del error


def continuing(service: str, headers: Headers | None) -> tuple[Headers | None, Finish]:
    """Return the headers for a request to `service` on behalf of an earlier one, which had `headers`, and what to call
    when it has ended.

    With a span, that is a child of the earlier request's, and its trace context replaces that in `headers`.
    """
    if opentelemetry_trace() is None:
        return headers, untraced
    given = dict(headers or _no_headers)
    carrier, finish = _calling_with_span(service, None, None, import_module("opentelemetry.propagate").extract(given))
    return {**given, **(carrier or _no_headers)}, finish


def _calling_with_span(
    service: str, headers: Headers | None, ttl: float | None, parent: Any = None
) -> tuple[Headers | None, Finish]:
    trace, propagate = opentelemetry_trace(), import_module("opentelemetry.propagate")
    span = tracer().start_span(service, context=parent, kind=trace.SpanKind.CLIENT, attributes=_attributes(service))
    carrier: dict[str, str] = {}
    if span.get_span_context().is_valid:
        propagate.inject(carrier, context=trace.set_span_in_context(span))
        if ttl is not None:
            carrier[TTL] = f"{ttl:.3f}"

    def finish(error: BaseException | None) -> None:
        if error is not None:
            span.set_attribute("error.type", type(error).__qualname__)
            span.record_exception(error)
            span.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
        span.end()

    return (_merged(carrier, headers) if carrier else headers), finish


def _merged(passed: dict[str, str], headers: Headers | None) -> Headers:
    """Return `passed` and `headers`, which override it.  A `tracestate` belongs to its `traceparent` only."""
    if headers and TRACE_HEADERS[0] in headers:
        passed = {name: value for name, value in passed.items() if name not in TRACE_HEADERS}
    return {**passed, **(headers or _no_headers)}


class handling:  # noqa: N801 - used like a function, as the context managers of contextlib are
    """Within this context, `request` is the current request, and its trace context is passed on.

        with handling(request(headers={"user": "ann"})):
            assert greet("hello") == "hello, ann"

    Args:
        request: The request that is being handled, or one that `zmdp.testing.request` has made.
    """

    __slots__ = ("_request", "_span", "_token")

    def __init__(self, request: Handled) -> None:
        self._request = request
        self._span: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        self._token = current.set(self._request)
        if opentelemetry_trace() is not None:
            try:
                self._span = _server_span(self._request)
                self._span.__enter__()
            except BaseException:
                current.reset(self._token)
                raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._span is not None:
                self._span.__exit__(kind, value, trace)
        finally:
            current.reset(self._token)


def _server_span(request: Handled) -> AbstractContextManager[Any]:
    attributes = _attributes(request.service)
    queued = _queue_seconds(request)
    if queued is not None:
        attributes[QUEUE_SECONDS] = queued
    span: AbstractContextManager[Any] = tracer().start_as_current_span(
        request.service,
        context=import_module("opentelemetry.propagate").extract(dict(request.headers)),
        kind=opentelemetry_trace().SpanKind.SERVER,
        attributes=attributes,
    )
    return span


def _queue_seconds(request: Handled) -> float | None:
    """Return how long a request has waited until now, at the client, the broker and the worker; None if unknown."""
    deadline: float | None = getattr(request, "deadline", None)
    ttl = request.headers.get(TTL)
    if deadline is None or ttl is None:
        return None
    try:
        seconds = float(ttl) - (deadline - time.monotonic())
    except ValueError:  # not from a client of ours
        return None
    return max(round(seconds, 3), 0.0) if math.isfinite(seconds) else None


def _attributes(service: str) -> dict[str, Any]:
    """Return the attributes of a span, by the names of OpenTelemetry's stable conventions for RPC."""
    return {"rpc.system.name": "mdp", "rpc.method": service}
