"""Parse and validate requests to a batch, without Spark.

    spark.sql   query [settings]             settings: {"format": "json" | "arrow", "args": {…} or […], "types": …}
                                             also EXPLAIN and DESCRIBE of a query, and SHOW TABLES
    spark.job   name [arguments [settings]]  arguments: a JSON object; settings: {"format": …}

Both take one JSON object as well, as the body of an HTTP request: {"query": …, settings}, and {"job": …, "arguments":
{…}, settings}.

`args` are the values of the query's parameters, `:name` or `?`, and `types` their types in Spark, where JSON has not
the type.  Nothing that a caller sends is executed as Python.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from ...mdp.errors import ServiceError, SettingError, flaw
from ...mdp.services.misfits import Misfit
from ...mdp.services.value_types import read
from ..client.sql_values import is_plain, sql_type
from .catalogue.named_jobs import annotations, parameters_of
from .failures import unprocessable

ONLY_QUERIES: Final = (
    "spark.sql accepts a single SELECT, VALUES, TABLE, FROM or WITH …, EXPLAIN or DESCRIBE of such a query or of a "
    "table, and SHOW TABLES [IN catalog.namespace]; use spark.job for anything that changes data"
)
SHOW_TABLES: Final = "SHOW TABLES"
_QUERY: Final = re.compile(
    # Comments and parentheses, then a word that begins a query.  Atomic groups prevent backtracking.
    r"(?>\s+|--[^\n]*|/\*(?>.*?\*/)|\()*+(?:SELECT|VALUES|TABLE|FROM|WITH)\b",
    re.IGNORECASE | re.DOTALL,
)
_NAME: Final = r"(?:[A-Za-z_]\w*|`(?:[^`]|``)+`)(?:\.(?:[A-Za-z_]\w*|`(?:[^`]|``)+`))*"
_SHOW: Final = re.compile(rf"\s*SHOW\s+TABLES(?:\s+(?:IN|FROM)\s+({_NAME}))?\s*", re.IGNORECASE)
_DESCRIBE_TABLE: Final = re.compile(rf"\s*DESC(?:RIBE)?\s+({_NAME})\s*", re.IGNORECASE)
_STATEMENT: Final = re.compile(
    r"\s*(?:(EXPLAIN(?:\s+(?:EXTENDED|FORMATTED|COST|CODEGEN))?)|DESC(?:RIBE)?(?:\s+QUERY)?)\b", re.IGNORECASE
)
_ENDED: Final = re.compile(
    # Strings, quoted names, comments and anything else, and then the last semicolon, after which only comments are.
    r"""((?>[rR]'[^']*'|[rR]"[^"]*"|'(?>[^'\\]|\\.)*'|"(?>[^"\\]|\\.)*"|`[^`]*`|--[^\n]*|/\*.*?\*/|[^;'"`])*+)"""
    r";(?>[\s;]|--[^\n]*|/\*.*?\*/)*",
    re.DOTALL,
)
_OPTIONS: Final = re.compile(
    # WITH that is not followed by a name.  `FROM t WITH (…)` gives a data source options, such as another table to
    # read.  A comment may hide the parenthesis.
    r"\bwith[^\w`]*?(?:\(|/\*|--)",
    re.IGNORECASE,
)
_UNSAFE: Final = re.compile(
    # Functions that call Java, or any function by a computed name; USING before a program, but not in a join.
    r"\b(reflect|try_reflect|java_method|identifier)\b|\busing\b(?!\s*\()",
    re.IGNORECASE,
)


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    """The settings of a request to `spark.job`."""

    format: Literal["json", "arrow"] = "json"


class _QuerySettings(Settings):
    """The settings of a request to `spark.sql`; values are JSON, in which numbers have all their digits."""

    args: dict[str, msgspec.Raw] | list[msgspec.Raw] | None = None
    types: dict[str, str] | list[str | None] | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """A query and the values of its parameters.

    `typed` has type and value, as JSON, of each parameter that Spark would not take from Python as it is meant.
    """

    text: str
    format: str = "json"
    args: dict[str, Any] | list[Any] | None = None
    typed: dict[str | int, tuple[str, str]] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[str, str]:
        """Return the statement and the query that it is about: the statement is empty if it is the query itself.

        `SHOW TABLES` is about a namespace, or nothing.
        """
        return _split(self.text)


