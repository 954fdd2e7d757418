"""What clients and `mdclient` learn about services from real brokers."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager

import click
import msgspec
import pytest
from click.testing import CliRunner
from support.processes import TIMEOUT_SECONDS, eventually

from zmdp import AsyncClient, Client, Service, Services, Worker
from zmdp.clients import CodecError, ServiceNotFound, SettingError
from zmdp.clients.command.main import cli
from zmdp.clients.describing import MAX_BROKERS, Inquiry
from zmdp.mdp.broker.io.dialer import LinkTo
from zmdp.mdp.services import About, Description
from zmdp.testing import running_broker

GREET = {"version": "2", "description": "Greet.", "codec": "json", "request": {"type": "string"}, "reply": {}}


def run(*arguments):
    result = CliRunner().invoke(cli, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def echo(request):
    return list(request)


@contextmanager
def offering(at, about=None):
    """Offer echo in a thread, until the block ends."""
    with Client(at, timeout=TIMEOUT_SECONDS) as client:
        before = workers(client)
        worker = Worker("echo", echo, broker=at, about=about)
        worker.start()
        try:
            eventually(lambda: workers(client) > before)
            yield
        finally:
            worker.stop()
            worker.wait()


def workers(client):
    return len(json.loads(client.request("mmi.workers", b"echo")[0])["workers"])


def test_both_clients_describe_a_service_whatever_they_speak():
    with running_broker() as server, offering(at := server.endpoints[0], GREET):
        about = About("2", "Greet.", "json", {"type": "string"}, {}, workers=1, said=GREET)
        expected = Description("echo", 1, (about,))
        for protocol in ("X1", "0.2", "0.1"):
            with Client(at, protocol=protocol, timeout=TIMEOUT_SECONDS) as client:
                assert client.describe("echo") == expected
                with pytest.raises(ServiceNotFound, match="no worker offers 'nobody', or this client may not know"):
                    client.describe("nobody")

        async def described():
            async with AsyncClient(at, timeout=TIMEOUT_SECONDS) as client:
                with pytest.raises(ServiceNotFound):
                    await client.describe(b"nobody")
                return await client.describe(b"echo")

        assert asyncio.run(described()) == expected
        assert expected.about is about


def test_workers_at_all_brokers_describe_a_service():
    with running_broker(name="west") as west, running_broker(
        name="east", links=[LinkTo("peer", west.endpoints[0])]
    ) as east:  # fmt: skip
        at = east.endpoints[0]
        with offering(west.endpoints[0], GREET), Client(at, timeout=TIMEOUT_SECONDS) as client:
            eventually(lambda: client.available("echo"))
            assert client.describe("echo").workers == 1, "by the other broker"
            with offering(at, {**GREET, "version": "3"}), offering(at), offering(at, GREET):
                found = client.describe("echo")
                assert found.workers == 4
                assert [(each.version, each.workers) for each in found.abouts] == [("2", 2), ("3", 1)]

                async def described():
                    async with AsyncClient(at, timeout=TIMEOUT_SECONDS) as other:
                        return await other.describe("echo")

                assert asyncio.run(described()) == found
                shown = run("describe", "echo", "--broker", at)
                assert shown == (
                    "echo: 4 workers\n\n2 workers, version 2, codec json\n\nGreet.\n\nrequest: str\nreply:   Any\n\n"
                    "1 worker, version 3, codec json\n\nGreet.\n\nrequest: str\nreply:   Any\n\n"
                    "1 worker of these say nothing of it\n"
                )


def test_services_describe_themselves():
    services = Services(version="1.4")

    @services.service("double", retries=3, ttl=60.0)
    def double(number: int) -> int:
        """Return twice the number."""
        return 2 * number

    @services.service("letters", codec="msgpack")
    def letters(text: str) -> Iterator[str]:
        yield from text

    with running_broker() as server:
        at = server.endpoints[0]

        async def main():
            worker = services.worker(broker=at)
            await worker.start()
            async with AsyncClient(at, timeout=TIMEOUT_SECONDS) as client:
                while not await client.available("double"):
                    await asyncio.sleep(0)
                described = await client.describe("double")
                printed = await asyncio.to_thread(run, "describe", "double", "--json", "--broker", at)
                shown = await asyncio.to_thread(run, "describe", "double", "--broker", at)
                code = await asyncio.to_thread(run, "stub", "double", "--broker", at)
                quoted = await asyncio.to_thread(run, "stub", "double", "--json", "--broker", at)
                while not await client.available("letters"):
                    await asyncio.sleep(0)
                for command, expected in (
                    (("call", "double", "4"), "8\n"),
                    (("call", "letters", "ab"), '"a"\n"b"\nnull\n'),
                    (("stream", "letters", "ab"), '"a"\n"b"\nnull\n'),
                ):
                    assert await asyncio.to_thread(run, *command, "--broker", at) == expected
                for command in ("call", "stream"):
                    with pytest.raises(click.UsageError, match="takes one value, and got 2: put quotes around a text"):
                        await asyncio.to_thread(run, command, "letters", "a", "b", "--broker", at)
            worker.stop()
            await worker.wait()
            return described, printed, shown, code, quoted

        described, printed, shown, code, quoted = asyncio.run(main())
    assert described.about.as_option() == double.about().as_option() == {
        "version": "1.4", "description": "Return twice the number.", "codec": "json",
        "request": {"type": "integer"}, "reply": {"type": "integer"}, "submission": {"retries": 3, "ttl": 60.0},
    }  # fmt: skip
    assert json.loads(printed) == described.as_dict()
    assert shown == (
        "double: 1 worker\n\nversion 1.4, codec json\n\nReturn twice the number.\n\nrequest: int\nreply:   int\n\n"
        "submission: retries=3, ttl=60.0\n"
    )
    assert json.loads(quoted) == {"code": code}
    names: dict[str, object] = {}
    exec(code, names)
    made = names["double"]
    assert isinstance(made, Service)
    assert made.submission == double.submission == {"retries": 3, "ttl": 60.0}


def test_a_worker_may_not_say_too_much():
    for about in ({"description": "x" * 33000}, {"bytes": b"x"}, [1], {"number": float("nan")}):
        with pytest.raises(SettingError, match="about"):
            Worker("echo", about=about)


def test_a_service_whose_schemas_are_too_large_does_without(logged):
    fields = [(f"field_{number:0>60}", int) for number in range(400)]
    services = Services()

    @services.service("large")
    def large(value: msgspec.defstruct("Large", fields)) -> None:  # type: ignore[valid-type]
        """Take much."""

    worker = services.worker()
    assert logged("large: callers are not told its types")
    assert worker.workers[0].settings.about == {"description": "Take much.", "codec": "json"}


def answer(broker, *others, workers=1):
    said = [{"workers": workers, "about": {"version": broker}}]
    return [msgspec.json.encode({"broker": broker, "workers": workers, "brokers": others, "abouts": said})]


def test_every_broker_is_asked_once():
    inquiry = Inquiry("echo")
    inquiry.take(answer("a", "b", "c"))
    assert inquiry.next_broker() == "b"
    inquiry.take(answer("b", "a", "c", workers=2))
    assert inquiry.next_broker() == "c"
    inquiry.take([b"404"])
    assert inquiry.next_broker() is None
    found = inquiry.description()
    assert found.workers == 3
    assert [each.version for each in found.abouts] == ["b", "a"]


def test_whoever_is_asked_first_the_same_is_said_by_most():
    """Else two Titanics at linked brokers would change a service's schedule to and fro, and it would never be due."""
    found = []
    for first, second in (("a", "b"), ("b", "a")):
        inquiry = Inquiry("echo")
        inquiry.take(answer(first, second))
        inquiry.take(answer(second, first))
        found.append([each.version for each in inquiry.description().abouts])
    assert found[0] == found[1]


def test_brokers_that_always_name_others_are_not_asked_for_ever():
    inquiry = Inquiry("echo")
    inquiry.take(answer("0", "1"))
    number = 0
    while (name := inquiry.next_broker()) is not None:
        number = int(name)
        inquiry.take(answer(name, str(number + 1)))
    assert number == MAX_BROKERS - 1


@pytest.mark.parametrize("reply", [[b"501"], [b"{}"], [b"\xff"], [b"[]"]])
def test_a_broker_that_does_not_describe(reply):
    with pytest.raises(ServiceNotFound, match="it is not zmdp's, or an older one"):
        Inquiry("echo").take(reply)


def test_a_stub_needs_types():
    with running_broker() as server, offering(at := server.endpoints[0]):
        with pytest.raises(CodecError, match="'echo' do not tell its types"):
            run("stub", "echo", "--broker", at)
