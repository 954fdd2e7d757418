"""Titanic and its callers with keys, at a broker that requires them."""

import asyncio

import pytest
from support.access import Folder
from support.processes import TIMEOUT_SECONDS
from support.titanics import BEATS, LIMITS, serving

from zmdp.clients import AsyncClient, Client, RequestRejected
from zmdp.mdp.errors import SettingError
from zmdp.titanic import AsyncTitanic, Titanic
from zmdp.titanic.server import Server
from zmdp.workers import Worker


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_from_the_caller_to_the_service_and_back(folder):
    async def submit(endpoint):
        async with AsyncClient(endpoint, timeout=TIMEOUT_SECONDS, **folder.settings("shop")) as client:
            return await (await AsyncTitanic(client).submit("echo", b"asyncio")).result(TIMEOUT_SECONDS)

    with folder.broker(limits=LIMITS) as broker:
        endpoint = broker.endpoints[0]
        with (
            serving(endpoint, str(folder.path / "titanic.db"), **folder.settings("titanic")),
            Worker("echo", list, broker=endpoint, **BEATS, **folder.settings("resizer")),
            Client(endpoint, timeout=TIMEOUT_SECONDS, **folder.settings("shop")) as client,
        ):
            with Titanic(client).submit("echo", b"threads") as ticket:
                assert ticket.result(TIMEOUT_SECONDS) == [b"threads"]
            assert asyncio.run(submit(endpoint)) == [b"asyncio"]


def test_a_caller_whose_role_may_not_call_titanic(folder):
    with folder.broker(limits=LIMITS) as broker:
        endpoint = broker.endpoints[0]
        with (
            serving(endpoint, str(folder.path / "titanic.db"), **folder.settings("titanic")),
            Client(endpoint, timeout=TIMEOUT_SECONDS, **folder.settings("resizer")) as client,
            pytest.raises(RequestRejected, match=r"service 'titanic\.request': role resizer may not call it"),
        ):
            Titanic(client).submit("echo", b"")


def test_keys_that_cannot_be_used(folder):
    with pytest.raises(SettingError, match="add --broker-key"):
        Server(str(folder.path / "titanic.db"), key=folder.path / "titanic.key_secret")
