"""What a request to a batch asks for: a query, or a named Python job with its arguments.  Checked before Spark sees it.

    spark.sql   query [settings]             settings: {"format": "json" | "arrow", "args": {…} or […]}
    spark.job   name [arguments [settings]]  arguments: a JSON object; settings: {"format": …}

`args` are the query's parameters, `:name` or `?`.  Nothing that a caller sends is run as Python.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Final, Literal

from ...mdp.cli.console import printable
from ...mdp.errors import ServiceError, SettingError
from ...mdp.loading import load

ENTRY_POINTS: Final = "zmdp.spark.jobs"
"""The group of entry points by which installed packages offer jobs."""
FORMATS: Final = ("json", "arrow")
NOT_TAKEN: Final = 422
"""The code for a request that is wrong in itself: sent again it would be so again."""
ONLY_QUERIES: Final = (
    "spark.sql takes one SELECT, VALUES, TABLE, FROM or WITH …; what changes something is for spark.job"
)
_QUERY: Final = re.compile(
    # Comments and parentheses, then a word that begins a query.  Nothing is tried twice (the groups are atomic).
    r"(?>\s+|--[^\n]*|/\*(?>.*?\*/)|\()*+(?:SELECT|VALUES|TABLE|FROM|WITH)\b",
    re.IGNORECASE | re.DOTALL,
)
_REACHES_OUT: Final = re.compile(
    # What calls Java, or by a name that is made up as it runs; and USING before a program, not before a join's columns.
    r"\b(reflect|try_reflect|java_method|identifier)\b|\busing\b(?!\s*\()",
    re.IGNORECASE,
)
_NAMES: Final = {str: "text", int: "whole number", float: "number", bool: "true or false", list: "list", dict: "object"}


def not_taken(text: str) -> ServiceError:
    """What a caller is told whose request is wrong."""
    return ServiceError(NOT_TAKEN, text[:1000])


@dataclass(frozen=True, slots=True)
class Query:
    """A query and its parameters."""

    sql: str
    format: str = "json"
    args: dict[str, Any] | list[Any] | None = None

    @property
    def title(self) -> str:
        """What it is, in a line."""
        return printable(self.sql)[:200]


@dataclass(frozen=True, slots=True)
class Call:
    """A named job and its arguments."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    format: str = "json"

    @property
    def title(self) -> str:
        """What it is, in a line."""
        return printable(f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})")[
            :200
        ]


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def query(frames: Sequence[bytes]) -> Query:
    """What a request to spark.sql asks for.  Raises `ServiceError` 422."""
    if not 1 <= len(frames) <= 2:
        raise not_taken("spark.sql takes a query, and perhaps settings as JSON: one frame or two")
    sql = _text(frames[0], "the query").strip().removesuffix(";")
    if not sql.strip():
        raise not_taken("spark.sql takes a query: the first frame is empty")
    if not _QUERY.match(sql):  # else SET, RESET or USE, which may be a table's name where a query is read
        raise not_taken(f"that is no query: {sql[:50]!r} …; {ONLY_QUERIES}")
    settings = _object(frames[1:], "the settings", {"format", "args"})
    args = settings.get("args")
    if args is not None and not isinstance(args, dict | list):
        raise not_taken("args is an object, for parameters written :name, or a list, for those written ?")
    return Query(sql, _format(settings), args)


def may_reach_out(sql: str) -> str | None:
    """A word in a query that may stand before a program or for Java, as far as can be seen without its plan."""
    found = _REACHES_OUT.search(sql)
    return found.group() if found else None


def call(frames: Sequence[bytes], jobs: Mapping[str, Callable[..., Any]]) -> Call:
    """What a request to spark.job asks for.  Raises `ServiceError` 422."""
    if not 1 <= len(frames) <= 3:
        raise not_taken("spark.job takes a job's name, and perhaps arguments and settings as JSON: one to three frames")
    name = _text(frames[0], "the job's name")
    function = jobs.get(name)
    if function is None:
        raise not_taken(f"there is no job {name[:100]!r}: there are {', '.join(sorted(jobs)) or 'none'}")
    arguments = _object(frames[1:2], "the arguments")
    check_arguments(name, function, arguments)
    return Call(name, function, arguments, _format(_object(frames[2:], "the settings", {"format"})))


