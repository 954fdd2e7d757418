"""W3C trace context: `traceparent` and `tracestate` go from the request that is handled to those made meanwhile.

With the package `opentelemetry-api` there are spans as well: one of kind CLIENT around each request, one of kind SERVER
around each handler.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib import import_module
from typing import Any, Final

trace: Any = None
propagate: Any = None
tracer: Any = None
with suppress(ImportError):
    trace, propagate = import_module("opentelemetry.trace"), import_module("opentelemetry.propagate")
    tracer = trace.get_tracer("zmdp")  # also one that is got before there is a provider uses that once there is

HEADERS: Final = ("traceparent", "tracestate")

Headers = Mapping[str, str]
Finish = Callable[[BaseException | None], None]
"""To be called when a request has ended, with what it raised."""

_handled: ContextVar[Headers | None] = ContextVar("zmdp-headers", default=None)
_nothing: Final[Headers] = {}


def calling(service: str, headers: Headers | None) -> tuple[Headers | None, Finish]:
    """The headers of a request to `service`, with the trace context; the caller's own go before."""
    if trace is None:
        handled = _handled.get()
        if handled:
            passed = {name: handled[name] for name in HEADERS if name in handled}
            if passed:
                return _with(passed, headers), _done
        return headers, _done
    return _calling_with_span(service, headers)


def _done(error: BaseException | None) -> None:
    del error


def _calling_with_span(service: str, headers: Headers | None) -> tuple[Headers | None, Finish]:
    span = tracer.start_span(service, kind=trace.SpanKind.CLIENT, attributes=_attributes(service))
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


@contextmanager
def handling(service: str, headers: Headers) -> Iterator[None]:
    """Within the block a request with these headers is handled."""
    token = _handled.set(headers)
    try:
        if trace is None:
            yield
        else:
            with tracer.start_as_current_span(
                service,
                context=propagate.extract(dict(headers)),
                kind=trace.SpanKind.SERVER,
                attributes=_attributes(service),
            ):
                yield
    finally:
        _handled.reset(token)


def _attributes(service: str) -> dict[str, Any]:
    return {"rpc.system": "mdp", "rpc.service": service}
