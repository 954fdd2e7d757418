"""Reads a handler's signature: the types of its value and of its reply, and how it must be called."""

import inspect
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Final, Optional, Union, get_args, get_origin

from ...mdp.errors import SettingError
from ...mdp.program.arguments import is_async, name_of, underlying

_ITERATORS: Final = (Iterator, Generator)
_ASYNC_ITERATORS: Final = (AsyncIterator, AsyncGenerator)
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Signature:
    """The types of a handler, `Any` where it has no annotation, and its kind.

    For a handler of batches, they are those of one value and one reply.
    """

    request: Any
    reply: Any
    argument: str
    """The name of the argument that gets the value; empty if there is none."""
    has_default: bool
    """Whether it may be called without the value that it takes."""
    asynchronous: bool
    streaming: bool


def signature_of(handler: Callable[..., Any], *, batch: bool = False) -> Signature:
    """Return the signature of `handler`.  Raises `SettingError` if that cannot be a service."""
    name = name_of(handler)
    hints = _hints(handler, name)
    parameters = list(_parameters(handler, name))
    required = [each for each in parameters if each.default is each.empty]
    if len(required) > 1 or any(each.kind not in _POSITIONAL for each in required):
        raise SettingError(
            f"{name} takes {len(required)} arguments: a service takes one value or none; use a dataclass for several"
        )
    taken = required or [each for each in parameters if each.kind in _POSITIONAL]
    has_default = bool(taken) and not required and not batch
    request = hints.get(taken[0].name, Any) if taken else None
    if has_default and request not in (Any, bytes):
        request = Optional[request]  # noqa: UP045 - a type that may be a text
    reply = hints.get("return", Any)
    origin = get_origin(reply) or reply
    called = underlying(handler)
    streaming = inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)
    asynchronous = is_async(handler)
    if origin in _ITERATORS or origin in _ASYNC_ITERATORS:
        streaming, asynchronous = True, origin in _ASYNC_ITERATORS
        reply = (get_args(reply) or (Any,))[0]
    if batch:
        if streaming or not taken:
            raise SettingError(f"{name} handles batches: it takes a list of values and returns a list of replies")
        request = _element(request, f"{name} handles batches: annotate its argument as a list, such as list[Job]")
        reply = _without_errors(_element(reply, f"{name} handles batches: annotate its result as a list"))
    argument = taken[0].name if taken else ""
    return Signature(request, reply, argument, has_default, asynchronous, streaming)


def _hints(handler: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(underlying(handler), include_extras=True)
    except NameError as error:
        raise SettingError(
            f"an annotation of {name} cannot be resolved: {error}; define types of services at the top of a module"
        ) from None
    except (AttributeError, SyntaxError, TypeError) as error:
        raise SettingError(f"an annotation of {name} cannot be resolved: {error}") from None


def _parameters(handler: Callable[..., Any], name: str) -> Iterable[inspect.Parameter]:
    try:
        return inspect.signature(handler).parameters.values()
    except ValueError as error:
        raise SettingError(f"{name} cannot be a service: {error}") from None


def _element(kind: Any, problem: str) -> Any:
    """Return the type of the elements of a list."""
    if kind is Any:
        return Any
    if (get_origin(kind) or kind) not in (list, Sequence):
        raise SettingError(problem)
    return (get_args(kind) or (Any,))[0]


def _without_errors(kind: Any) -> Any:
    """Return a type without the exceptions that stand for single failures."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    values = [each for each in get_args(kind) if not (isinstance(each, type) and issubclass(each, BaseException))]
    return Union[tuple(values)] if values else Any  # noqa: UP007 - their number is not known here
