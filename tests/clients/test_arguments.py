"""The public methods declare every keyword, so that type checkers and Python refuse a misspelt one."""

import asyncio
import inspect

import pytest

from zmdp.clients import AsyncClient, Client

METHODS = [
    (kind, name)
    for kind in (Client, AsyncClient)
    for name, method in inspect.getmembers(kind, inspect.isfunction)
    if not name.startswith("_") or name == "__init__"
]
CALLS = ["request", "stream", "call", "call_stream", "submit"]


def keywords(kind, name):
    """The annotations and defaults of a method's keyword-only parameters, by name."""
    parameters = inspect.signature(getattr(kind, name)).parameters.values()
    return {each.name: (each.annotation, each.default) for each in parameters if each.kind is each.KEYWORD_ONLY}


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_every_parameter_is_declared(kind, name):
    parameters = list(inspect.signature(getattr(kind, name)).parameters.values())[1:]
    assert all(each.annotation is not inspect.Parameter.empty for each in parameters)
    assert not any(each.kind is each.VAR_KEYWORD for each in parameters)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_values_are_called_with_the_keywords_of_frames(kind):
    codec = {"codec": keywords(kind, "call")["codec"]}
    assert keywords(kind, "call") == {**keywords(kind, "request"), **codec}
    assert keywords(kind, "call_stream") == {**keywords(kind, "stream"), **codec}


def test_futures_are_called_with_the_keywords_of_requests():
    assert keywords(Client, "submit") == keywords(Client, "request")


@pytest.mark.parametrize("name", CALLS)
def test_a_misspelt_keyword_is_refused(name):
    with Client("tcp://127.0.0.1:1") as client, pytest.raises(TypeError, match="timout"):
        getattr(client, name)("echo", timout=3)


@pytest.mark.parametrize("name", CALLS[:-1])
def test_a_misspelt_keyword_is_refused_by_asyncio(name):
    async def scenario():
        async with AsyncClient("tcp://127.0.0.1:1") as client:
            with pytest.raises(TypeError, match="timout"):
                getattr(client, name)("echo", timout=3)

    asyncio.run(scenario())
