"""Read Titanic's requests: each partition is a range of numbers, read in bounded chunks as Arrow.

Each chunk is a transaction of its own, so none is open while Spark processes the rows.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql import datasource as spark
from pyspark.sql.types import StructType
from sqlalchemy.engine import Connection, Engine

from ...mdp.errors import SettingError
from ...titanic.store.models import STATES
from ...titanic.store.tables import R, is_in
from .columns import BODY_COLUMNS, TIME_COLUMNS, arrow_schema, check_schema, to_arrow
from .database import check_database, database_option, int_option, known_options, open_database

MAX_ROWS: Final = 10_000
"""Maximum number of rows read at a time."""
MAX_BYTES: Final = 16 << 20
"""Maximum size of the bodies read at a time, unless one row has more."""
DEFAULT_PARTITIONS: Final = 8
MAX_PARTITIONS: Final = 10_000
MIN_PARTITION_ROWS: Final = 20_000
"""Minimum number of requests that justifies another partition."""
MICROSECOND: Final = 1e-6
READ_OPTIONS: Final = frozenset({"db", "service", "state", "partitions"})
UNBOUNDED: Final = -1
"""The `high` of a span that extends to the latest request at the time of reading."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a column; `operator` is one of = < <= > >= in null not."""

    column: str
    operator: str
    value: Any = None

    def sql(self) -> sa.ColumnElement[bool]:
        """Return the condition as SQL."""
        column: Any = R[self.column]
        found: sa.ColumnElement[bool]
        match self.operator:
            case "in" if self.column == "state":  # spelled out so that the partial indexes apply
                found = sa.or_(sa.false(), *(is_in(state) for state in self.value if state in STATES))
            case "in":
                found = column.in_(self.value)
            case "null":
                found = column.is_(None)
            case "not":
                found = column.is_not(None)
            case _:
                found = _COMPARE[self.operator](column, self.value)
        return found


_COMPARE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "=": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


