"""Reading Titanic's requests: a range of numbers for each partition, in bounded chunks, as Arrow.

Each chunk is a transaction of its own: nothing is held open while Spark is busy with the rows.
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
from .columns import BODIES, TIMES, arrow_schema, check_schema, to_arrow
from .database import check_database, database_option, known_options, open_database, whole_option

MAX_ROWS: Final = 10_000
"""Rows read at a time …"""
MAX_BYTES: Final = 16 << 20
"""… and bytes of their bodies; but one row, however large."""
DEFAULT_PARTITIONS: Final = 8
MAX_PARTITIONS: Final = 10_000
WORTH: Final = 20_000
"""Requests for which a partition of its own is worth it."""
MICROSECOND: Final = 1e-6
READ_OPTIONS: Final = frozenset({"db", "service", "state", "partitions"})
OPEN: Final = -1
"""The end of a span that goes as far as there are requests when it is read."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What a request must fulfil: `operator` is one of = < <= > >= in null not."""

    column: str
    operator: str
    value: Any = None

    def sql(self) -> sa.ColumnElement[bool]:
        """As SQL."""
        column: Any = R[self.column]
        found: sa.ColumnElement[bool]
        match self.operator:
            case "in" if self.column == "state":  # written out, for the sake of the partial indexes
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
    """The requests whose number (`id` or `ended`) is above `low`, up to `high`; or all, if that is `OPEN`."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__((low, high))
        self.low = low
        self.high = high


def spans(low: int, high: int, most: int) -> list[Span]:
    """The numbers above `low` up to `high`, in up to `most` parts of the same size."""
    count = max(1, min(most, (high - low) // WORTH))
    borders = [low + (high - low) * at // count for at in range(count + 1)]
    return [Span(*pair) for pair in pairwise(borders)]


@dataclass(frozen=True)
class Table:
    """What is read, and from where; it travels to the executors."""

    db: str
    schema: StructType
    number: str = "id"
    conditions: tuple[Condition, ...] = ()

    def read(self, span: Span) -> Iterator[pa.RecordBatch]:
        """Its requests whose numbers are in `span`, in order."""
        engine = open_database(self.db, write=False)
        try:
            if span.high == OPEN:
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
        after = (span.low, _LARGEST)
        while True:
            ahead = [place > sa.tuple_(*after), *within]
            with engine.begin() as connection:
                limit = self._limit(connection, ahead)
                if limit is not None:
                    ahead.append(place <= sa.tuple_(*limit))
                # The driver's own rows, which are as they are wanted: SQLAlchemy's take as long again.
                rows = connection.execute(wanted.where(*ahead)).cursor.fetchall()
            if rows:
                _, _, *columns = zip(*rows, strict=True)
                yield to_arrow(len(rows), columns, self.schema, arrow)
            if limit is None and len(rows) < MAX_ROWS:
                return
            # More rows than were counted, as others commit meanwhile: what was cut off is read next.
            after = limit if limit is not None and len(rows) < MAX_ROWS else tuple(rows[-1][:2])

    def _limit(self, connection: Connection, ahead: Sequence[Any]) -> tuple[int, int] | None:
        """How far to read at a time, for the sake of the bodies; None if that does not matter or at the end."""
        bodies = [R[BODIES[name]] for name in self.schema.fieldNames() if name in BODIES]
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


_LARGEST: Final = (1 << 63) - 1


def _column(engine: Engine, name: str) -> Any:
    if name == "uuid":  # as text: neither database need make an object of it
        text = sa.type_coerce(R.uuid, sa.Text) if engine.dialect.name == "sqlite" else sa.cast(R.uuid, sa.Text)
        return text if engine.dialect.name == "sqlite" else sa.func.replace(text, "-", "")
    return R[BODIES.get(name, name)]


def option_conditions(options: Mapping[str, str]) -> tuple[Condition, ...]:
    """What the options `service` and `state` ask for: names with commas between them."""
    found = []
    for name in ("service", "state"):
        if name in options:
            names = [each.strip() for each in options[name].split(",")]
            found.append(Condition(name, "in", names))
            unknown = [each for each in names if each not in STATES]
            if name == "state" and unknown:
                raise SettingError(f"there is no state {unknown[0]!r}: it takes {', '.join(STATES)}")
    return tuple(found)


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Reader(spark.DataSourceReader):
    """All requests that there are.

    Spark plans a DataFrame once, and uses the partitions again for all that is asked of it, be it days later: so the
    last of them is open.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        given = known_options(options, READ_OPTIONS | {"pushdown"}, "read")
        check_schema(schema)
        self._partitions = whole_option(given, "partitions", DEFAULT_PARTITIONS, most=MAX_PARTITIONS)
        self._table = Table(database_option(given), schema, "id", option_conditions(given))

    def partitions(self) -> Sequence[spark.InputPartition]:
        """Ranges of ids."""
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
            return [Span(0, OPEN)]
        *found, end = spans(first - 1, last, self._partitions)
        return [*found, Span(end.low, OPEN)]

    def read(self, partition: spark.InputPartition) -> Iterator[pa.RecordBatch]:
        """On an executor."""
        return self._table.read(partition)  # type: ignore[arg-type]  # one of those above


