"""The executors' side of a plan: the settings for sending rows, and the SQL function over pandas series."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

from ...clients import AsyncClient, SettingError
from ...clients.rows import Caller, Row, RowSettings, answer_rows
from ...clients.rows.arrow import answer, checked_row
from ...mdp.security.keys import ClientKeys
from ...titanic.api.keyed import KeyedRows
from ..python import exempt_imports_from_collection


@dataclass(frozen=True, kw_only=True)
class CallSettings(RowSettings):
    """How to send rows, and where to.  Times are in seconds."""

    broker: str | Sequence[str]
    keep: float = 86400.0
    result: str = "string"
    """`string` and `binary`: the single frame that replies to a row; `frames`: the list of all frames."""
    keys: ClientKeys | None = field(default=None, repr=False)

    def connect(self) -> AsyncClient:
        """Return a client."""
        return AsyncClient(self.broker, timeout=self.timeout, key=self.keys)

    def through_titanic(self, client: Caller) -> KeyedRows:
        """Return the sender of rows with keys over `client`."""
        return KeyedRows(client, self.headers, self.keep)


def call_series(batches: Iterator[tuple[Any, ...]], settings: CallSettings) -> Iterator[Any]:
    """Yield pandas frames of reply, code and error for tuples of series: services, inputs and, optionally, keys."""
    import pandas as pd  # noqa: PLC0415

    first = next(batches, None)
    if first is None:
        return
    # A wrong type is an error in the query, not in a row, so this does end the job.
    if not isinstance(first, tuple) or not 2 <= len(first) <= 3:
        raise SettingError("call_service takes two or three arguments: service, input and, optionally, key")

    counts: deque[int] = deque()

    def rows() -> Iterator[Row]:
        for series in chain((first,), batches):
            services, inputs, *keys = series
            if not len(inputs):
                continue
            counts.append(len(inputs))
            bodies = [
                each.encode() if isinstance(each, str) else each for each in _checked(inputs, "input", str | bytes)
            ]
            named = _checked(keys[0], "key", str, "") if keys else repeat("")
            yield from map(checked_row, _checked(services, "service", str, ""), bodies, named)

    keyed = settings.through_titanic if len(first) == 3 else None
    answers: list[Any] = []
    with closing(answer_rows(rows(), settings, settings.connect, keyed)) as answered:
        for row in answered:
            answers.append(answer(row.outcome, settings.result))
            if len(answers) == counts[0]:
                reply, code, error = zip(*answers, strict=True)
                yield pd.DataFrame({"reply": list(reply), "code": pd.Series(code, dtype="Int32"), "error": list(error)})
                answers = []
                counts.popleft()
    exempt_imports_from_collection()


def _checked(series: Any, role: str, kinds: Any, hint: str = " or binary, or use to_json()") -> list[Any]:
    """Return the values of a series, which must be of these types or None.  Raises `SettingError`."""
    if series.ndim > 1:  # PySpark passes structs as a frame
        raise SettingError(f"the {role} is a struct; cast it to string{hint}")
    values: list[Any] = list(series)
    wrong = next((each for each in values if each is not None and not isinstance(each, kinds)), None)
    if wrong is not None:
        raise SettingError(f"the {role} is a {type(wrong).__name__}; cast it to string{hint}")
    return values
