"""DataFrames through services: each row is a request, its reply a column; and an SQL function that does the same.

    replies = call_service(df, "shout", input="text", window=64)
    replies.where("reply_code <> 200").show()

Errors are columns as well: a row that fails is a row, never a failed job.  See docs/pipeline.md.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, cast

from ...clients import Client, SettingError
from ...clients.arguments import checked_endpoints, checked_timeout
from ...clients.defaults import MAX_OUTSTANDING
from ...mdp import wire
from ...mdp.defaults import DEFAULT_ENDPOINT
from ...titanic.submission import MAX_SECONDS
from ..session import NEEDS_PYSPARK, SparkError, reason
from .calls import Answer, Piece, Row, Settings, answered, check_rows_per_request, piece_size

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

RESULTS: Final = ("string", "binary", "frames")
HIDDEN: Final = "__zmdp_{}__"
"""What columns are called for a moment that are not `df`'s own."""
LARGEST_BATCH: Final = 64 << 20
"""Bytes of replies that are handed to Spark at a time, unless one row has more."""


def call_service(
    df: "DataFrame",
    service: str,
    *,
    input: "str | Sequence[str] | Column",  # noqa: A002 - the word for it
    output: str = "reply",
    key: str | None = None,
    window: int = 64,
    rows_per_request: int = 1,
    broker: str | Sequence[str] = DEFAULT_ENDPOINT,
    timeout: float = 60.0,
    keep: float = 86400.0,
    headers: Mapping[str, str] | None = None,
    result: str = "string",
) -> "DataFrame":
    """`df` with three more columns: `output`, what `service` replies to each row; `output`_code; `output`_error.

    `input` is a column of text or bytes; of a struct, map or array, which is sent as JSON; or a list of columns, sent
    as one JSON object.  A row whose input is NULL is not sent.  Each partition has `window` requests outstanding, and
    puts `rows_per_request` rows in a request, a frame each, to which the reply must have as many.  `timeout` (seconds)
    is for one request.  The code is 200 for a row that has its reply, NULL for one that was not sent; else the error
    says what went wrong.  `result` is `"string"`, `"binary"`, or `"frames"` for an array of all frames of the reply.

    Spark runs a plan as often as it likes, and each time calls the service.  With a `key`, a column of text, each row
    goes through Titanic: for `keep` seconds the pair of service and key is one request, which is done once.

    Raises `SettingError` for what cannot be meant.  Whatever happens to a row is told in its columns.
    """
    settings = _settings(
        broker=broker,
        window=window,
        rows_per_request=rows_per_request,
        timeout=timeout,
        keep=keep,
        headers=headers,
        result=result,
    )
    name = wire.service_name(service).decode()
    if key is not None and rows_per_request > 1:
        raise SettingError(
            f"rows_per_request is {rows_per_request} and there is a key: a key stands for one request, so a row that "
            "has one is a request of its own"
        )
    added = _names(df, output)
    asked = _asked(df, input, key)
    keyed = key is not None

    def call(batches: Iterator[Any]) -> Iterator[Any]:
        return call_batches(batches, name, added, settings, keyed=keyed)

    types = _types()
    schema = types.StructType(list(df.schema.fields))
    for column, kind in zip(added, (_reply_type(result), types.IntegerType(), types.StringType()), strict=True):
        schema = schema.add(column, kind)
    from pyspark.errors import PySparkNotImplementedError  # noqa: PLC0415

    try:
        return asked.mapInArrow(call, schema)
    except PySparkNotImplementedError as error:  # Spark has types that Arrow has not: some intervals
        raise SettingError(f"there is a column that cannot go through Python; cast it: {reason(error)}") from None


