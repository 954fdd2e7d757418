"""Send the rows of Arrow batches, and make columns of the replies.  Needs pyarrow."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise, repeat
from typing import Final

import pyarrow as pa

from ...mdp.codes import Code
from ...mdp.errors import RequestError, RequestRejected, RequestTimeout, ServiceNotFound, SettingError
from .row_calls import Connect, Route, Row, RowOutcome, RowSettings, answer_rows

MIN_BATCH_ROWS: Final = 256
"""The first batch that is yielded has no more rows; each following one may have twice as many."""
MAX_BATCH_ROWS: Final = 16_384
MAX_BATCH_BYTES: Final = 64 << 20
"""A batch whose rows, or whose replies, are more or larger is divided, since its rows are in memory twice."""
OK: Final = 200
"""The code of a row that has its reply, as in Titanic."""
RESULTS: Final = {"string": pa.string(), "binary": pa.binary(), "frames": pa.list_(pa.binary())}
"""What the column of replies can hold: the only frame, as text or as it is, or all frames."""

Outcome = RowOutcome | None
"""None if the row was not sent."""
Columns = Callable[[Sequence[Outcome]], list[pa.Array]]
"""Makes reply, code and error of rows, as arrays."""


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_result(result: str) -> None:
    """Raise `SettingError` unless `result` is one of `RESULTS`."""
    if result not in list(RESULTS):
        raise SettingError(f"result is {result!r}; expected one of {', '.join(RESULTS)}")


def added_names(output: str, columns: Iterable[str], fold: Callable[[str], str] = str) -> list[str]:
    """Return the names of the added columns: those of the reply, its code and the error.

    Raises `SettingError` if one of the `columns` has such a name; names are equal if `fold` makes them equal.
    """
    if not isinstance(output, str) or not output:
        raise SettingError(f"output is {output!r}; expected the name of a column")
    added = [output, f"{output}_code", f"{output}_error"]
    taken = set(map(fold, columns))
    clashes = [name for name in added if fold(name) in taken]
    if clashes:
        raise SettingError(f"column {clashes[0]!r} already exists; choose another output than {output!r}")
    return added


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def checked_row(service: str | None, body: bytes | None, key: str | None, group: str | None = None) -> Row:
    """Return a row to be sent, or one that has failed because it has no service or no key.  It may have no group."""
    missing = None
    if service is None:
        missing = "the service is NULL; every row must name a service"
    elif key is None:
        missing = "the key is NULL; every row sent through Titanic needs a key"
    if missing is None or body is None:
        return Row(service or "", body, key or "", group or "")
    return Row("", body, error=RequestRejected(missing, code=Code.MALFORMED, text=missing))


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def map_rows(
    batches: Iterable[pa.RecordBatch],
    service: str,
    added: Sequence[str],
    settings: RowSettings,
    connect: Connect,
    *,
    result: str = "string",
    columns: Columns | None = None,
    keyed: Route | None = None,
    grouped: bool = False,
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the batches, perhaps divided, with three more columns: reply, code and error, named `added`.

    The last column of each batch is what to send and is left out: strings or bytes, and NULL in rows that are not sent.
    With `keyed`, which sends rows with keys, it is followed by the keys, and if the rows are `grouped`, by the names of
    their groups.  `result` is one of `RESULTS`, unless `columns` makes the three columns.
    """
    make = columns or partial(reply_columns, result=result)
    selected = 1 + (keyed is not None) + grouped
    parts: deque[pa.RecordBatch] = deque()

    def rows() -> Iterator[Row]:
        for part in divided(batches, batch_bytes=lambda batch: batch.column(batch.num_columns - selected).nbytes):
            parts.append(part)
            bodies, *others = part.columns[-selected:]
            keys = others.pop(0).to_pylist() if keyed is not None else repeat("")
            groups = others.pop().to_pylist() if grouped else repeat("")
            yield from map(checked_row, repeat(service), frames_of(bodies), keys, groups)

    start, size = 0, 0
    outcomes: list[Outcome] = []
    with closing(answer_rows(rows(), settings, connect, keyed)) as answered:
        for row in answered:
            outcomes.append(row.outcome)
            if isinstance(row.outcome, list):
                size += sum(map(len, row.outcome))
            part = parts[0]
            ended = start + len(outcomes) == part.num_rows
            if ended or size >= MAX_BATCH_BYTES:
                found = [column.slice(start, len(outcomes)) for column in part.columns[:-selected]]
                found += make(outcomes)
                yield pa.RecordBatch.from_arrays(found, [*part.schema.names[:-selected], *added])
                start = 0 if ended else start + len(outcomes)
                outcomes, size = [], 0
                if ended:
                    parts.popleft()


