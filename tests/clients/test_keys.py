"""Clients and workers with keys, at brokers that require them and at brokers that do not."""

import asyncio
import threading
from contextlib import ExitStack, contextmanager

import pytest
import zmq
from support.access import Folder
from support.loops import serving
from support.processes import TIMEOUT_SECONDS, eventually_raises

from zmdp.clients import AsyncClient, Client
from zmdp.mdp.errors import BrokerUnreachable, RequestRejected, RequestTimeout, SettingError
from zmdp.mdp.limits import Limits
from zmdp.testing import running_broker
from zmdp.workers import AsyncWorker, Worker

PROTOCOLS = ("X1", "0.2", "0.1")
BEATS = {"heartbeat": 0.2, "liveness": 50}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def server(folder):
    with folder.broker(limits=Limits(**BEATS)) as server:
        yield server


@pytest.fixture(scope="module")
def endpoint(server):
    return server.endpoints[0]


def running(worker):
    """Run a worker of either kind, an AsyncWorker in an event loop of its own."""
    return worker if isinstance(worker, Worker) else serving(worker)


async def shout_async(request):
    return request[0].upper()


def shout(request):
    return request[0].upper()


def workers(endpoint, protocol, **keys):
    settings = {"broker": endpoint, "protocol": protocol, **BEATS, **keys}
    yield Worker(f"threads-{protocol}", shout, **settings)
    yield AsyncWorker(f"asyncio-{protocol}", shout_async, **settings)


@contextmanager
def proxied(endpoint, keys):
    """The endpoint of a proxy that has keys of its own, for clients that have none."""
    context = zmq.Context()
    front, back, control, stop = (context.socket(kind) for kind in (zmq.ROUTER, zmq.DEALER, zmq.PAIR, zmq.PAIR))
    front.bind("tcp://127.0.0.1:*")
    control.bind("inproc://control")
    stop.connect("inproc://control")
    keys.apply(back)
    back.connect(endpoint)
    thread = threading.Thread(target=zmq.proxy_steerable, args=(front, back, None, control))
    thread.start()
    try:
        yield front.last_endpoint.decode()
    finally:
        stop.send(b"TERMINATE")
        thread.join()
        context.destroy(linger=0)


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:*", "ipc://{}/socket"])
def test_every_kind_of_client_reaches_every_kind_of_worker(folder, bind):
    async def call_all(endpoint, protocol, services):
        async with AsyncClient(
            endpoint, timeout=TIMEOUT_SECONDS, protocol=protocol, **folder.settings("shop")
        ) as client:
            assert await asyncio.gather(*(client.request(each, b"a") for each in services)) == [[b"A"]] * len(services)

    with ExitStack() as stack:
        endpoint = stack.enter_context(folder.broker(bind.format(folder.path), limits=Limits(**BEATS))).endpoints[0]
        services = []
        for protocol in PROTOCOLS:
            for worker in workers(endpoint, protocol, **folder.settings("resizer")):
                stack.enter_context(running(worker))
                services.append(worker.service)
        for protocol in PROTOCOLS:
            with Client(endpoint, timeout=TIMEOUT_SECONDS, protocol=protocol, **folder.settings("shop")) as client:
                assert [client.request(each, b"a") for each in services] == [[b"A"]] * len(services)
                if protocol == "X1":
                    assert [each.result() for each in [client.submit(services[0], b"a") for _ in range(100)]]
            asyncio.run(call_all(endpoint, protocol, services))


@pytest.mark.parametrize("settings", [{"protocol": "X1"}, {"protocol": "0.1"}, {"protocol": "0.2", "envelope": True}])
def test_a_proxy_with_a_key_of_its_own(folder, endpoint, settings):
    with (
        Worker("shout", shout, broker=endpoint, **BEATS, **folder.settings("resizer")),
        proxied(endpoint, folder.keys("shop")) as front,
        Client(front, timeout=TIMEOUT_SECONDS, **settings) as client,
    ):
        assert client.request("shout", b"a") == [b"A"]


REFUSED = {
    "unknown key": ("stranger", "broker", r"the broker refuses this key, .* `mdp-keys allow ROLE -- '.{40}'` adds it"),
    "wrong broker": ("shop", "stranger", r"the broker ended the handshake: its public key is not .{40}, the one given"),
    "no key": (None, "broker", r"admits only known keys(:|\? Then) pass --key and --broker-key"),
}