class FilteringReader(Reader):
    """Has the database apply filters.

    Only where that is asked for.  Spark refuses it unless `spark.sql.python.filterPushdown.enabled` is set; and what
    was planned with filters it uses again for a query of the same DataFrame that has none, which then misses rows.
    """

    def pushFilters(self, filters: "list[spark.Filter]") -> "list[spark.Filter]":  # noqa: N802 - Spark's name
        """Takes what the database does as Spark would; returns what is left to Spark as well."""
        left = []
        taken: list[Condition] = []
        for each in filters:
            found = condition(each)
            taken += found or ()
            if found is None or any(part.column in TIMES for part in found):
                left.append(each)
        self._table = replace(self._table, conditions=(*self._table.conditions, *taken))
        return left


def open_reader(options: Mapping[str, str], schema: StructType) -> Reader:
    """The reader that the option `pushdown` asks for."""
    pushdown = {name.lower(): value.lower() for name, value in options.items()}.get("pushdown", "false")
    if pushdown not in {"true", "false"}:
        raise SettingError(f"pushdown is {pushdown!r}: it takes true or false")
    return (FilteringReader if pushdown == "true" else Reader)(options, schema)


_OPERATORS: Final = {
    "EqualTo": "=", "GreaterThan": ">", "GreaterThanOrEqual": ">=", "LessThan": "<", "LessThanOrEqual": "<=",
    "In": "in", "IsNull": "null", "IsNotNull": "not",
}  # fmt: skip
_FILTERED: Final = {
    "id": frozenset({"=", ">", ">=", "<", "<=", "in"}),
    "service": frozenset({"=", "in"}),
    "state": frozenset({"=", "in"}),
    **dict.fromkeys(TIMES, frozenset({"=", ">", ">=", "<", "<=", "null", "not"})),
}
"""What the database does.  It would order texts by its own rules, so these are only compared for being the same."""


def condition(wanted: "spark.Filter") -> list[Condition] | None:
    """A filter of Spark's for the database; None if it is not one for it."""
    kind = _OPERATORS.get(type(wanted).__name__, "")
    path: tuple[str, ...] = getattr(wanted, "attribute", ())
    value: Any = getattr(wanted, "value", None)
    if len(path) != 1 or kind not in _FILTERED.get(path[0], ()):
        return None
    name = path[0]
    if name in TIMES:
        return _time_condition(name, kind, value)
    if name == "id":
        whole = all(isinstance(each, int) for each in (value if kind == "in" else [value]))
        return [Condition(name, kind, value)] if whole else None
    texts = value if kind == "in" else [value]
    # No text in the database has a NUL, and PostgreSQL would not even look for one.
    return [Condition(name, "in", [each for each in texts if isinstance(each, str) and "\0" not in each])]


def _time_condition(name: str, kind: str, value: object) -> list[Condition] | None:
    """A little too much: Spark compares microseconds, which the table's times are rounded to, and does so once more."""
    if kind in {"null", "not"}:
        return [Condition(name, kind)]
    if not isinstance(value, datetime):
        return None
    seconds = (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
    above = [Condition(name, ">", seconds - MICROSECOND)] if kind in {"=", ">", ">="} else []
    below = [Condition(name, "<", seconds + MICROSECOND)] if kind in {"=", "<", "<="} else []
    return above + below
