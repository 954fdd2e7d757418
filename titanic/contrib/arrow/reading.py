"""Read requests as Arrow, in chunks.

Each chunk is a transaction of its own, so none is open for long, however slowly the caller takes the rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Engine

from ....mdp.errors import SettingError
from ....mdp.wire import valid_service
from ...db.store.models import STATES, R
from .columns import check_columns, convert_batch, stored
from .rows import time_option
from .transfer import check_database, connect_arrow, open_database

CHUNK_ROWS: Final = 50_000
"""Maximum number of rows read in one transaction."""
MIN_RANGE_ROWS: Final = 20_000
"""Minimum number of requests that justifies another range."""
UNBOUNDED: Final = (1 << 63) - 1
"""The `high` of a range that extends to the latest request at the time of reading."""


@dataclass(frozen=True)
class Requests:
    """Requests to read, as Arrow, in ranges of numbers.  It can be pickled, for readers in other processes.

    A range is above `low` and up to `high`, which may be `UNBOUNDED`.

    Args:
        db: The database, as for `titanic.schema.database_url`.
        schema: The columns to read, and their types: any of `titanic.arrow.columns.REQUESTS`.
        number: The number by which requests are ordered: `id`, or `ended`, which only done and failed ones have.
        condition: Further condition, as SQL, for example from `select_requests`.

    Raises:
        SettingError: There is no such column, or its type is wrong.
    """

    db: str
    schema: pa.Schema
    number: str = "id"
    condition: str = "TRUE"

    def __post_init__(self) -> None:
        check_columns(self.schema)

    def read(self, low: int = 0, high: int = UNBOUNDED) -> Iterator[pa.RecordBatch]:
        """Yield the requests of a range, in order.  Raises `SettingError` if the database or its driver is missing."""
        columns = {stored(name) for name in self.schema.names} | {"id", self.number}
        last, id_ = low, UNBOUNDED
        with connect_arrow(self.db, write=False) as connection:
            rows = CHUNK_ROWS
            while rows == CHUNK_ROWS:
                rows = 0
                chunk = (
                    f"WHERE ({self.number}, id) > ({last}, {id_}) AND {self.number} <= {high} "
                    f"AND {self.condition} ORDER BY {self.number}, id LIMIT {CHUNK_ROWS}"
                )
                for batch in connection.query(columns, chunk):
                    rows += batch.num_rows
                    last, id_ = (batch.column(name)[-1].as_py() for name in (self.number, "id"))
                    yield convert_batch(batch, self.schema)

    def ranges(self, most: int) -> list[tuple[int, int]]:
        """Return at most `most` ranges that together have all requests, as `(low, high)`.

        The last one is unbounded, so it also has the requests that are added later.

        Raises:
            SettingError: The database or its driver is missing.
            SchemaError: The tables do not have this release's version.
            TitanicError: They cannot be read.
        """
        engine = open_database(self.db, write=False)
        try:
            check_database(engine)
            ends = (sa.select(end(R[self.number])).scalar_subquery() for end in (sa.func.min, sa.func.max))
            with engine.begin() as connection:
                first, last = connection.execute(sa.select(*ends)).one()
        finally:
            engine.dispose()
        if first is None:
            return [(0, UNBOUNDED)]
        *found, (low, _) = split_range(first - 1, last, most)
        return [*found, (low, UNBOUNDED)]

    def end_after(self, engine: Engine, rows: int, low: int, high: int) -> int:
        """Return the number of the last of the first `rows` requests of a range, or `high` if there are fewer."""
        number = R[self.number]
        some = sa.select(number).where(number > low, number <= high, sa.literal_column(self.condition, sa.Boolean))
        with engine.begin() as connection:
            reached = connection.scalar(some.order_by(number).offset(rows - 1).limit(1))
        return high if reached is None else int(reached)


def split_range(low: int, high: int, most: int) -> list[tuple[int, int]]:
    """Split a range into at most `most` ranges of equal size."""
    count = max(1, min(most, (high - low) // MIN_RANGE_ROWS))
    borders = [low + (high - low) * at // count for at in range(count + 1)]
    return list(pairwise(borders))


def select_requests(options: Mapping[str, str]) -> str:
    """Return the condition that the options `service`, `state`, `since` and `until` set, as SQL."""
    found = []
    for name in {"service", "state"} & options.keys():
        values = [each.strip() for each in options[name].split(",")]
        for each in values:
            if name == "state" and each not in STATES:
                raise SettingError(f"unknown state {each!r}; expected {', '.join(STATES)}")
            if not valid_service(each.encode()):
                raise SettingError(f"{each!r} is not the name of a service")
        # Spelled out: otherwise the databases would not use the indexes of some states.
        found.append(f"({' OR '.join(f'{name} = {_quoted(each)}' for each in values)})")
    for name, operator in {"since": ">=", "until": "<"}.items():
        if name in options:
            found.append(f"created {operator} {time_option(name, options[name])!r}")
    return " AND ".join(found) or "TRUE"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