class Span(spark.InputPartition):
    """The requests whose number (`id` or `ended`) is above `low` and up to `high`, which may be `UNBOUNDED`."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__((low, high))
        self.low = low
        self.high = high


def spans(low: int, high: int, most: int) -> list[Span]:
    """Split the numbers above `low` up to `high` into at most `most` spans of equal size."""
    count = max(1, min(most, (high - low) // MIN_PARTITION_ROWS))
    borders = [low + (high - low) * at // count for at in range(count + 1)]
    return [Span(*pair) for pair in pairwise(borders)]


@dataclass(frozen=True)
class Table:
    """What to read, and from where; Spark ships it to executors."""

    db: str
    schema: StructType
    number: str = "id"
    conditions: tuple[Condition, ...] = ()

    def read(self, span: Span) -> Iterator[pa.RecordBatch]:
        """Yield the requests whose numbers are in `span`, in order."""
        engine = open_database(self.db, write=False)
        try:
            if span.high == UNBOUNDED:
                with engine.begin() as connection:
                    latest = connection.scalar(sa.select(sa.func.max(R[self.number])))
                span = Span(span.low, latest or 0)
            yield from self._read(engine, span)
        finally:
            engine.dispose()

    def _read(self, engine: Engine, span: Span) -> Iterator[pa.RecordBatch]:
        arrow = arrow_schema(self.schema)
        number = R[self.number]
        place = sa.tuple_(number, R.id)
        within = [number <= span.high, *(each.sql() for each in self.conditions)]
        wanted = sa.select(number, R.id, *(_column(engine, name) for name in self.schema.fieldNames()))
        wanted = wanted.order_by(number, R.id).limit(MAX_ROWS)
        after = (span.low, _MAX_INT64)
        while True:
            ahead = [place > sa.tuple_(*after), *within]
            with engine.begin() as connection:
                limit = self._limit(connection, ahead)
                if limit is not None:
                    ahead.append(place <= sa.tuple_(*limit))
                # Fetch from the DB-API cursor: SQLAlchemy's row objects would double the time.
                rows = connection.execute(wanted.where(*ahead)).cursor.fetchall()
            if rows:
                _, _, *columns = zip(*rows, strict=True)
                yield to_arrow(len(rows), columns, self.schema, arrow)
            if limit is None and len(rows) < MAX_ROWS:
                return
            # If rows were committed after the limit query, a full batch may end before `limit`: continue after its end.
            after = limit if limit is not None and len(rows) < MAX_ROWS else tuple(rows[-1][:2])

    def _limit(self, connection: Connection, ahead: Sequence[Any]) -> tuple[int, int] | None:
        """Return the number up to which to read next so that the bodies fit in memory, or None if everything fits."""
        bodies = [R[BODY_COLUMNS[name]] for name in self.schema.fieldNames() if name in BODY_COLUMNS]
        if not bodies:
            return None
        number = R[self.number]
        sizes = [sa.func.coalesce(sa.func.length(body), 0) for body in bodies]
        found = connection.execute(
            sa.select(number, R.id, sum(sizes[1:], sizes[0])).where(*ahead).order_by(number, R.id).limit(MAX_ROWS)
        ).cursor.fetchall()
        left = MAX_BYTES
        last = None
        for at, id_, size in found:
            left -= size
            if last is not None and left < 0:
                break
            last = at, id_
        return last


_MAX_INT64: Final = (1 << 63) - 1


def _column(engine: Engine, name: str) -> Any:
    if name == "uuid":  # as text, which is cheaper than a UUID object
        text = sa.type_coerce(R.uuid, sa.Text) if engine.dialect.name == "sqlite" else sa.cast(R.uuid, sa.Text)
        return text if engine.dialect.name == "sqlite" else sa.func.replace(text, "-", "")
    return R[BODY_COLUMNS.get(name, name)]


def option_conditions(options: Mapping[str, str]) -> tuple[Condition, ...]:
    """Return the conditions of the options `service` and `state`, which are comma-separated names."""
    found = []
    for name in ("service", "state"):
        if name in options:
            names = [each.strip() for each in options[name].split(",")]
            found.append(Condition(name, "in", names))
            unknown = [each for each in names if each not in STATES]
            if name == "state" and unknown:
                raise SettingError(f"unknown state {unknown[0]!r}; expected {', '.join(STATES)}")
    return tuple(found)


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Reader(spark.DataSourceReader):
    """Reads all requests.

    Spark plans a DataFrame once and reuses the partitions for later queries, even days later, so the last one is
    unbounded.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        given = known_options(options, READ_OPTIONS | {"pushdown"}, "read")
        check_schema(schema)
        self._partitions = int_option(given, "partitions", DEFAULT_PARTITIONS, most=MAX_PARTITIONS)
        self._table = Table(database_option(given), schema, "id", option_conditions(given))

    def partitions(self) -> Sequence[spark.InputPartition]:
        """Return ranges of ids."""
        engine = open_database(self._table.db, write=False)
        try:
            check_database(engine)
            bounds = [each.sql() for each in self._table.conditions if each.column == "id"]
            ends = (sa.select(end(R.id)).where(*bounds).scalar_subquery() for end in (sa.func.min, sa.func.max))
            with engine.begin() as connection:
                first, last = connection.execute(sa.select(*ends)).one()
        finally:
            engine.dispose()
        if first is None:
            return [Span(0, UNBOUNDED)]
        *found, end = spans(first - 1, last, self._partitions)
        return [*found, Span(end.low, UNBOUNDED)]

    def read(self, partition: spark.InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition; runs on an executor."""
        return self._table.read(partition)  # type: ignore[arg-type]  # made by partitions()


class FilteringReader(Reader):
    """Reads requests and applies filters in the database.

    This is opt-in for two reasons: Spark refuses such a reader unless `spark.sql.python.filterPushdown.enabled` is set,
    and it reuses a plan with filters for later queries of the same DataFrame without them, which then miss rows.
    """

    def pushFilters(self, filters: "list[spark.Filter]") -> "list[spark.Filter]":  # noqa: N802 - Spark's name
        """Apply the filters that the database evaluates as Spark does; return those that Spark must apply too."""
        left = []
        taken: list[Condition] = []
        for each in filters:
            found = pushed_conditions(each)
            taken += found or ()
            if found is None or any(part.column in TIME_COLUMNS for part in found):
                left.append(each)
        self._table = replace(self._table, conditions=(*self._table.conditions, *taken))
        return left


def open_reader(options: Mapping[str, str], schema: StructType) -> Reader:
    """Return the reader that the option `pushdown` selects."""
    pushdown = {name.lower(): value.lower() for name, value in options.items()}.get("pushdown", "false")
    if pushdown not in {"true", "false"}:
        raise SettingError(f"pushdown is {pushdown!r}; expected true or false")
    return (FilteringReader if pushdown == "true" else Reader)(options, schema)


_OPERATORS: Final = {
    "EqualTo": "=", "GreaterThan": ">", "GreaterThanOrEqual": ">=", "LessThan": "<", "LessThanOrEqual": "<=",
    "In": "in", "IsNull": "null", "IsNotNull": "not",
}  # fmt: skip
_FILTERED: Final = {
    "id": frozenset({"=", ">", ">=", "<", "<=", "in"}),
    "service": frozenset({"=", "in"}),
    "state": frozenset({"=", "in"}),
    **dict.fromkeys(TIME_COLUMNS, frozenset({"=", ">", ">=", "<", "<=", "null", "not"})),
}
"""The operators that the database evaluates.  Strings are only compared for equality, as it has its own collation."""


def pushed_conditions(wanted: "spark.Filter") -> list[Condition] | None:
    """Return a Spark filter as conditions for the database, or None if only Spark can apply it."""
    kind = _OPERATORS.get(type(wanted).__name__, "")
    path: tuple[str, ...] = getattr(wanted, "attribute", ())
    value: Any = getattr(wanted, "value", None)
    if len(path) != 1 or kind not in _FILTERED.get(path[0], ()):
        return None
    name = path[0]
    if name in TIME_COLUMNS:
        return _time_conditions(name, kind, value)
    if name == "id":
        whole = all(isinstance(each, int) for each in (value if kind == "in" else [value]))
        return [Condition(name, kind, value)] if whole else None
    texts = value if kind == "in" else [value]
    # No string in the database contains NUL, and PostgreSQL rejects it in a query.
    return [Condition(name, "in", [each for each in texts if isinstance(each, str) and "\0" not in each])]


def _time_conditions(name: str, kind: str, value: object) -> list[Condition] | None:
    """Return conditions that also match a few rows too many, which Spark removes when it applies the filter again.

    Spark compares times rounded to microseconds.
    """
    if kind in {"null", "not"}:
        return [Condition(name, kind)]
    if not isinstance(value, datetime):
        return None
    seconds = (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
    above = [Condition(name, ">", seconds - MICROSECOND)] if kind in {"=", ">", ">="} else []
    below = [Condition(name, "<", seconds + MICROSECOND)] if kind in {"=", "<", "<="} else []
    return above + below
