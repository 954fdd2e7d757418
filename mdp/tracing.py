"""W3C trace context: `traceparent` and `tracestate` go from the request that is handled to those made meanwhile.

In a program that uses OpenTelemetry (has imported `opentelemetry.trace`) there are spans as well: one of kind CLIENT
around each request, one of kind SERVER around each handler.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from importlib import import_module
from types import TracebackType
from typing import Any, Final, Protocol

HEADERS: Final = ("traceparent", "tracestate")

Headers = Mapping[str, str]
Finish = Callable[[BaseException | None], None]
"""To be called when a request has ended, with what it raised."""



class Handled(Protocol):
    """A request that is handled.  Its headers are looked at when somebody asks for them, which seldom happens."""

    @property
    def headers(self) -> Headers:
        """The headers that the client sent."""


_handled: ContextVar[Handled | None] = ContextVar("zmdp-handled", default=None)
_nothing: Final[Headers] = {}


def in_use() -> Any:
    """The module `opentelemetry.trace`, if this program has imported it."""
    return sys.modules.get("opentelemetry.trace")


def tracer() -> Any:
    """Makes spans; those of the provider that the program has set, if it has."""
    return in_use().get_tracer("zmdp")


def calling(service: str, headers: Headers | None) -> tuple[Headers | None, Finish]:
    """The headers of a request to `service`, with the trace context; the caller's own go before."""
    if in_use() is None:
        request = _handled.get()
        if request is not None:
            handled = request.headers
            passed = {name: handled[name] for name in HEADERS if name in handled}
            if passed:
                return _with(passed, headers), untraced
        return headers, untraced
    return _calling_with_span(service, headers)


def untraced(error: BaseException | None) -> None:
    """What `calling` gives to be called in the end where nothing is to be done."""
    del error


def _calling_with_span(service: str, headers: Headers | None) -> tuple[Headers | None, Finish]:
    trace, propagate = in_use(), import_module("opentelemetry.propagate")
    span = tracer().start_span(service, kind=trace.SpanKind.CLIENT, attributes=_attributes(service))
    carrier: dict[str, str] = {}
    if span.get_span_context().is_valid:
        propagate.inject(carrier, context=trace.set_span_in_context(span))

    def finish(error: BaseException | None) -> None:
        if error is not None:
            span.record_exception(error)
            span.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
        span.end()

    return (_with(carrier, headers) if carrier else headers), finish


def _with(passed: dict[str, str], headers: Headers | None) -> Headers:
    """Both, the caller's own first: with a `traceparent` of its own, another's `tracestate` does not belong to it."""
    if headers and HEADERS[0] in headers:
        passed = {name: value for name, value in passed.items() if name not in HEADERS}
    return {**passed, **(headers or _nothing)}


class handling:  # noqa: N801 - it is used as a function is, as those of contextlib are
    """Within the block `request` is handled."""

    __slots__ = ("_request", "_service", "_span", "_token")

    def __init__(self, service: str, request: Handled) -> None:
        self._service = service
        self._request = request
        self._span: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        self._token = _handled.set(self._request)
        if in_use() is not None:
            try:
                self._span = _handling_with_span(self._service, self._request.headers)
                self._span.__enter__()
            except BaseException:
                _handled.reset(self._token)
                raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._span is not None:
                self._span.__exit__(kind, value, trace)
        finally:
            _handled.reset(self._token)


def _handling_with_span(service: str, headers: Headers) -> AbstractContextManager[Any]:
    span: AbstractContextManager[Any] = tracer().start_as_current_span(
        service,
        context=import_module("opentelemetry.propagate").extract(dict(headers)),
        kind=in_use().SpanKind.SERVER,
        attributes=_attributes(service),
    )
    return span


def _attributes(service: str) -> dict[str, Any]:
    return {"rpc.system": "mdp", "rpc.service": service}