def register_function(
    spark: "SparkSession",
    name: str = "call_service",
    *,
    broker: str | Sequence[str] = DEFAULT_ENDPOINT,
    window: int = 64,
    rows_per_request: int = 1,
    timeout: float = 60.0,
    keep: float = 86400.0,
    headers: Mapping[str, str] | None = None,
    result: str = "string",
) -> None:
    """Make `call_service` known to SQL as `name`: `name(service, input)`, or `name(service, input, key)`.

    Returns a struct of `reply`, `code` and `error`, which are as those of `call_service`; so are the settings.  Rows
    with a key go through Titanic, each by itself.

        SELECT id, r.reply, r.code FROM (SELECT id, call_service('shout', text) AS r FROM texts)

    Raises `SettingError`.
    """
    settings = _settings(
        broker=broker,
        window=window,
        rows_per_request=rows_per_request,
        timeout=timeout,
        keep=keep,
        headers=headers,
        result=result,
    )
    if not isinstance(name, str) or not name.isidentifier():
        raise SettingError(f"{name!r} is no name for a function in SQL: it takes letters, digits and '_'")
    import pandas as pd  # noqa: PLC0415 - only who registers it needs it
    from pyspark.sql.pandas.functions import pandas_udf  # noqa: PLC0415

    def call(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:
        return call_series(batches, settings)

    types = _types()
    returned = (
        types.StructType()
        .add("reply", _reply_type(result))
        .add("code", types.IntegerType())
        .add("error", types.StringType())
    )
    # Not deterministic: else Spark would call it a second time for a filter on what it gives.
    function: Any = pandas_udf(call, returned)  # type: ignore[call-overload]  # its hints know no tuple of any length
    spark.udf.register(name, function.asNondeterministic())


# ── on the driver: what is meant ─────────────────────────────────────────────────────────────────────────────────────


def _types() -> Any:
    try:
        from pyspark.sql import types  # noqa: PLC0415 - only who uses Spark needs it
    except ImportError:
        raise SparkError(NEEDS_PYSPARK) from None
    return types


def _reply_type(result: str) -> "DataType":
    types = _types()
    kinds = {
        "string": types.StringType(),
        "binary": types.BinaryType(),
        "frames": types.ArrayType(types.BinaryType(), containsNull=False),
    }
    return cast("DataType", kinds[result])


def _settings(**given: Any) -> Settings:
    settings = Settings(**given)
    window = settings.window
    if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= MAX_OUTSTANDING:
        raise SettingError(f"window is {window!r}: it takes a number of requests, 1 to {MAX_OUTSTANDING}")
    check_rows_per_request(settings.rows_per_request)
    checked_timeout(settings.timeout)
    keep = settings.keep
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0.001 <= keep <= MAX_SECONDS:
        raise SettingError(f"keep is {keep!r}: it takes a number of seconds above 0, up to a hundred years")
    if settings.result not in RESULTS:
        raise SettingError(f"result is {settings.result!r}: it is one of {', '.join(RESULTS)}")
    if settings.result == "frames" and settings.rows_per_request > 1:
        raise SettingError("result is 'frames' and rows_per_request is above 1: then each row gets one frame only")
    headers = settings.headers or {}
    if not isinstance(headers, Mapping) or not all(isinstance(each, str) for pair in headers.items() for each in pair):
        raise SettingError(f"headers are {headers!r:.200}: they map text to text")
    wire.encode_options({"headers": dict(headers)})
    endpoints = checked_endpoints(settings.broker)
    for endpoint in endpoints:
        if endpoint.startswith("inproc:"):
            raise SettingError(f"broker is {endpoint!r}: executors are other processes, which that does not reach")
    Client(endpoints).close()  # raises for an endpoint that is none
    return replace(settings, broker=endpoints, headers=dict(headers) or None)


def _names(df: "DataFrame", output: str) -> list[str]:
    """The names of the columns that are added."""
    if not isinstance(output, str) or not output:
        raise SettingError(f"output is {output!r}: it takes the name of a column")
    added = [output, f"{output}_code", f"{output}_error"]
    fold = str if df.sparkSession.conf.get("spark.sql.caseSensitive") == "true" else str.lower
    taken = {fold(name) for name in df.columns}
    clashes = [name for name in added if fold(name) in taken]
    if clashes:
        raise SettingError(f"there is a column {clashes[0]!r} already: give another output than {output!r}")
    return added


def _asked(df: "DataFrame", asked: Any, key: str | None) -> "DataFrame":
    """The columns of `df`, then what is sent (text or bytes), then the key if there is one.

    Whatever they were called, they are now c0, c1, …: some may have had the same name.  Raises `SettingError`.
    """
    types = _types()
    found = _with_input(df, asked)
    if key is not None:
        found = _with(found, _quoted(df, key), "key", key)
    names = [f"c{at}" for at in range(len(found.schema.fields))]
    found, at = found.toDF(*names), len(df.columns)
    kind = found.schema.fields[at].dataType
    if key is not None and not isinstance(found.schema.fields[-1].dataType, types.StringType):
        told = found.schema.fields[-1].dataType.simpleString()
        raise SettingError(f"key is {key!r}, a column of {told}: it takes text, so cast it")
    if isinstance(kind, types.StringType | types.BinaryType):
        return found
    if isinstance(kind, types.StructType | types.MapType | types.ArrayType):
        names[at] = f"to_json({names[at]}, map('ignoreNullFields', 'false')) AS {names[at]}"
        return found.selectExpr(*names)
    raise SettingError(
        f"input is {asked!r}, of type {kind.simpleString()}: it takes text, bytes, a struct, a map or an array; "
        "cast it, or give a list of columns to send them as a JSON object"
    )


def _with_input(df: "DataFrame", asked: Any) -> "DataFrame":
    from pyspark.sql import Column  # noqa: PLC0415

    if isinstance(asked, str):
        return _with(df, _quoted(df, asked), "input", asked)
    if isinstance(asked, list | tuple) and asked and all(isinstance(name, str) for name in asked):
        struct = f"struct({', '.join(_quoted(df, name) for name in asked)})"
        return _with(df, struct, "input", asked)
    if not isinstance(asked, Column):
        raise SettingError(f"input is {asked!r}: it takes the name of a column, a list of names, or a Column")
    try:
        found = df.select("*", asked.alias(HIDDEN.format("input")))
        found.schema  # noqa: B018
    except _refusal() as error:
        raise SettingError(f"input is {asked!r}: {reason(error)}") from None
    return found


def _with(df: "DataFrame", expression: str, role: str, asked: object) -> "DataFrame":
    try:
        found = df.selectExpr("*", f"{expression} AS `{HIDDEN.format(role)}`")
        found.schema  # noqa: B018
    except _refusal() as error:
        raise SettingError(f"{role} is {asked!r}: {reason(error)}") from None
    return found


def _quoted(df: "DataFrame", name: object) -> str:
    """A column as SQL: one that has this very name, else the field of a struct (`column.field`)."""
    if not isinstance(name, str) or not name:
        raise SettingError(f"{name!r} is no column: it takes a name")
    parts = [name] if name in df.columns else name.split(".")
    return ".".join(f"`{part.replace('`', '``')}`" for part in parts)


def _refusal() -> type[Exception]:
    from pyspark.errors import AnalysisException  # noqa: PLC0415

    return cast("type[Exception]", AnalysisException)


# ── on the executors: batches to rows and back ───────────────────────────────────────────────────────────────────────


def call_batches(
    batches: Iterator[Any], service: str, added: Sequence[str], settings: Settings, *, keyed: bool
) -> Iterator[Any]:
    """Arrow's record batches with the replies; their last column, or last two with a key, are what was asked."""
    import pyarrow as pa  # noqa: PLC0415 - the driver may do without

    most, asked = piece_size(settings), 1 + keyed

    def pieces() -> Iterator[Piece]:
        for batch in batches:
            for start in range(0, batch.num_rows, most):
                part = batch.slice(start, most)
                *_, bodies = part.columns[: part.num_columns - keyed]
                large = pa.types.is_large_string(bodies.type) or pa.types.is_large_binary(bodies.type)
                sent = bodies.cast(pa.large_binary() if large else pa.binary()).to_pylist()
                keys = part.columns[-1].to_pylist() if keyed else [None] * len(sent)
                rows = [Row(service, body, key, keyed) for body, key in zip(sent, keys, strict=True)]
                yield Piece(rows, part)

    reply_kinds = {"string": pa.string(), "binary": pa.binary(), "frames": pa.list_(pa.binary())}
    kinds = (reply_kinds[settings.result], pa.int32(), pa.string())
    replies = answered(pieces(), settings)
    with closing(replies):
        for piece in replies:
            schema = pa.schema([*list(piece.tag.schema)[:-asked], *map(pa.field, added, kinds)])
            for start, end in cuts(piece.answers):
                columns = [column.slice(start, end - start) for column in piece.tag.columns[:-asked]]
                answers = list(zip(*piece.answers[start:end], strict=True))
                for values, kind in zip(answers, kinds, strict=True):
                    columns.append(pa.array(values, kind))
                yield pa.RecordBatch.from_arrays(columns, schema=schema)


def call_series(batches: Iterator[tuple[Any, ...]], settings: Settings) -> Iterator[Any]:
    """The same for pandas: series of services, inputs and perhaps keys; frames of reply, code and error."""
    import pandas as pd  # noqa: PLC0415

    replies = answered((Piece(_rows(series)) for series in batches), settings)
    with closing(replies):
        for piece in replies:
            yield pd.DataFrame(piece.answers, columns=["reply", "code", "error"]).astype({"code": "Int32"})


def _rows(series: Any) -> list[Row]:
    # What a column is made of is the query's doing, not a row's: this does end the job.
    if not isinstance(series, tuple) or not 2 <= len(series) <= 3:
        raise SettingError("call_service takes a service, an input and perhaps a key")
    services, inputs, keys = (*series, None)[:3]
    keyed = keys is not None
    return [
        Row(_text(service, "service"), _body(body), _text(key, "key"), keyed)
        for service, body, key in zip(services, inputs, keys if keyed else repeat(None, len(inputs)), strict=True)
    ]


def _text(value: object, role: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise SettingError(f"the {role} is a {type(value).__name__}: it takes text")
    return value


def _body(value: object) -> bytes | None:
    if isinstance(value, str):
        return value.encode()
    if value is not None and not isinstance(value, bytes):
        raise SettingError(f"the input is a {type(value).__name__}: it takes text or bytes; cast it, or use to_json()")
    return value


def cuts(answers: Sequence[Answer]) -> Iterator[tuple[int, int]]:
    """From where to where to cut `answers`, so that no batch has more than `LARGEST_BATCH` bytes of replies."""
    start, size = 0, 0
    for at, (reply, _, _) in enumerate(answers):
        more = 0 if reply is None else sum(map(len, reply)) if isinstance(reply, list) else len(reply)
        if size + more > LARGEST_BATCH and at > start:
            yield start, at
            start, size = at, 0
        size += more
    yield start, len(answers)