@dataclass(frozen=True, slots=True)
class JobCall:
    """A named job and its arguments."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    format: str = "json"

    @property
    def text(self) -> str:
        """Return the call as Python source."""
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_query(frames: Sequence[bytes]) -> Query:
    """Parse a request to spark.sql.  Raises `ServiceError` 422."""
    frames = unpacked(frames, "query")
    if not 1 <= len(frames) <= 2:
        raise unprocessable("spark.sql takes one or two frames: a query and, optionally, settings as JSON")
    sql = _text(frames[0], "the query")
    ended = _ENDED.fullmatch(sql)
    sql = ended[1] if ended else sql.rstrip()  # errors name lines, so the first ones stay
    if not sql.strip():
        raise unprocessable("the query is empty")
    _split(sql)
    if found := _OPTIONS.search(sql):
        raise unprocessable(
            f"{found.group()!r}: a query may not give options to a data source, which could make it read other data; "
            "it may not contain WITH before a parenthesis or a comment, not even in a string"
        )
    settings = parsed(frames[1:], _QuerySettings, "the settings")
    return Query(sql, settings.format, *_values(settings))


def _values(settings: _QuerySettings) -> tuple[Any, dict[str | int, tuple[str, str]]]:
    """Return the values of the parameters, and type and JSON of those that need a type.  Raises `ServiceError` 422."""
    args, types = settings.args, settings.types
    if args is None:
        if types:
            raise unprocessable("there are types, but no args")
        return None, {}
    unlike = types is not None and isinstance(types, dict) != isinstance(args, dict)
    if unlike or (isinstance(types, list) and types and len(types) != len(args)):
        raise unprocessable("types must be an object if args are one, or a list that is as long as args")
    kinds = _places(types or {})
    if unknown := sorted(map(str, set(kinds) - set(_places(args)))):
        raise unprocessable(f"types has {unknown[0][:50]!r}, but args has not")
    values = _places(args)
    typed: dict[str | int, tuple[str, str]] = {}
    for place, text in values.items():
        name = place + 1 if isinstance(place, int) else place
        value = values[place] = parsed([text], Any, f"parameter {name}")
        kind = kinds.get(place)
        try:
            kind = sql_type(value, f"parameter {name}") if kind is None and not is_plain(value) else kind
        except SettingError as error:
            raise unprocessable(f"{error}, or give its type in types") from None
        if kind is None:
            continue
        if not kind.strip() or set(kind) & set("'\\"):
            raise unprocessable(f"the type of parameter {name} is {kind!r:.100}; expected one of Spark's, as in SQL")
        typed[place] = kind, bytes(text).decode()
    return values if isinstance(args, dict) else list(values.values()), typed


def _places(values: dict[str, Any] | list[Any]) -> dict[Any, Any]:
    return values if isinstance(values, dict) else dict(enumerate(values))


def _split(sql: str) -> tuple[str, str]:
    """Return statement and query, as `Query.parts` does.  Raises `ServiceError` 422 for any other text."""
    if _QUERY.match(sql):
        return "", sql
    if found := _SHOW.fullmatch(sql):
        return SHOW_TABLES, found[1] or ""
    if found := _DESCRIBE_TABLE.fullmatch(sql):
        return "DESCRIBE QUERY", f"TABLE {found[1]}"
    if found := _STATEMENT.match(sql):
        before = re.sub(r"[^\n]", " ", found.group())  # errors name lines and positions
        query = before + sql[found.end() :]
        if _QUERY.match(query):
            return found[1] or "DESCRIBE QUERY", query
    # Such as SET, RESET and USE, which a subquery would read as table names.
    raise unprocessable(f"not a query: {sql[:50]!r} …; {ONLY_QUERIES}")


def not_in_queries(what: str) -> ServiceError:
    """Return the error for a query that would run a program or call Java with `what`."""
    return unprocessable(f"{what!r} is not allowed in a query because it can run programs; use spark.job")


def unsafe_word(sql: str) -> str | None:
    """Return a word in the query's text that may run a program or call Java, or None."""
    found = _UNSAFE.search(sql)
    return found.group() if found else None


