"""The SQL function: send the rows of pandas series, and make pandas frames of the replies.  Runs on executors."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from ...clients import SettingError
from ...clients.rows import Lookahead
from ...clients.rows.arrow import Rows, answer, answer_rows
from ..python_workers import exempt_imports_from_collection
from .settings import CallSettings


def call_series(batches: Iterator[tuple[Any, ...]], settings: CallSettings) -> Iterator[Any]:
    """Yield pandas frames of reply, code and error for tuples of series: services, inputs and, optionally, keys."""
    import pandas as pd  # noqa: PLC0415

    first = next(batches, None)
    if first is None:
        return
    # A wrong type is an error in the query, not in a row, so this does end the job.
    if not isinstance(first, tuple) or not 2 <= len(first) <= 3:
        raise SettingError("call_service takes two or three arguments: service, input and, optionally, key")

    def parts() -> Iterator[Rows]:
        for series in chain((first,), batches):
            services, inputs, *keys = series
            yield Rows(
                _checked(services, "service", str, ""),
                [each.encode() if isinstance(each, str) else each for each in _checked(inputs, "input", str | bytes)],
                _checked(keys[0], "key", str, "") if keys else None,
            )

    keyed = settings.through_titanic if len(first) == 3 else None
    for rows in answer_rows(parts(), settings, settings.connect, Lookahead(settings), keyed):
        reply, code, error = (
            list(values) for values in zip(*[answer(each, settings.result) for each in rows.outcomes], strict=True)
        )
        yield pd.DataFrame({"reply": reply, "code": pd.Series(code, dtype="Int32"), "error": error})
    exempt_imports_from_collection()


def _checked(series: Any, role: str, kinds: Any, hint: str = " or binary, or use to_json()") -> list[Any]:
    """Return the values of a series, which must be of these types or None.  Raises `SettingError`."""
    values: list[Any] = list(series)
    wrong = next((each for each in values if each is not None and not isinstance(each, kinds)), None)
    if wrong is not None:
        raise SettingError(f"the {role} is a {type(wrong).__name__}; cast it to string{hint}")
    return values
