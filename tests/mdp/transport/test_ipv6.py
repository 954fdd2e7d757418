"""Brokers and Freelance servers that listen on IPv6 addresses."""

import asyncio
import socket

import pytest
from support.processes import TIMEOUT_SECONDS

from zmdp.clients import AsyncClient, Client
from zmdp.interop.freelance.client import FreelanceClient
from zmdp.interop.freelance.worker import FreelanceWorker
from zmdp.mdp.broker.io.dialer import LinkTo
from zmdp.testing import running_broker
from zmdp.workers import Worker


@pytest.fixture
def port():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as found:
            return found.getsockname()[1]
    except OSError:
        pytest.skip("this machine has no IPv6")


def test_a_broker_listens_on_both_families_and_is_linked_over_ipv6(port):
    async def ask(endpoint):
        async with AsyncClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
            return await client.request("echo", b"x")

    # The port that is free for one family may be taken for the other.
    with running_broker(f"tcp://[::1]:{port}", "tcp://127.0.0.1:*") as server:
        endpoints = server.endpoints
        assert endpoints[0] == f"tcp://[::1]:{port}"
        with running_broker(links=[LinkTo("peer", endpoints[0])]) as linked, Worker("echo", list, broker=endpoints[0]):
            for endpoint in (*endpoints, *linked.endpoints):
                with Client(endpoint, timeout=TIMEOUT_SECONDS) as client:
                    assert client.request("echo", b"x") == [b"x"]
            assert asyncio.run(ask(endpoints[0])) == [b"x"]


def test_freelance(port):
    endpoint = f"tcp://[::1]:{port}"
    with FreelanceWorker(endpoint, list), FreelanceClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
        assert client.request(b"x") == [b"x"]
