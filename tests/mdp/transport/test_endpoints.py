"""Which brokers a program connects to, and with which keys."""

import asyncio
import re

import pytest
from support.access import Folder

from zmdp.clients import AsyncClient, Client
from zmdp.interop.freelance.worker import FreelanceWorker
from zmdp.mdp.errors import SettingError
from zmdp.mdp.limits import DEFAULT_ENDPOINT
from zmdp.mdp.transport.endpoints import checked_brokers
from zmdp.workers import AsyncWorker, Worker

LEFT, RIGHT = "tcp://127.0.0.1:5555", "tcp://127.0.0.1:5556"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("keys"))


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("MDP_BROKER", "MDP_KEY", "MDP_BROKER_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("broker", "endpoints"),
    [
        (None, [DEFAULT_ENDPOINT]),
        (LEFT, [LEFT]),
        ([LEFT, RIGHT], [LEFT, RIGHT]),
        (f"{LEFT},{RIGHT}", [LEFT, RIGHT]),
        (f"{LEFT} {RIGHT}", [LEFT, RIGHT]),
        (f"{LEFT}, ipc:///tmp/a, b", [LEFT, "ipc:///tmp/a, b"]),
    ],
)
def test_endpoints(broker, endpoints):
    assert checked_brokers(broker) == (endpoints, None)


def test_each_broker_may_have_its_key(folder):
    shop, key = folder.settings("shop")["key"], folder.keys("shop", "stranger").server
    for right in (folder.path / "stranger.key", key.decode()):
        endpoints, keys = checked_brokers([LEFT, f"{RIGHT}={right}"], shop, folder.path / "broker.key")
        assert endpoints == [LEFT, RIGHT]
        assert keys.at(LEFT) == folder.keys("shop")
        assert keys.at(RIGHT) == folder.keys("shop", "stranger")
    _, keys = checked_brokers(f"{RIGHT}={key.decode()}", shop)
    assert keys.at(RIGHT).server == key
    assert checked_brokers(f"{LEFT}={key.decode()}", keys)[1].at(LEFT).server == key  # of a worker's copy, for example


def test_the_environment_has_the_defaults(folder, monkeypatch):
    monkeypatch.setenv("MDP_BROKER", f"{LEFT},{RIGHT}={folder.path / 'stranger.key'}")
    for name, value in folder.environment("shop").items():
        monkeypatch.setenv(name, value)
    endpoints, keys = checked_brokers(None)
    assert endpoints == [LEFT, RIGHT]
    assert keys.at(LEFT) == folder.keys("shop")
    assert keys.at(RIGHT) == folder.keys("shop", "stranger")
    # Arguments win.
    assert checked_brokers(RIGHT) == ([RIGHT], folder.keys("shop"))
    assert checked_brokers(None, folder.settings("resizer")["key"])[1].at(LEFT) == folder.keys("resizer")
    assert checked_brokers(LEFT, broker_key=folder.path / "stranger.key")[1] == folder.keys("shop", "stranger")
    assert checked_brokers(LEFT, folder.keys("resizer"))[1] == folder.keys("resizer")
    assert checked_brokers(LEFT, "") == ([LEFT], None)


def test_everything_that_connects_reads_the_environment(folder, monkeypatch):
    monkeypatch.setenv("MDP_BROKER", RIGHT)
    for name, value in folder.environment("shop").items():
        monkeypatch.setenv(name, value)
    with Client() as client:
        assert (client.endpoint, client._connect.keywords["key"]) == (RIGHT, folder.keys("shop"))

    async def settings():
        async with AsyncClient() as client:
            return client.endpoint, client._settings.keys

    assert asyncio.run(settings()) == (RIGHT, folder.keys("shop"))
    for worker in (Worker("echo"), AsyncWorker("echo")):
        assert (worker.settings.endpoints, worker.settings.keys) == ([RIGHT], folder.keys("shop"))
    assert FreelanceWorker(LEFT).settings.keys is None  # it has no broker


@pytest.mark.parametrize(
    ("broker", "key", "broker_key", "text"),
    [
        ([f"{LEFT}=broker.key", RIGHT], "shop", None, f"at {RIGHT} is missing: write {RIGHT}=KEY"),
        (f"{LEFT}=broker.key", None, None, "is of no use without a key of one's own: add --key"),
        (f"{LEFT}=nothing.key", "shop", None, f"the key of the broker at {LEFT}: cannot find the file nothing.key"),
        (LEFT, "shop", None, "or write the broker as ENDPOINT=KEY"),
        (5, None, None, "broker is 5"),
        ([], None, None, "broker is empty"),
        ([5], None, None, "broker is 5"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(folder, monkeypatch, broker, key, broker_key, text):
    monkeypatch.chdir(folder.path)
    with pytest.raises(SettingError, match=re.escape(text)):
        checked_brokers(broker, key and f"{key}.key_secret", broker_key)


def test_half_a_pair_in_the_environment_is_an_error(monkeypatch):
    monkeypatch.setenv("MDP_BROKER_KEY", "broker.key")
    with pytest.raises(SettingError, match="without a key of one's own"):
        Client()
