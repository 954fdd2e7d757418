"""`FreelanceWorker` and `AsyncFreelanceWorker`: handlers of every kind, settings, and how they end."""

import asyncio
import logging
import socket
import threading
from dataclasses import replace

import pytest
import zmq
from support.freelance import Caller
from support.processes import TIMEOUT_SECONDS, eventually, free_endpoint

from zmdp.interop.freelance.client import AsyncFreelanceClient, FreelanceClient
from zmdp.interop.freelance.worker import AsyncFreelanceWorker, FreelanceWorker, freelance_worker
from zmdp.mdp.errors import BindError, ClosedError, ServiceError, SettingError
from zmdp.workers import (
    AsyncWorker,
    Worker,
    current_request,
)


@pytest.fixture
def endpoint():
    return free_endpoint()


def port_of(endpoint):
    return endpoint.rpartition(":")[2]


# ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_codec_and_the_current_request(endpoint):
    def handler(value):
        return [value, current_request().service, current_request().user]

    worker = FreelanceWorker(endpoint, handler, codec="json", service="lookup")
    with worker, FreelanceClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
        assert client.call({"a": 1}) == [{"a": 1}, "lookup", ""]
        with pytest.raises(ServiceError) as caught:
            client.request(b"not JSON")
        assert caught.value.code == 400


def test_the_guides_loop(endpoint):
    ended = threading.Event()
    with FreelanceWorker(endpoint) as worker:

        def serve():
            reply = None
            while (request := worker.recv(reply, timeout=TIMEOUT_SECONDS)) is not None:
                worker.send_partial(b"part")
                reply = request
            ended.set()

        thread = threading.Thread(target=serve)
        thread.start()
        with FreelanceClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
            assert client.request(b"x") == [b"part", b"x"]
            assert client.request(b"y") == [b"part", b"y"]
        worker.stop()
        assert ended.wait(TIMEOUT_SECONDS)
        thread.join()


def test_nothing_begins_after_stop(endpoint):
    begun = []

    def work(request):
        begun.append(request[0])
        (waiting,) = worker._connections
        eventually(lambda: waiting.session.waiting == 1)
        worker.stop()
        return request

    with Caller(endpoint) as caller:
        worker = FreelanceWorker(endpoint, work)
        with worker:
            caller.send(endpoint, b"1", b"one")
            caller.send(endpoint, b"2", b"two")
            assert caller.recv()[1:] == [b"1", b"one"]
            assert worker.wait(TIMEOUT_SECONDS)
    assert begun == [b"one"]


def test_a_worker_starts_once(endpoint):
    worker = FreelanceWorker(endpoint, list)
    with worker:
        with pytest.raises(ClosedError):
            worker.start()
    with worker.copy() as copied, FreelanceClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
        assert client.request(b"x") == [b"x"]
    assert (copied.endpoint, copied.service) == (endpoint, b"freelance")
    other = free_endpoint()
    assert (worker.copy(broker=other).endpoint, worker.copy(broker=other).bind) == (other, other)


def test_a_context_that_is_terminated_ends_the_worker(endpoint, logged):
    context = zmq.Context()
    worker = FreelanceWorker(endpoint, list, context=context)
    worker.start()
    context.term()
    assert worker.wait(TIMEOUT_SECONDS)
    assert logged("the ZeroMQ context was terminated")


# ── asyncio ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_asyncio_handlers(endpoint):
    waiting = []

    async def handler(request):
        if request[0] == b"fail":
            raise ServiceError(404, "no such user")
        if request[0] == b"cancelled":
            task = asyncio.ensure_future(asyncio.get_running_loop().create_future())
            asyncio.get_running_loop().call_soon(task.cancel)
            await task
        waiting.append(request)
        while len(waiting) < 3:  # until others have come
            await asyncio.sleep(0)
        return request

    async def main():
        async with (
            AsyncFreelanceWorker(endpoint, handler),
            AsyncFreelanceClient(endpoint, timeout=TIMEOUT_SECONDS) as client,
        ):
            replies = await asyncio.gather(*(client.request(b"%d" % n) for n in range(3)))
            assert replies == [[b"0"], [b"1"], [b"2"]]
            for body, code in ((b"fail", 404), (b"cancelled", 500)):
                with pytest.raises(ServiceError) as caught:
                    await client.request(body)
                assert caught.value.code == code
            assert await client.ping(TIMEOUT_SECONDS) != {endpoint: None}

    asyncio.run(main())


def test_asyncio_abort_waits_for_the_handlers_that_it_cancels(endpoint):
    ended, cleaned = [], asyncio.Event()

    async def hold(request):
        try:
            await asyncio.sleep(TIMEOUT_SECONDS)
        finally:
            await cleaned.wait()
            ended.append(request)

    async def scenario():
        worker = AsyncFreelanceWorker(endpoint, hold)
        worker.start()
        async with AsyncFreelanceClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
            asked = asyncio.create_task(client.request(b"x"))
            while not worker.requests:
                await asyncio.sleep(0.01)
            worker.abort()
            asyncio.get_running_loop().call_later(0.05, cleaned.set)
            await worker.wait()
            assert ended == [[b"x"]]
            asked.cancel()

    asyncio.run(scenario())


async def echo(request):
    return request


