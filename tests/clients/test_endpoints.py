"""The rule of failover, as a pure function and over real connections."""

import asyncio

import pytest
from support.processes import TIMEOUT_SECONDS
from support.router import Router

from zmdp.clients import AsyncClient, Client, RequestTimeout
from zmdp.mdp.endpoints import Endpoints


def followed(count, *losses):
    """The numbers of the endpoints used, while brokers are lost that have answered (True) or have not (False)."""
    endpoints = Endpoints([str(number) for number in range(count)])
    used = [endpoints.current]
    for answered in losses:
        used.append(endpoints.fail_over(answered=answered))
        assert used[-1] == endpoints.current
    return "".join(used)


@pytest.mark.parametrize(
    ("count", "losses", "used"),
    [
        (1, [True, False, True], "0000"),
        (3, [False, False, False, False], "01201"),  # as long as none answers, one after the other
        (3, [True], "01"),  # not the first, which has just been lost
        (3, [True, True], "010"),  # the second answered: back to the first
        (3, [True, False, True], "0120"),
        (3, [False, True, True], "0101"),
        (2, [True, True, False, True], "01010"),
    ],
)
def test_which_endpoint_is_next(count, losses, used):
    assert followed(count, *losses) == used


def test_leaving_and_returning():
    endpoints = Endpoints("ABC")
    assert (endpoints.current, endpoints.first, endpoints.at_first) == ("A", "A", True)
    used = [endpoints.advance() for _ in range(4)]
    assert (used, endpoints.at_first) == (["B", "C", "A", "B"], False)  # not "ABAB": A may drain as well
    assert (endpoints.restart(), endpoints.current, endpoints.at_first) == ("A", "A", True)


def test_a_legacy_client_returns_to_the_first_broker():
    with Router() as first, Router() as second, Router() as third:
        places = [each.endpoint for each in (first, second, third)]
        with Client(places, timeout=0.2, retries=0, protocol="0.2") as client:

            def answered_by(router):
                assert client.endpoint == router.endpoint
                client.send("echo", b"x")
                message = router.recv()
                router.send(message[0], b"MDPC02", b"\x03", b"echo", b"x")
                assert client.recv(timeout=TIMEOUT_SECONDS) == [b"x"]

            answered_by(first)
            for router, previous in ((second, first), (first, second)):
                with pytest.raises(RequestTimeout):
                    client.request("echo", b"lost")
                previous.recv()
                answered_by(router)


def test_a_legacy_asyncio_client_returns_to_the_first_broker():
    async def ask(client, router):
        asking = asyncio.create_task(client.request("echo", b"x", timeout=TIMEOUT_SECONDS))
        message = await asyncio.to_thread(router.recv)
        router.send(message[0], b"MDPC02", b"\x03", b"echo", b"x")
        assert await asking == [b"x"]
        assert client.endpoint == router.endpoint

    async def scenario():
        with Router() as first, Router() as second, Router() as third:
            async with AsyncClient(
                [each.endpoint for each in (first, second, third)], timeout=TIMEOUT_SECONDS, protocol="0.2"
            ) as client:
                for router in (first, second, first):
                    await ask(client, router)
                    with pytest.raises(RequestTimeout, match=f"through {router.endpoint} within"):
                        await client.request("echo", b"lost", timeout=0.1)
                    await asyncio.to_thread(router.recv)

    asyncio.run(scenario())
