"""What the gateway tells Prometheus, at `/metrics`."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..gateway import Gateway


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


def routes(gateway: Gateway) -> list[Route]:
    """Return the route, which is for callers of any role."""
    registry = CollectorRegistry()
    registry.register(_GatewayCollector(gateway))

    async def metrics(request: Request) -> Response:
        gateway.caller(request.scope)
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type, "cache-control": "no-store"})

    return [Route("/metrics", metrics, methods=["GET"])]
