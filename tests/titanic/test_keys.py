"""Titanic and its callers with keys, at a broker that requires them."""

import asyncio
import logging
import sqlite3
from contextlib import closing

import pytest
from support.access import Folder
from support.processes import TIMEOUT_SECONDS, eventually
from support.titanics import BEATS, LIMITS, serving

from zmdp.clients import AsyncClient, Client, RequestRejected
from zmdp.mdp.errors import SettingError
from zmdp.titanic import AsyncTitanic, Titanic
from zmdp.titanic.server.program import Server
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


@pytest.mark.parametrize("told", [{}, {"service_schedules": True}], ids=["by default", "told to"])
def test_what_workers_may_have_submitted_is_decided_where_roles_are(folder, caplog, told):
    caplog.set_level(logging.WARNING)
    db = str(folder.path / "titanic.db")

    def schedules():
        with closing(sqlite3.connect(db)) as connection:
            return connection.execute("SELECT name FROM titanic_schedules").fetchall()

    with folder.broker(limits=LIMITS) as broker:
        endpoint = broker.endpoints[0]
        about = {"schedule": {"every": 86400}}
        with (
            serving(endpoint, db, **folder.settings("titanic"), **told),
            Worker("echo", list, broker=endpoint, about=about, **BEATS, **folder.settings("resizer")),
        ):
            if told:
                eventually(lambda: schedules() == [("service:echo",)])
            else:
                eventually(
                    lambda: any("echo declare a schedule, which is not followed" in each for each in caplog.messages)
                )
                assert schedules() == []
