"""The tables and their columns, as the statements in this package use them."""

from collections.abc import Callable
from typing import Any, Final, cast

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from .models import (
    Count,
    CountChange,
    Counter,
    Holder,
    Key,
    StoredPartial,
    StoredRequest,
    StoredSchedule,
)

REQUESTS: Final = cast(sa.Table, StoredRequest.__table__)
PARTS: Final = cast(sa.Table, StoredPartial.__table__)
KEYS: Final = cast(sa.Table, Key.__table__)
HOLDERS: Final = cast(sa.Table, Holder.__table__)
COUNTERS: Final = cast(sa.Table, Counter.__table__)
COUNTS: Final = cast(sa.Table, Count.__table__)
COUNT_CHANGES: Final = cast(sa.Table, CountChange.__table__)
SCHEDULES: Final = cast(sa.Table, StoredSchedule.__table__)
R, P, K, W, S = REQUESTS.c, PARTS.c, KEYS.c, HOLDERS.c, SCHEDULES.c


def is_in(state: str) -> sa.ColumnElement[bool]:
    """Return the condition that a request is in `state`.

    The state is part of the SQL, not a parameter: otherwise the databases would not use the partial indexes.
    """
    return R.state == sa.literal_column(f"'{state}'")


def for_both_dialects(build: Callable[[Any], sa.Executable]) -> dict[str, sa.Executable]:
    """Return a statement with ON CONFLICT for each dialect, whose INSERT functions differ."""
    return {"sqlite": build(sqlite.insert), "postgresql": build(postgresql.insert)}
