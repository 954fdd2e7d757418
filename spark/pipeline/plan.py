"""Send the rows of a DataFrame to a service, one request per row, and add the replies as a column; also from SQL.

    replies = call_service(df, "shout", input="text", window=64)
    replies.where("reply_code <> 200").show()
    call_service(df, resize, input="job")               # a Service, with types: the reply is a struct of its fields

Errors are columns too: a row whose request fails never fails the job.  See docs/spark/pipeline.md.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pyspark.errors import AnalysisException, PySparkNotImplementedError, PySparkTypeError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import ArrayType, BinaryType, DataType, IntegerType, MapType, StringType, StructType

from ...clients import Client, SettingError
from ...clients.many import checked_settings
from ...clients.rows.arrow import ARROW, added_names, check_result, check_rows_per_request, map_rows, map_tables
from ...mdp import wire
from ...mdp.security.keys import BrokerKey, Key
from ...mdp.services import BaseService
from ...mdp.services.submission import MAX_SECONDS
from ...mdp.transport.endpoints import checked_brokers
from ..python import arrow_type, exempt_imports_from_collection
from ..reasons import reason
from .row_calls import CallSettings, call_series
from .typed_columns import ValueColumns, check_input, check_service
from .typed_columns import reply_type as type_of_reply

REPLY_TYPES: Final = {
    "string": StringType(),
    "binary": BinaryType(),
    "frames": ArrayType(BinaryType(), containsNull=False),
}
"""The type of the column of replies, by `result`."""
JSON_OPTIONS: Final = (
    "map('ignoreNullFields', 'false', 'timestampFormat', \"yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX\", "
    "'timestampNTZFormat', \"yyyy-MM-dd'T'HH:mm:ss.SSSSSS\")"
)
"""How values are written for services with types: with microseconds."""
NAME_PART: Final = re.compile(r"`((?:[^`]|``)+)`|([^`.]+)")
COLUMN_NAME: Final = re.compile(rf"(?:{NAME_PART.pattern})(?:\.(?:{NAME_PART.pattern}))*")
TEMPORARY_COLUMN: Final = "__zmdp_{}__"
"""Names of temporary columns, chosen not to clash with those of the DataFrame."""


def call_service(
    df: DataFrame,
    service: str | BaseService[Any, Any],
    *,
    input: str | Sequence[str] | Column,  # noqa: A002 - the natural name
    output: str = "reply",
    key: str | None = None,
    group: str | Column | None = None,
    window: int | None = None,
    rows_per_request: int | None = None,
    broker: str | Sequence[str] | None = None,
    timeout: float = 60.0,
    keep: float = 86400.0,
    headers: Mapping[str, str] | None = None,
    result: str = "string",
    codec: str | None = None,
    client_key: Key | None = None,
    broker_key: BrokerKey | None = None,
) -> DataFrame:
    """Return `df` with three more columns: `output`, `service`'s reply to each row; `output`_code; `output`_error.

        replies = call_service(df, "shout", input="text")
        replies.where("reply_code <> 200").show()

    The code is 200 for a row that has its reply and NULL for a row that was not sent; otherwise the error says what
    went wrong.

    Args:
        df: the rows; all their columns are kept.
        service: the service to call: its name, or a `Service`.  The type of a service's request says which columns fit
            as `input`, that of its reply is the type of the reply column.
        input: what to send.  A column of strings or bytes is sent as it is; a struct, map or array as JSON; a list of
            column names as one JSON object.  Rows whose input is NULL are not sent.
        output: name of the reply column.
        key: a column of strings.  Each row then goes through Titanic, which executes each pair of service and key
            once in `keep` seconds.  Without a key, every run of the plan calls the service again.
        group: a column of strings, or an expression such as `lit("tenant-7")`: whose turns and limits apply to a row
            (docs/how-to/limits.md).  Rows in which it is NULL are in the group of requests without one.
        window: maximum number of outstanding requests per partition; by default as many as are answered quickly, 64
            to 1,024.
        rows_per_request: with `codec="arrow"`, the rows of a request; by default up to 5,000, of 1 MB in all.
        broker: endpoint or endpoints, as executors reach them.
        timeout: seconds for each request.
        keep: seconds for which Titanic keeps key and reply.
        headers: sent with each request.
        result: `"string"`, `"binary"`, or `"frames"` for an array of all frames of the reply.
        codec: `"arrow"` for a service whose handler takes and returns Arrow tables (`Worker(…, codec="arrow")`): the
            columns `input` are sent as they are, and the first column of the reply has the type `result`, which is
            any of Spark's types.
        client_key: the `key` of the clients on the executors, read here, for brokers that require one.
        broker_key: the broker's public key, as for `Client`.

    Returns:
        The DataFrame with the columns, into which errors of requests go as well.

    Raises:
        SettingError: An argument is invalid, or a column does not fit a service's types.
    """
    typed = service if isinstance(service, BaseService) else None
    if typed is not None:
        check_service(typed)
        if codec is not None or result != "string":
            raise SettingError(f"{typed!r} has types, so it needs neither result nor codec")
    one_frame = result if codec is None else "binary"
    settings = _settings(
        broker, client_key, broker_key, keep=keep, result=one_frame, window=window, timeout=timeout, headers=headers
    )
    name = wire.service_name(service.name if isinstance(service, BaseService) else service).decode()
    if codec not in {None, ARROW}:
        raise SettingError(f"codec is {codec!r}; expected {ARROW!r}, or None for a frame per row")
    check_rows_per_request(rows_per_request, codec)
    if codec is not None and key is not None:
        raise SettingError("a key belongs to a row, so it cannot be combined with codec='arrow'")
    if codec is not None and group is not None:
        raise SettingError("group cannot be combined with codec='arrow', whose requests have many rows")
    fold = str if df.sparkSession.conf.get("spark.sql.caseSensitive") == "true" else str.lower
    added = added_names(output, df.columns, fold)
    selected = _select_input(df, input, {"key": key, "group": group}, typed, as_it_is=codec is not None)

    reply_type: DataType
    if codec is None:
        columns = None
        reply_type = REPLY_TYPES[result]
        if typed is not None and typed.reply.kind is not Any:  # otherwise it is any JSON
            reply_type, shape = type_of_reply(typed)
            columns = ValueColumns(name, shape, arrow_type(reply_type))
        route = None if key is None else settings.through_titanic
        grouped = group is not None

        def call(batches: Iterator[Any]) -> Iterator[Any]:
            yield from map_rows(
                batches, name, added, settings, settings.connect, result=result, columns=columns, keyed=route,
                grouped=grouped,
            )  # fmt: skip
            exempt_imports_from_collection()
    else:
        reply_type, arrow_result = _any_type(df.sparkSession, result)
        sent_as = None if isinstance(input, list | tuple) else "input"
        if isinstance(input, str):
            sent_as = _parts(df, input)[-1]

        def call(batches: Iterator[Any]) -> Iterator[Any]:
            yield from map_tables(
                batches, name, added, settings, settings.connect, sent_as, arrow_result, rows_per_request
            )
            exempt_imports_from_collection()

    schema = StructType(list(df.schema.fields))
    for column, kind in zip(added, (reply_type, IntegerType(), StringType()), strict=True):
        schema = schema.add(column, kind)
    try:
        return selected.mapInArrow(call, schema)
    except PySparkNotImplementedError as error:  # Arrow lacks some of Spark's types, such as some intervals
        raise SettingError(f"a column has a type that Python does not support; cast it: {reason(error)}") from None


def register_function(
    spark: SparkSession,
    name: str = "call_service",
    *,
    broker: str | Sequence[str] | None = None,
    window: int | None = None,
    timeout: float = 60.0,
    keep: float = 86400.0,
    headers: Mapping[str, str] | None = None,
    result: str = "string",
    group: str = "",
    client_key: Key | None = None,
    broker_key: BrokerKey | None = None,
) -> None:
    """Register `name` as an SQL function: `name(service, input)`, or `name(service, input, key)`.

    It returns a struct of `reply`, `code` and `error`.  Rows with a key go through Titanic.

        register_function(spark)
        spark.sql("SELECT id, r.reply, r.code FROM (SELECT id, call_service('shout', text) AS r FROM texts)")

    Args:
        spark: the session.
        name: the name of the function.
        broker: as for `call_service`.
        window: as for `call_service`.
        timeout: as for `call_service`.
        keep: as for `call_service`.
        headers: as for `call_service`.
        result: as for `call_service`.
        group: whose turns and limits apply to all rows.
        client_key: as for `call_service`.
        broker_key: as for `call_service`.

    Raises:
        SettingError: An argument is invalid.
    """
    settings = _settings(
        broker, client_key, broker_key, keep=keep, result=result,
        window=window, timeout=timeout, headers=headers, group=group,
    )  # fmt: skip
    if not isinstance(name, str) or not name.isidentifier():
        raise SettingError(f"{name!r} is not a valid function name: use letters, digits and '_'")
    import pandas as pd  # noqa: PLC0415 - optional dependency

    def call(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:
        return call_series(batches, settings)

    returned = StructType().add("reply", REPLY_TYPES[result]).add("code", IntegerType()).add("error", StringType())
    # Nondeterministic: otherwise Spark would call it a second time to filter on its result.
    function: Any = pandas_udf(call, returned)  # type: ignore[call-overload]  # its type hints do not allow tuples of any length
    spark.udf.register(name, function.asNondeterministic())


# ── on the driver: checking and planning ──────────────────────────────────────────────────────────────────────────────


def _any_type(spark: SparkSession, name: str) -> tuple[DataType, Any]:
    """Return one of Spark's types by its name in SQL, and Arrow's for it.  Raises `SettingError`."""
    expected = f"result is {name!r}; expected one of Spark's types"
    if not isinstance(name, str):
        raise SettingError(expected)
    try:  # not `DataType.fromDDL`, which finds no session if the only one is of Spark Connect
        kind = spark.sql(f"SELECT CAST(NULL AS {name})").schema[0].dataType
        return kind, arrow_type(kind)
    except AnalysisException as error:
        raise SettingError(f"{expected}: {reason(error)}") from None
    except PySparkTypeError as error:
        raise SettingError(f"{expected} that Arrow has as well: {reason(error)}") from None


def _settings(
    broker: Any, client_key: Key | None, broker_key: BrokerKey | None, *, keep: float, result: str, **of_rows: Any
) -> CallSettings:
    """Return valid settings in the form in which executors need them.  Raises `SettingError`."""
    rows = checked_settings("X1", **of_rows)
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0.001 <= keep <= MAX_SECONDS:
        raise SettingError(f"keep is {keep!r}; expected a number of seconds from 0.001 up to a hundred years")
    check_result(result)
    endpoints, keys = checked_brokers(broker, client_key, broker_key)
    for endpoint in endpoints:
        if endpoint.startswith("inproc:"):
            raise SettingError(
                f"broker is {endpoint!r}, which executors cannot reach from their processes; use tcp:// or ipc://"
            )
    Client(endpoints, key="").close()  # raises if an endpoint is invalid
    return CallSettings(**vars(rows), broker=endpoints, keep=keep, result=result, keys=keys)


def _select_input(
    df: DataFrame, selected: Any, roles: Mapping[str, Any], typed: BaseService[Any, Any] | None, *, as_it_is: bool
) -> DataFrame:
    """Return the columns of `df`, then what to send (string or binary, or as it is), then the columns by `roles`.

    All are renamed c0, c1, …, because names may occur more than once.  Raises `SettingError`.
    """
    found = _with_input(df, selected)
    named = {role: column for role, column in roles.items() if column is not None}
    for role, column in named.items():
        found = _with(found, column if isinstance(column, Column) else _quoted(df, column), role, column)
    names = [f"c{at}" for at in range(len(found.schema.fields))]
    found, at = found.toDF(*names), len(df.columns)
    kind = found.schema.fields[at].dataType
    for (role, column), field in zip(named.items(), found.schema.fields[at + 1 :], strict=True):
        if not isinstance(field.dataType, StringType):
            type_name = field.dataType.simpleString()
            raise SettingError(f"{role} is {column!r}, a column of type {type_name}; cast it to string")
    if typed is not None:
        check_input(typed, selected if isinstance(selected, str) else "input", kind)
        if not typed.request.raw:
            names[at] = f"{_as_json(names[at], kind)} AS {names[at]}"
        return found.selectExpr(*names)
    if as_it_is or isinstance(kind, StringType | BinaryType):
        return found
    if isinstance(kind, StructType | MapType | ArrayType):
        names[at] = f"to_json({names[at]}, map('ignoreNullFields', 'false')) AS {names[at]}"
        return found.selectExpr(*names)
    raise SettingError(
        f"input is {selected!r}, of type {kind.simpleString()}; expected a string, binary, struct, map or array: "
        "cast it, or pass a list of columns to send them as a JSON object"
    )


def _as_json(column: str, kind: DataType) -> str:
    """Return the SQL for values of a column as JSON; `to_json` takes no scalars, so these are put in an array."""
    if isinstance(kind, StructType | MapType | ArrayType):
        return f"to_json({column}, {JSON_OPTIONS})"
    # Only the brackets of this array: those of a VARIANT that is an array are its own.
    inner = f"transform(array(to_json(array({column}), {JSON_OPTIONS})), text -> substr(text, 2, length(text) - 2))[0]"
    return f"CASE WHEN {column} IS NOT NULL THEN {inner} END"


def _with_input(df: DataFrame, selected: Any) -> DataFrame:
    if isinstance(selected, str):
        return _with(df, _quoted(df, selected), "input", selected)
    if isinstance(selected, list | tuple) and selected and all(isinstance(name, str) for name in selected):
        struct = f"struct({', '.join(_quoted(df, name) for name in selected)})"
        return _with(df, struct, "input", selected)
    if not isinstance(selected, Column):
        raise SettingError(f"input is {selected!r}; expected the name of a column, a list of names, or a Column")
    return _with(df, selected, "input", selected)


def _with(df: DataFrame, expression: str | Column, role: str, selected: object) -> DataFrame:
    name = TEMPORARY_COLUMN.format(role)
    try:
        if isinstance(expression, str):
            found = df.selectExpr("*", f"{expression} AS `{name}`")
        else:
            found = df.select("*", expression.alias(name))
        found.schema  # noqa: B018
    except AnalysisException as error:
        raise SettingError(f"{role} is {selected!r}: {reason(error)}") from None
    return found


def _quoted(df: DataFrame, name: object) -> str:
    """Return a column quoted for SQL.  Raises `SettingError` if `name` is not one of a column."""
    return ".".join(f"`{part.replace('`', '``')}`" for part in _parts(df, name))


def _parts(df: DataFrame, name: object) -> list[str]:
    """Return the column with this exact name or, as Spark reads `column.field`, the column and the fields in it.

    Backticks enclose a part that has dots; in it, a backtick is doubled.
    """
    if isinstance(name, str) and name in df.columns:
        return [name]
    if not isinstance(name, str) or not COLUMN_NAME.fullmatch(name):
        raise SettingError(f"{name!r} is not the name of a column")
    return [quoted.replace("``", "`") or plain for quoted, plain in NAME_PART.findall(name)]