def settings_of(folder, name, broker):
    return {} if name is None else folder.settings(name, broker)


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_call_that_the_broker_does_not_admit(folder, endpoint, case, protocol):
    name, broker, text = REFUSED[case]
    settings = {"timeout": 0.3, "protocol": protocol, **settings_of(folder, name, broker)}

    async def call():
        async with AsyncClient(endpoint, **settings) as client:
            await client.request("echo", b"")

    with Client(endpoint, retries=0, **settings) as client:
        raised = eventually_raises(RequestTimeout, text, lambda: client.request("echo", b""))
    assert isinstance(raised, BrokerUnreachable)
    raised = eventually_raises(RequestTimeout, text, lambda: asyncio.run(call()))
    assert isinstance(raised, BrokerUnreachable)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_keys_at_a_broker_that_uses_none(folder, protocol):
    with running_broker() as server:
        settings = {"timeout": 0.3, "retries": 0, "protocol": protocol, **folder.settings("shop")}
        with Client(server.endpoints[0], **settings) as client:
            raised = eventually_raises(RequestTimeout, "use keys", lambda: client.request("echo", b""))
        assert isinstance(raised, BrokerUnreachable)


def test_a_refusal_ends_requests_that_have_no_limit(folder, endpoint):
    async def call():
        async with AsyncClient(endpoint, timeout=None, **folder.settings("stranger")) as client:
            await asyncio.wait_for(client.request("echo", b""), TIMEOUT_SECONDS)

    with pytest.raises(BrokerUnreachable, match="refuses this key"):
        asyncio.run(call())


def test_another_broker_may_admit_a_client_that_one_refuses(tmp_path):
    folder = Folder(tmp_path)
    settings = folder.settings("stranger")
    with folder.broker() as first:
        folder.write('[roles.web]\nkeys = ["stranger.key"]\ncall = ["*"]\noffer = ["*"]\n')
        with folder.broker() as second, Worker("shout", shout, broker=second.endpoints[0], **settings):
            with Client([first.endpoints[0], second.endpoints[0]], timeout=TIMEOUT_SECONDS, **settings) as client:
                assert client.request("shout", b"a") == [b"A"]
                assert client.endpoint == second.endpoints[0]


@pytest.mark.parametrize("kind", [Client, AsyncClient, Worker, AsyncWorker])
def test_both_keys_or_none(folder, kind):
    for given, missing in (("key", "broker_key"), ("broker_key", "key")):
        with pytest.raises(SettingError, match=f"add --{missing.replace('_', '-')} "):
            kind("tcp://127.0.0.1:1", **{given: folder.settings("shop")[given]})


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("kind", [0, 1], ids=["threads", "asyncio"])
def test_a_worker_that_the_broker_does_not_admit_logs_why(folder, endpoint, case, kind, logged):
    name, broker, _ = REFUSED[case]
    text = {"unknown key": "the broker refuses this key", "wrong broker": "its public key is not", "no key": "key"}[
        case
    ]
    worker = list(workers(endpoint, "X1", **settings_of(folder, name, broker)))[kind]
    with running(worker):
        assert logged(text)


def test_a_worker_serves_once_its_key_is_allowed(tmp_path, logged):
    folder = Folder(tmp_path)
    with folder.broker() as server:
        endpoint = server.endpoints[0]
        with (
            Worker("shout", shout, broker=endpoint, **folder.settings("stranger")),
            Client(endpoint, timeout=TIMEOUT_SECONDS, **folder.settings("shop")) as client,
        ):
            assert logged("refuses this key")
            folder.write(
                '[roles.new]\nkeys = ["stranger.key"]\noffer = ["*"]\n[roles.shop]\nkeys = ["shop.key"]\ncall = ["*"]\n'
            )
            server.reload()
            assert client.request("shout", b"a", timeout=TIMEOUT_SECONDS) == [b"A"]


def test_secret_keys_are_not_shown(folder):
    keys = folder.keys("shop")
    assert keys.secret.decode() not in repr(keys)


def test_a_client_that_may_not_know_of_a_service_is_told_so(folder, endpoint):
    with Client(endpoint, timeout=TIMEOUT_SECONDS, **folder.settings("resizer")) as client:
        client.available("anything")  # it may offer everything
    folder.write(folder.access.read_text().split("\n", 1)[1] + '[roles.narrow]\nkeys = ["stranger.key"]\n')
    with folder.broker() as narrow:
        where = narrow.endpoints[0]
        with Client(where, timeout=TIMEOUT_SECONDS, **folder.settings("stranger")) as client:
            with pytest.raises(RequestRejected, match="may neither call nor offer 'resize'") as refused:
                client.available("resize")
            assert refused.value.code == 403

        async def ask():
            async with AsyncClient(where, timeout=TIMEOUT_SECONDS, **folder.settings("stranger")) as client:
                await client.available("resize")

        with pytest.raises(RequestRejected, match="may neither call nor offer 'resize'"):
            asyncio.run(ask())
