"""The public methods declare every keyword, so that type checkers and Python refuse a misspelt one."""

import asyncio
import inspect
from typing import Unpack, get_args, get_origin, get_type_hints

import pytest

from zmdp.clients import AsyncClient, Client
from zmdp.clients.calls.arguments import RequestArguments, RetriedArguments, RetriedStreamArguments, StreamArguments
from zmdp.clients.calls.settings import ConnectionArguments, ConnectionSettings

METHODS = [
    (kind, name)
    for kind in (Client, AsyncClient)
    for name, method in inspect.getmembers(kind, inspect.isfunction)
    if not name.startswith("_") or name == "__init__"
]
CALLS = ["request", "stream", "call", "call_stream", "submit"]


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_every_parameter_is_declared(kind, name):
    parameters = list(inspect.signature(getattr(kind, name)).parameters.values())[1:]
    assert all(each.annotation is not inspect.Parameter.empty for each in parameters)
    assert all(get_origin(each.annotation) is Unpack for each in parameters if each.kind is each.VAR_KEYWORD)


@pytest.mark.parametrize(
    ("declared", "function"),
    [
        (RequestArguments, AsyncClient._ask),
        (StreamArguments, AsyncClient._stream),
        (RetriedArguments, Client._ask),
        (RetriedStreamArguments, Client._stream_ask),
        (ConnectionArguments, ConnectionSettings.checked),
    ],
)
def test_what_is_declared_is_what_is_accepted(declared, function):
    parameters = inspect.signature(function).parameters.values()
    accepted = {each.name: each.annotation for each in parameters if each.kind is each.KEYWORD_ONLY}
    for each in parameters:
        if each.kind is each.VAR_KEYWORD and get_origin(each.annotation) is Unpack:
            accepted |= get_type_hints(*get_args(each.annotation))
    assert get_type_hints(declared) == accepted


@pytest.mark.parametrize(
    ("stream", "request_"), [(StreamArguments, RequestArguments), (RetriedStreamArguments, RetriedArguments)]
)
def test_a_stream_takes_what_a_request_takes_and_a_deadline(stream, request_):
    assert {*get_type_hints(stream)} - {*get_type_hints(request_)} == {"deadline"}


@pytest.mark.parametrize("name", ["request", "call", "submit"])
def test_only_a_stream_takes_a_deadline(name):
    with Client("tcp://127.0.0.1:1") as client, pytest.raises(TypeError, match="deadline"):
        getattr(client, name)("echo", deadline=3)


@pytest.mark.parametrize("name", CALLS)
def test_a_misspelt_keyword_is_refused(name):
    with Client("tcp://127.0.0.1:1") as client, pytest.raises(TypeError, match="timout"):
        getattr(client, name)("echo", timout=3)


@pytest.mark.parametrize("name", CALLS[:-1])
def test_a_misspelt_keyword_is_refused_by_asyncio(name):
    async def first(client):
        called = getattr(client, name)("echo", timout=3)
        await (anext(called) if inspect.isasyncgen(called) else called)

    async def scenario():
        async with AsyncClient("tcp://127.0.0.1:1") as client:
            with pytest.raises(TypeError, match="timout"):
                await first(client)

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_unknown_argument_of_a_client(kind):
    with pytest.raises(TypeError, match="a client has no argument 'timout': did you mean timeout"):
        kind(timout=5)
