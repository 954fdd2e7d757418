"""Asking programs through their control services, and the handler that answers."""

from contextlib import ExitStack

import pytest
from support.processes import TIMEOUT_SECONDS, eventually

from zmdp.clients import Client, ServiceError, ServiceNotFound, SettingError
from zmdp.clients.control import ask, ask_all, programs
from zmdp.mdp.program.control_services import SPARK
from zmdp.spark.drivers import control_handler
from zmdp.testing import running_broker
from zmdp.workers import Worker


def status(arguments, request):
    return {"asked": dict(arguments), "service": request.service}


def fail(arguments, request):
    raise ServiceError(409, "not now")


@pytest.fixture(scope="module")
def client():
    with running_broker() as server:
        broker = server.endpoints[0]
        offered = {
            f"{SPARK}b": {"status": status, "fail": fail},
            f"{SPARK}a": {"status": status},
            "shop.control.c": {"status": status},
        }
        with ExitStack() as stack:
            for name, operations in offered.items():
                stack.enter_context(Worker(name, control_handler(name, operations), broker=broker))
            stack.enter_context(Worker(f"{SPARK}a/1", lambda request: request, broker=broker))
            client = stack.enter_context(Client(broker, timeout=TIMEOUT_SECONDS))
            for name in (*offered, f"{SPARK}a/1"):
                eventually(lambda name=name: client.available(name))
            yield client


def test_programs_are_listed_by_prefix(client):
    assert programs(client, prefix=SPARK) == ["a", "b"]
    assert programs(client, prefix="shop.control.") == ["c"]


def test_a_program_is_asked_with_arguments(client):
    found = ask(client, "a", "status", prefix=SPARK, job="1")
    assert found == {"asked": {"op": "status", "job": "1"}, "service": f"{SPARK}a"}


def test_all_programs_that_have_the_operation_are_asked(client):
    assert [name for name, _ in ask_all(client, "status", prefix=SPARK)] == ["a", "b"]
    assert list(ask_all(client, "fly", prefix=SPARK)) == []
    with pytest.raises(ServiceError, match="not now"):
        list(ask_all(client, "fail", prefix=SPARK))


def test_an_unknown_program(client):
    with pytest.raises(ServiceNotFound, match=r"no program offers spark\.control\.c .* available names: a, b"):
        ask(client, "c", "status", prefix=SPARK)
    with pytest.raises(SettingError, match="not a valid name"):
        ask(client, "a/1", "status", prefix=SPARK)


@pytest.mark.parametrize("body", [(), (b"",), (b"3",), (b"{}",), (b'{"op": ["status"]}',), (b"[" * 100_000,)])
def test_requests_that_name_no_operation(client, body):
    with pytest.raises(ServiceError, match="where op is one of: status, fail") as raised:
        client.request(f"{SPARK}b", *body)
    assert raised.value.code == 422
