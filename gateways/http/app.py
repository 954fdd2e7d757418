"""The ASGI application: `POST /services/NAME` without any framework, everything else through Starlette's routes."""

import logging
import socket
import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...mdp.errors import BrokerUnreachable, RequestTimeout, ZmdpError
from ...mdp.http.asgi import respond
from ...mdp.http.problems import Problem, problem_of
from ...mdp.http.server import Server
from ..gateway import Gateway, Scope
from .jobs import routes as jobs
from .openapi import routes as openapi
from .services.call import ServiceCalls
from .services.stream import BrokenOff
from .services.translation import PREFIX

READY_TIMEOUT_SECONDS: Final = 5.0
_KINDS: Final[Mapping[int, str]] = {404: "not-found", 405: "method-not-allowed"}
"""The problems for errors that Starlette reports."""

log = logging.getLogger("zmdp.gateway")


class Application:
    """The gateway as an ASGI application."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._calls = ServiceCalls(gateway)
        self._registry = CollectorRegistry()
        self._registry.register(_GatewayCollector(gateway))
        self._routes = Starlette(
            routes=[
                Route("/services", self._services, methods=["GET"]),
                Route("/livez", self._livez, methods=["GET"]),
                Route("/readyz", self._readyz, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                *jobs.routes(gateway),
                *openapi.routes(gateway),
            ],
            exception_handlers={
                Problem: _answer,
                ZmdpError: _answer,
                HTTPException: _answer,
                Exception: _answer,
                ClientDisconnect: _ignore,
            },
        )

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["raw_path"].startswith(PREFIX):
            await self._call(scope, receive, send)
        else:
            with suppress(Exception):  # already answered, and logged
                await self._routes(scope, receive, send)

    async def _call(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer a request for a service."""
        try:
            await self._calls(scope, receive, send)
        except (ClientDisconnect, BrokenOff):
            pass  # the server closes the connection, so the client sees that the response is not complete
        except Exception as error:  # noqa: BLE001 - the last resort: it is logged and answered
            await respond(send, *_problem(error, scope["method"], scope["path"]).response())

    async def _services(self, request: Request) -> Response:
        """Return the services that exist now and that the caller may know of."""
        return JSONResponse(await self._gateway.list_services(self._gateway.caller(request.scope)))

    async def _livez(self, request: Request) -> Response:
        """Answer as long as the event loop runs, without access control: nothing else is cured by a restart."""
        del request
        return JSONResponse({"live": True})

    async def _readyz(self, request: Request) -> Response:
        """Return whether the broker answers and there is room for a request, without access control."""
        del request
        reasons = []
        try:
            with self._gateway.admit():
                await self._gateway.upstream.client.request(
                    "mmi.service", b"mmi.service", timeout=READY_TIMEOUT_SECONDS
                )
        except Problem as problem:
            reasons.append(problem.detail)
        except (BrokerUnreachable, RequestTimeout):
            reasons.append(f"the broker at {self._gateway.upstream.client.endpoint} does not answer")
        return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)

    async def _metrics(self, request: Request) -> Response:
        """Return the gateway's metrics for Prometheus, to callers of any role."""
        self._gateway.caller(request.scope)
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"content-type": content_type, "cache-control": "no-store"})


class _GatewayCollector(Collector):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterable[Metric]:
        gateway = self._gateway
        yield CounterMetricFamily(
            "mdp_gateway_requests", "Requests that were not refused because of a limit.", value=gateway.accepted
        )
        yield GaugeMetricFamily(
            "mdp_gateway_outstanding_requests", "Requests that have not been answered.", value=gateway.outstanding
        )
        yield GaugeMetricFamily("mdp_gateway_memory_bytes", "What counts against --max-memory.", value=gateway.memory)


def _problem(error: Exception, method: str, path: str) -> Problem:
    """Return the problem that tells a client about an exception."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, ZmdpError):
        return problem_of(error)
    if isinstance(error, HTTPException):
        headers = [(name.encode(), value.encode()) for name, value in (error.headers or {}).items()]
        kind = _KINDS.get(error.status_code)
        return Problem(
            kind or "http", f"{method} {path}: {error.detail}", headers=headers,
            status=None if kind else error.status_code, title=None if kind else error.detail,
        )  # fmt: skip
    log.error("%s %s failed", method, path, exc_info=error)
    return Problem("internal", f"an error of the gateway, which its log shows: {type(error).__name__}")


async def _answer(request: Request, error: Exception) -> Response:
    """Return the response for an exception: Starlette's handler for all of them."""
    status, headers, body = _problem(error, request.method, request.url.path).response()
    response = Response(body, status)
    response.raw_headers = list(headers)
    return response


async def _ignore(request: Request, error: Exception) -> Response:
    """Return a response that is not sent: the client has disconnected."""
    del request, error
    return Response()


def application(gateway: Gateway) -> Any:
    """Return the application, with what browsers need if pages of other origins may use the gateway."""
    found = Application(gateway)
    if not gateway.settings.allow_origins:
        return found
    return CORSMiddleware(
        found, gateway.settings.allow_origins, ("GET", "POST", "DELETE"), ("*",),
        expose_headers=("location", "retry-after"),
    )  # fmt: skip


def gateway_server(gateway: Gateway, listener: socket.socket, tls: ssl.SSLContext | None) -> Server:
    """Return the server of a gateway."""
    return Server(application(gateway), gateway.settings, listener, tls, owner=gateway)