def divided(
    batches: Iterable[pa.RecordBatch], batch_bytes: Callable[[pa.RecordBatch], int]
) -> Iterator[pa.RecordBatch]:
    """Yield the batches that have rows, in parts of up to `MAX_BATCH_ROWS` and, by `batch_bytes`, `MAX_BATCH_BYTES`.

    The first parts are small, for callers that stop early.
    """
    rows = MIN_BATCH_ROWS
    for batch in batches:
        most = max(1, MAX_BATCH_BYTES * batch.num_rows // (batch_bytes(batch) or 1))
        start = 0
        while start < batch.num_rows:
            part = batch.slice(start, min(rows, most))
            yield part
            start += part.num_rows
            rows = min(2 * rows, MAX_BATCH_ROWS)


def frames_of(column: pa.Array) -> list[bytes | None]:
    """Return the values of a column of strings or bytes.

    Slicing its data is several times as fast as `to_pylist`, which makes an object of Arrow for each value first.
    """
    large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    column = column.cast(pa.large_binary() if large else pa.binary())
    _, places, data = column.buffers()
    if column.null_count or data is None or not len(column):
        found: list[bytes | None] = column.to_pylist()
        return found
    bounds = memoryview(places).cast("q" if large else "i")[column.offset : column.offset + len(column) + 1].tolist()
    first = bounds[0]
    values = data.slice(first, bounds[-1] - first).to_pybytes()
    return [values[start - first : end - first] for start, end in pairwise(bounds)]


def reply_columns(outcomes: Sequence[Outcome], result: str) -> list[pa.Array]:
    """Return reply, code and error of rows, as arrays."""
    if result != "frames" and all(isinstance(each, list) and len(each) == 1 for each in outcomes):
        try:
            replies = pa.array([each[0] for each in outcomes], pa.binary())  # type: ignore[index]  # they are lists
            if result == "string":
                replies = replies.cast(pa.string())
            count = len(outcomes)
            return [replies, pa.repeat(pa.scalar(OK, pa.int32()), count), pa.nulls(count, pa.string())]
        except pa.ArrowInvalid:
            pass  # a reply is not UTF-8: find out which
    answers = list(zip(*[answer(outcome, result) for outcome in outcomes], strict=True)) or [(), (), ()]
    return [
        pa.array(values, kind) for values, kind in zip(answers, (RESULTS[result], pa.int32(), pa.string()), strict=True)
    ]


def answer(outcome: Outcome, result: str) -> tuple[bytes | str | list[bytes] | None, int | None, str | None]:
    """Return a row's reply and code 200, or another code and an error; all None if it was not sent."""
    if outcome is None:
        return None, None, None
    if isinstance(outcome, RequestError):
        code = Code.NO_WORKER if isinstance(outcome, ServiceNotFound) else Code.FAILED
        code = Code.TIME_PASSED if isinstance(outcome, RequestTimeout) else code
        return None, int(outcome.code or code), outcome.text or str(outcome)
    if result == "frames":
        return outcome, OK, None
    if len(outcome) != 1:
        text = f"the reply has {len(outcome)} frames; result={result!r} needs one: use result='frames'"
        return None, int(Code.FAILED), text
    if result == "binary":
        return outcome[0], OK, None
    try:
        return outcome[0].decode(), OK, None
    except UnicodeDecodeError as error:
        return None, int(Code.FAILED), f"the reply is not valid UTF-8 ({error}); use result='binary'"
