"""Write requests to a Parquet file."""

from pathlib import Path

import pyarrow.parquet as pq
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from ..admin import Filter
from ..schema import database_url, is_sqlite
from .columns import REQUESTS
from .reading import Requests


def write_parquet(db: str, which: Filter, path: Path) -> None:
    """Write the requests that match the filter, oldest first.

    Raises:
        SettingError: The database or its driver is missing.
        OSError: The file cannot be written.
    """
    with pq.ParquetWriter(path, REQUESTS) as writer:
        for batch in Requests(db, REQUESTS, condition=_as_sql(db, which)).read():
            writer.write_batch(batch)


def _as_sql(db: str, which: Filter) -> str:
    """Return the filter as SQL, with its values."""
    # Without placeholders that begin with %, for which SQLAlchemy would double each % in a value.
    own = sqlite if is_sqlite(database_url(db)) else postgresql
    dialect = own.dialect(paramstyle="named")
    return str(sa.and_(*which.conditions()).compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
