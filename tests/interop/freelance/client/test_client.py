"""`FreelanceClient` and `AsyncFreelanceClient`: their API, for threads and for asyncio, with real servers."""

import asyncio
import logging
import os
import threading

import pytest
import zmq
from support.access import Folder
from support.processes import TIMEOUT_SECONDS, eventually, eventually_raises, free_endpoint

from zmdp.interop.freelance.client import AsyncFreelanceClient, FreelanceClient, connection
from zmdp.interop.freelance.worker import FreelanceWorker
from zmdp.mdp.errors import (
    BrokerUnreachable,
    ClosedError,
    CodecError,
    ServiceError,
    SettingError,
)
from zmdp.mdp.security.access import load


@pytest.fixture
def endpoints():
    return [free_endpoint(), free_endpoint()]


@pytest.fixture
def servers(endpoints):
    """Two servers, each of which says which one it is."""
    one, two = endpoints
    with FreelanceWorker(one, lambda request: [b"one", *request]), FreelanceWorker(two, lambda r: [b"two", *r]):
        yield endpoints


@pytest.fixture
def add(endpoints):
    """A server that adds numbers, and fails if it gets something else."""
    with FreelanceWorker(endpoints[0], sum, codec="json"):
        yield endpoints[0]


def answers(reply, *frames):
    return reply in ([b"one", *frames], [b"two", *frames])


# ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request(servers):
    with FreelanceClient(servers, timeout=TIMEOUT_SECONDS) as client:
        reply = client.request(b"x", b"y")
        assert answers(reply, b"x", b"y")
        assert reply.service in servers
        assert answers(client.request(), b"")
        assert answers(client.request(bytearray(b"x"), memoryview(b"y")), b"x", b"y")


def test_values(add):
    with FreelanceClient(add, timeout=TIMEOUT_SECONDS) as client:
        assert client.call([1, 2, 3]) == 6
        with pytest.raises(ServiceError) as caught:
            client.call(["a"])
        assert (caught.value.code, caught.value.service) == (500, add)
        with pytest.raises(CodecError):
            client.call(object())
        with pytest.raises(SettingError):
            client.call([1], codec="pickle")


def test_a_request_without_a_server():
    missing = free_endpoint()
    with FreelanceClient(missing, timeout=0.05) as client:
        with pytest.raises(BrokerUnreachable, match="no server could be reached at"):
            client.request(b"x")
        with pytest.raises(TimeoutError):
            client.request(b"x", timeout=0.01)
        assert client.ping(0.01) == {missing: None}
        assert [tuple(each) for each in client.servers()] == [(missing, False, None, 0)]


def test_a_server_under_another_name_cannot_be_reached(endpoints):
    """Its routing id is not the endpoint (C46)."""
    other = endpoints[0].replace("127.0.0.1", "localhost")
    with FreelanceWorker(endpoints[0], list), FreelanceClient(other, timeout=0.3) as client:
        with pytest.raises(BrokerUnreachable, match="is this its public name"):
            client.request(b"x")


def test_servers_and_pings(servers):
    with FreelanceClient(servers, timeout=TIMEOUT_SECONDS) as client:
        trips = client.ping(TIMEOUT_SECONDS)
        assert trips.keys() == set(servers)
        assert all(0 < seconds < TIMEOUT_SECONDS for seconds in trips.values())
        states = client.servers()
        assert {state.endpoint for state in states} == set(servers)
        assert all(state.alive and state.outstanding == 0 and state.silence < TIMEOUT_SECONDS for state in states)


def test_callbacks_may_use_the_client(servers):
    done = threading.Event()
    replies = []
    with FreelanceClient(servers, timeout=TIMEOUT_SECONDS) as client:

        def again(future):
            assert {server.endpoint for server in client.servers()} == set(servers)
            replies.append(future.result())
            client.submit(b"second").add_done_callback(lambda second: (replies.append(second.result()), done.set()))

        client.submit(b"first").add_done_callback(again)
        assert done.wait(TIMEOUT_SECONDS)
    assert answers(replies[0], b"first")
    assert answers(replies[1], b"second")


def test_closing_ends_what_is_outstanding():
    client = FreelanceClient(free_endpoint())
    future = client.submit(b"x")
    client.close()
    client.close()
    with pytest.raises(ClosedError):
        future.result()
    for use in (lambda: client.request(b"x"), client.servers, client.ping):
        with pytest.raises(ClosedError, match="this client was closed"):
            use()


def test_a_client_may_be_closed_in_a_callback(servers):
    closed = threading.Event()
    client = FreelanceClient(servers, timeout=TIMEOUT_SECONDS)
    client.submit(b"x").add_done_callback(lambda future: (client.close(), closed.set()))
    assert closed.wait(TIMEOUT_SECONDS)
    eventually(lambda: not any(each.name.startswith("zmdp-freelance") for each in threading.enumerate()))


def test_a_forked_process_may_not_use_the_client(servers):
    with FreelanceClient(servers, timeout=TIMEOUT_SECONDS) as client:
        assert answers(client.request(b"x"), b"x")
        pid = os.fork()
        if not pid:
            code = 1
            try:
                client.request(b"x")
            except ClosedError:
                client.close()  # does nothing
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert answers(client.request(b"x"), b"x")


