"""Read requests as Arrow, in chunks.

Each chunk is a transaction of its own, so none is open for long, however slowly the caller takes the rows.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import pyarrow as pa

from ...mdp.errors import SettingError
from ...mdp.wire import valid_service
from ..store.models import STATES
from .columns import convert_batch, stored
from .connection import connect_arrow
from .rows import time_option

CHUNK_ROWS: Final = 50_000
"""Maximum number of rows read in one transaction."""
UNBOUNDED: Final = (1 << 63) - 1
"""The `high` of a range that extends to the latest request at the time of reading."""


def read_range(
    db: str, schema: pa.Schema, low: int, high: int = UNBOUNDED, *, number: str = "id", condition: str = "TRUE"
) -> Iterator[pa.RecordBatch]:
    """Yield the requests whose `number`, `id` or `ended`, is above `low` and up to `high`, in order.

    Args:
        db: The database, as for `titanic.schema.database_url`.
        schema: The columns to read, and their types.
        low: The first number is above this one.
        high: The last number, or `UNBOUNDED`.
        number: The number by which requests are ordered.
        condition: Further condition, as SQL, for example from `select_requests`.
    """
    columns = {stored(name) for name in schema.names} | {"id", number}
    last, id_ = low, UNBOUNDED
    with connect_arrow(db, write=False) as connection:
        rows = CHUNK_ROWS
        while rows == CHUNK_ROWS:
            rows = 0
            chunk = (
                f"WHERE ({number}, id) > ({last}, {id_}) AND {number} <= {high} "
                f"AND {condition} ORDER BY {number}, id LIMIT {CHUNK_ROWS}"
            )
            for batch in connection.query(columns, chunk):
                rows += batch.num_rows
                last, id_ = (batch.column(name)[-1].as_py() for name in (number, "id"))
                yield convert_batch(batch, schema)


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