def parse_call(frames: Sequence[bytes], jobs: Mapping[str, Callable[..., Any]]) -> JobCall:
    """Parse a request to spark.job.  Raises `ServiceError` 422."""
    frames = unpacked(frames, "job", "arguments")
    if not 1 <= len(frames) <= 3:
        raise unprocessable(
            "spark.job takes one to three frames: a job's name and, optionally, arguments and settings as JSON"
        )
    name = _text(frames[0], "the job's name")
    function = jobs.get(name)
    if function is None:
        raise unprocessable(f"no job named {name[:100]!r}; available jobs: {', '.join(sorted(jobs)) or 'none'}")
    arguments = convert_arguments(name, function, frames[1:2])
    return JobCall(name, function, arguments, parsed(frames[2:], Settings, "the settings").format)


def unpacked(frames: Sequence[bytes], first: str, *more: str) -> Sequence[bytes]:
    """Return the frames of a request that is one JSON object: its members `first`, a text, and `more`, and the rest.

    Other requests are returned as they are: no query and no name begins with a brace.  Raises `ServiceError` 422.
    """
    if len(frames) != 1 or frames[0].lstrip()[:1] != b"{":
        return frames
    try:
        found = msgspec.json.decode(frames[0], type=dict[str, msgspec.Raw])  # numbers stay as they are written
        name = msgspec.json.decode(found.pop(first, b"null"), type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        members = ", ".join([f'"{first}": "…"', *(f'"{each}": {{…}}' for each in more)])
        text = f"a request that begins with a brace is a JSON object, {{{members}, …}}: {flaw(error)}"
        raise unprocessable(text) from None
    return [name.encode(), *(bytes(found.pop(each, b"")) for each in more), msgspec.json.encode(found)]


def _text(frame: bytes, what: str) -> str:
    try:
        return frame.decode()
    except UnicodeDecodeError:
        raise unprocessable(f"{what} is not valid UTF-8") from None


def parsed(frames: Sequence[bytes], kind: Any, what: str) -> Any:
    """Return the JSON in an optional frame, by default an empty object, as `kind`.  Raises `ServiceError` 422."""
    try:
        return msgspec.json.decode((frames and frames[0]) or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unprocessable(f"{what}: {flaw(error)}") from None


def convert_arguments(name: str, function: Callable[..., Any], frames: Sequence[bytes]) -> dict[str, Any]:
    """Return the arguments in an optional frame as the function's annotations want them: dates, decimals, enums, ….

    Those of other types, such as classes of your own, stay as JSON has them.  Raises `ServiceError` 422 if one does not
    fit.
    """
    texts = parsed(frames, dict[str, msgspec.Raw], "the arguments")
    arguments = {each: parsed([text], Any, f"argument {each}") for each, text in texts.items()}
    try:
        inspect.signature(function).bind(None, **arguments)
    except TypeError as error:
        raise unprocessable(f"job {name}: {error}; its parameters are ({parameters_of(function)})") from None
    hints = annotations(function)
    return {
        each: _converted(name, function, each, value, bytes(texts[each]), hints.get(each, Any))
        for each, value in arguments.items()
    }


def _converted(name: str, function: Callable[..., Any], parameter: str, value: Any, text: bytes, hint: Any) -> Any:
    try:
        return read(text, hint)
    except Misfit as error:
        wanted = f"{inspect.formatannotation(hint)} ({error})"
        problem = f"job {name}: {parameter} is {value!r:.100}; expected {wanted}. It takes ({parameters_of(function)})"
        raise unprocessable(problem) from None
    except (TypeError, NotImplementedError):  # a class of the job's own
        return value