def test_inproc():
    with zmq.Context() as context:
        with (
            FreelanceWorker("inproc://server", list, context=context),
            FreelanceClient("inproc://server", timeout=TIMEOUT_SECONDS, context=context) as client,
        ):
            assert client.request(b"x") == [b"x"]


def test_a_context_that_is_terminated_ends_the_client(caplog):
    context = zmq.Context()
    client = FreelanceClient(free_endpoint(), context=context)
    future = client.submit(b"x")
    with caplog.at_level(logging.WARNING):
        context.term()
        with pytest.raises(ClosedError):
            future.result(TIMEOUT_SECONDS)
    client.close()
    assert "the ZeroMQ context was terminated" in caplog.text


@pytest.fixture
def broken(monkeypatch):
    """The connection of every client has an error."""

    def step(*arguments):
        raise TypeError("a bug")

    monkeypatch.setattr(connection.FreelanceConnection, "step", step)


def test_an_error_of_its_own_closes_the_client(broken, caplog):
    with FreelanceClient(free_endpoint()) as client:
        eventually_raises(ClosedError, "this client was closed", lambda: client.request(b"x"))
    assert "unexpected error: the client is closed" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ([[]], {}),
        ([7], {}),
        (["tcp://127.0.0.1"], {}),
        (["nonsense"], {}),
        ([["tcp://127.0.0.1:1", "tcp://127.0.0.1:x"]], {}),
        (["tcp://127.0.0.1:1"], {"timeout": 0}),
        (["tcp://127.0.0.1:1"], {"timeout": None}),
        (["tcp://127.0.0.1:1"], {"ping": 0}),
        (["tcp://127.0.0.1:1"], {"ttl": 1}),
        (["tcp://127.0.0.1:1"], {"codec": "pickle"}),
        (["tcp://127.0.0.1:1"], {"key": "amy.key_secret"}),
    ],
)
@pytest.mark.parametrize("kind", [FreelanceClient, AsyncFreelanceClient])
def test_invalid_settings(kind, arguments, settings):
    with pytest.raises(SettingError):
        kind(*arguments, **settings)


def test_invalid_arguments(servers):
    with FreelanceClient(servers, timeout=TIMEOUT_SECONDS) as client:
        with pytest.raises(SettingError, match="frame 0 is of type str"):
            client.request("x")
        with pytest.raises(SettingError, match="timeout is -1"):
            client.request(b"x", timeout=-1)
        with pytest.raises(SettingError, match="timeout is 0"):
            client.ping(0)


# ── asyncio ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_asyncio_a_client_belongs_to_one_event_loop(servers, context):
    client = AsyncFreelanceClient(servers, timeout=TIMEOUT_SECONDS, context=context)

    async def use():
        return await client.request(b"x")

    assert answers(asyncio.run(use()), b"x")
    with pytest.raises(SettingError, match="another event loop"):
        asyncio.run(use())
    asyncio.run(client.close())


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def keyed(folder, name, server="broker"):
    settings = folder.settings(name, server)
    return {"key": settings["key"], "server_key": settings["broker_key"]}


def test_keys_and_roles(folder, endpoints):
    (endpoint, _) = endpoints
    with FreelanceWorker(endpoint, whose, access=load(folder.access)) as worker:
        with FreelanceClient(endpoint, timeout=TIMEOUT_SECONDS, **keyed(folder, "shop")) as client:
            assert client.request(b"x") == [b"shop"]
        with FreelanceClient(endpoint, timeout=TIMEOUT_SECONDS, **keyed(folder, "resizer")) as client:
            with pytest.raises(ServiceError, match="the role resizer may not call 'freelance'") as caught:
                client.request(b"x")
            assert caught.value.code == 403
        with FreelanceClient(endpoint, **keyed(folder, "stranger")) as client:
            eventually_raises(BrokerUnreachable, "refuses this key, which it does not know", ask(client))
        with FreelanceClient(endpoint) as client:
            eventually_raises(BrokerUnreachable, "--key", ask(client))
        (server,) = worker._connections
        assert server.session.dropped["unknown-key"]


def whose(request):
    return request.user.encode()


def ask(client):
    return lambda: client.request(b"x", timeout=0.1)


def test_a_client_that_was_refused_tries_again(folder, endpoints, monkeypatch):
    monkeypatch.setattr(connection, "REFUSED_RETRY_SECONDS", 0.05)
    (endpoint, _) = endpoints
    with FreelanceClient(endpoint, timeout=TIMEOUT_SECONDS, **keyed(folder, "stranger")) as client:
        with FreelanceWorker(endpoint, whose, access=load(folder.access)):
            eventually_raises(BrokerUnreachable, "refuses this key", ask(client))
        folder.write('[roles.stranger]\nkeys = ["stranger.key"]\ncall = ["*"]')
        with FreelanceWorker(endpoint, whose, access=load(folder.access)):
            assert client.request(b"x", timeout=TIMEOUT_SECONDS) == [b"stranger"]


def test_the_wrong_key_of_a_server(folder, endpoints):
    (endpoint, _) = endpoints
    with FreelanceWorker(endpoint, whose, access=load(folder.access)):
        with FreelanceClient(endpoint, **keyed(folder, "shop", "operator"), timeout=0.5) as client:
            with pytest.raises(BrokerUnreachable):
                client.request(b"x")
