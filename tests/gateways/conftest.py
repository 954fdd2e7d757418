"""A broker, services and a gateway, which all tests of a module share: each of them in a thread."""

import httpx
import pytest
from support.gateways import running_gateway, running_services
from support.processes import TIMEOUT_SECONDS

from zmdp.clients import Client
from zmdp.testing import running_broker


@pytest.fixture(scope="module")
def broker():
    with running_broker(drain_timeout=0.0) as server:
        yield server


@pytest.fixture(scope="module")
def endpoint(broker):
    return broker.endpoints[0]


@pytest.fixture(scope="module")
def services(endpoint):
    with running_services(endpoint) as services, Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
        for name in ("echo", "parts", "fail", "binary"):
            client.request("mmi.service", name.encode())
        client.request("echo", b"")  # it waits for the worker
        client.request("parts", b"0")
        client.request("binary", b"")
        yield services


@pytest.fixture(scope="module")
def gateway(endpoint, services):
    with running_gateway(endpoint) as running:
        yield running


@pytest.fixture
def http(gateway):
    with httpx.Client(base_url=gateway.url, timeout=TIMEOUT_SECONDS) as client:
        yield client