def test_asyncio_a_port_in_use(endpoint):
    async def main():
        with pytest.raises(BindError, match="another program is listening there"):
            AsyncFreelanceWorker(endpoint, echo).start()

    with FreelanceWorker(endpoint, list):
        asyncio.run(main())


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "public", ["tcp://*:5555", "tcp://0.0.0.0:5555", "tcp://[::]:5555", "tcp://127.0.0.1:*", "tcp://127.0.0.1:0"]
)
def test_a_wildcard_is_not_a_public_endpoint(public):
    with pytest.raises(SettingError, match=r"--freelance tcp://server1:5555 --bind tcp://\*:5555"):
        FreelanceWorker(public, list)


def test_a_wildcard_with_a_public_endpoint(endpoint):
    worker = FreelanceWorker(endpoint, list, bind=f"tcp://*:{port_of(endpoint)}", insecure=True)
    with worker, FreelanceClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
        assert client.request(b"x") == [b"x"]


def test_a_name_as_public_endpoint(endpoint):
    named = f"tcp://localhost:{port_of(endpoint)}"
    with FreelanceWorker(named, list), FreelanceClient(named, timeout=TIMEOUT_SECONDS) as client:
        assert client.request(b"x") == [b"x"]


@pytest.mark.parametrize(
    ("bind", "text"),
    [
        ("tcp://*:{}", "refused to listen on tcp://\\*:.*--insecure"),
        ("tcp://192.0.2.1:{}", "refused to listen on"),
        ("tcp://127.0.0.1:{}", None),
    ],
)
def test_other_machines_may_connect_only_with_access_control(endpoint, bind, text):
    worker = FreelanceWorker(endpoint, list, bind=bind.format(port_of(endpoint)))
    if text is None:
        worker.start()
        worker.stop()
        assert worker.wait(TIMEOUT_SECONDS)
    else:
        with pytest.raises(BindError, match=text):
            worker.start()


@pytest.mark.parametrize(
    ("public", "text"),
    [
        ("tcp://192.0.2.1:{}", "it is not an address of this machine; if it is the public one, add --bind"),
        ("tcp://no-such-host.invalid:{}", "the name no-such-host.invalid has no address"),
    ],
)
def test_an_address_of_another_machine(endpoint, public, text):
    with pytest.raises(BindError, match=text):
        FreelanceWorker(public.format(port_of(endpoint)), list, insecure=True).start()


def test_an_ipc_path_in_use(tmp_path):
    endpoint = f"ipc://{tmp_path}/server"
    with FreelanceWorker(endpoint, list), FreelanceClient(endpoint, timeout=TIMEOUT_SECONDS) as client:
        with pytest.raises(BindError, match="another program is listening there"):
            FreelanceWorker(endpoint, list).start()
        assert client.request(b"x") == [b"x"]
    (tmp_path / "notes").write_text("x")
    with pytest.raises(BindError, match="notes exists and is not a socket"):
        FreelanceWorker(f"ipc://{tmp_path}/notes", list).start()
    assert (tmp_path / "notes").read_text() == "x"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(f"{tmp_path}/old")
    with (
        FreelanceWorker(f"ipc://{tmp_path}/old", list),
        FreelanceClient(f"ipc://{tmp_path}/old", timeout=TIMEOUT_SECONDS) as client,
    ):
        assert client.request(b"x") == [b"x"]


@pytest.mark.parametrize("kind", [FreelanceWorker, AsyncFreelanceWorker])
def test_a_setting_that_is_misspelt_or_another_workers(kind):
    with pytest.raises(TypeError, match=r"a Freelance worker has no setting 'acess': did you mean access\?"):
        kind("tcp://127.0.0.1:5555", acess=None)
    with pytest.raises(TypeError, match="a Freelance worker has no setting 'liveness': known are endpoint, "):
        kind("tcp://127.0.0.1:5555", liveness=3)


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (["tcp://127.0.0.1"], {}),
        ([7], {}),
        (["ipc://" + "x" * 300], {}),
        (["tcp://127.0.0.1:5555"], {"bind": "tcp://127.0.0.1"}),
        (["tcp://127.0.0.1:5555"], {"service": "mmi.x y\0"}),
        (["tcp://127.0.0.1:5555"], {"concurrency": 0}),
        (["tcp://127.0.0.1:5555"], {"codec": "pickle"}),
    ],
)
def test_invalid_settings(arguments, settings):
    with pytest.raises(SettingError):
        FreelanceWorker(*arguments, list, **settings)


def test_handlers_of_the_wrong_kind(endpoint):
    with pytest.raises(SettingError):
        FreelanceWorker(endpoint, echo)
    with pytest.raises(SettingError):
        AsyncFreelanceWorker(endpoint, list)


def test_a_worker_becomes_a_server(endpoint):
    for worker, kind in (
        (Worker("echo", list, concurrency=3, codec="json", name="me"), FreelanceWorker),
        (AsyncWorker("echo", echo, concurrency=3, codec="json", name="me"), AsyncFreelanceWorker),
    ):
        server = freelance_worker(worker, endpoint, bind="tcp://*:5555", insecure=True)
        assert type(server) is kind
        assert (server.endpoint, server.bind, server.insecure) == (endpoint, "tcp://*:5555", True)
        settings = replace(worker.settings, endpoints=[endpoint])
        assert (server.service, server.settings) == (b"echo", settings)


def test_errors_of_the_gate_leave_nothing_open(endpoint, tmp_path, caplog):
    from support.access import Folder

    from zmdp.mdp.security.access import load

    access = load(Folder(tmp_path).access)
    with zmq.Context() as context, caplog.at_level(logging.WARNING):
        with FreelanceWorker(endpoint, list, access=access, context=context):
            with pytest.raises(BindError, match="has a ZAP handler already"):
                FreelanceWorker(free_endpoint(), list, access=access, context=context).start()