def _text(frame: bytes, what: str) -> str:
    try:
        return frame.decode()
    except UnicodeDecodeError:
        raise not_taken(f"{what} is no UTF-8") from None


def _object(frames: Sequence[bytes], what: str, names: set[str] | None = None) -> dict[str, Any]:
    if not frames or not frames[0]:
        return {}
    try:
        found = json.loads(frames[0])
        json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair, which JSON can write, nobody can take
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise not_taken(f"{what} are a JSON object, not {frames[0][:100]!r}")
    if names is not None and (unknown := sorted(set(found) - names)):
        raise not_taken(f"{what} know no {unknown[0][:50]!r}: they take {', '.join(sorted(names))}")
    return found


def _format(settings: Mapping[str, Any]) -> str:
    given = settings.get("format", "json")
    if given not in FORMATS:
        raise not_taken(f"format is one of {', '.join(FORMATS)}")
    return str(given)


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_jobs(allowed: Mapping[str, str]) -> dict[str, Callable[..., Any]]:
    """The jobs that may be called: those of installed packages (entry points), and `allowed`, which go before them.

    Raises `SettingError` for one that cannot be imported or is no function.
    """
    targets = {each.name: each.value for each in entry_points(group=ENTRY_POINTS)} | dict(allowed)
    return {name: _function(name, target) for name, target in targets.items()}


def _function(name: str, target: str) -> Callable[..., Any]:
    found = load(target, "MODULE:FUNCTION, for example yourpackage.jobs:wordcount")
    if not callable(found):
        raise SettingError(f"job {name!r}: {target} is of type {type(found).__name__}: it takes a function")
    if not list(inspect.signature(found).parameters):
        raise SettingError(f"job {name!r}: {target} takes no arguments: the first is the Spark session")
    return found


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """What it takes beside the session."""
    return list(inspect.signature(function).parameters.values())[1:]


def described(function: Callable[..., Any]) -> str:
    """What it takes, as one would write it."""
    return ", ".join(str(each) for each in parameters(function)) or "no arguments"


def check_arguments(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raises `ServiceError` 422 for arguments that do not fit the function's names and annotations."""
    names = {each.name for each in parameters(function)}
    free = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters(function))
    if not free and (unknown := sorted(set(arguments) - names)):
        raise not_taken(f"job {name} knows no {unknown[0][:50]!r}; it takes {described(function)}")
    try:
        inspect.signature(function).bind(None, **arguments)
    except TypeError as error:
        raise not_taken(f"job {name}: {error}; it takes {described(function)}") from None
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # noqa: BLE001 - whatever the names in an annotation come to
        return  # annotations of names that only a type checker knows
    for each, value in arguments.items():
        if each in hints and not fits(value, hints[each]):
            wanted = _wanted(hints[each])
            raise not_taken(f"job {name}: {each} is {value!r:.100}: it takes {wanted}; all: {described(function)}")


def fits(value: object, hint: Any) -> bool:
    """Whether a value that came as JSON may be given where `hint` is annotated; what is not known here may."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        return any(fits(value, each) for each in args)
    if origin is Literal:
        return value in args
    if origin is typing.Annotated:
        return fits(value, args[0])
    kind = origin or hint
    if kind is None or kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is list:
        return isinstance(value, list) and (not args or all(fits(each, args[0]) for each in value))
    if kind is dict:
        return isinstance(value, dict) and (not args or all(fits(each, args[1]) for each in value.values()))
    return isinstance(value, kind) if kind in {str, bool} else True


def _wanted(hint: Any) -> str:
    return _NAMES.get(hint) or str(hint).removeprefix("<class '").removesuffix("'>")
