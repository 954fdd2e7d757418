"""Gateways, brokers and clients for tests with real sockets."""

from contextlib import ExitStack

import pytest
from support.flux_gateways import running_gateway

from zmdp.mdp.broker.link_ports import LinkTo
from zmdp.testing.broker import running_broker


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def broker(stack):
    """A broker, by its endpoint."""
    return stack.enter_context(running_broker()).endpoints[0]


@pytest.fixture
def gateway(stack, broker, tmp_path):
    """A gateway at the only broker."""
    return stack.enter_context(running_gateway(broker, tmp_path / "flux"))


@pytest.fixture
def client(stack, gateway):
    return stack.enter_context(gateway.client())


@pytest.fixture
def tree(stack, tmp_path):
    """A root with two brokers below it, and a gateway at each: ranks 0 (root), 1 (a) and 2 (b)."""
    root = stack.enter_context(running_broker(name="root")).endpoints[0]
    above = [LinkTo("parent", root)]
    endpoints = [root, *(stack.enter_context(running_broker(name=name, links=above)).endpoints[0] for name in "ab")]
    gateways = [
        stack.enter_context(running_gateway(endpoint, tmp_path / f"flux{rank}", size=3))
        for rank, endpoint in enumerate(endpoints)
    ]
    assert [each.gateway.instance.rank for each in gateways] == [0, 1, 2]
    return gateways
