"""Send the rows of Arrow batches, and make columns of the replies.  Needs pyarrow."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import groupby, pairwise
from typing import Any, Final

import pyarrow as pa

from ...mdp.codes import Code
from ...mdp.errors import RequestError, RequestRejected, RequestTimeout, ServiceNotFound, SettingError
from .calls import Route, RowSettings
from .lookahead import Connect, Lookahead, answer_chunks, outcome_size
from .packs import AUTO, Chunk, RowOutcome

MAX_BATCH_BYTES: Final = 64 << 20
"""Maximum size of the replies in a batch, unless one row has more."""
OK: Final = 200
"""The code of a row that has its reply, as in Titanic."""
RESULTS: Final = {"string": pa.string(), "binary": pa.binary(), "frames": pa.list_(pa.binary())}
"""What the column of replies can hold: the only frame, as text or as it is, or all frames."""

Outcome = RowOutcome | None
"""None if the row was not sent."""
Columns = Callable[[Sequence[Outcome]], list[pa.Array]]
"""Makes reply, code and error of rows, as arrays."""


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_result(result: str, settings: RowSettings) -> None:
    """Raise `SettingError` unless `result` is one of `RESULTS` that is possible with these settings."""
    if result not in list(RESULTS):
        raise SettingError(f"result is {result!r}; expected one of {', '.join(RESULTS)}")
    if result == "frames" and (settings.rows_per_request or 1) > 1:
        raise SettingError(f"result='frames' requires a rows_per_request of {AUTO!r} or 1")


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


class Rows:
    """Rows that are returned together, some of which may not be sent; `tag` belongs to the caller."""

    def __init__(
        self,
        services: str | Sequence[str | None],
        bodies: Sequence[bytes | None],
        keys: Sequence[str | None] | None = None,
        tag: Any = None,
    ) -> None:
        self.tag = tag
        self.outcomes: list[Outcome] = []
        self._services = services
        self._bodies = bodies
        self._keys = keys

    def chunks(self) -> Iterator[Chunk]:
        """Yield the rows that are to be sent.

        The tag of a chunk is these rows, the indexes of its own (None: it has all), and whether it is the last.
        """
        bodies: Sequence[Any] = self._bodies
        keys: Sequence[Any] | None = self._keys
        if isinstance(self._services, str) and keys is None and None not in bodies:
            yield Chunk(self._services, bodies, (self, None, True))
            return
        count = len(bodies)
        services: Sequence[Any] = [self._services] * count if isinstance(self._services, str) else self._services
        self.outcomes = [None] * count
        sent = []
        for at, body in enumerate(bodies):
            if body is None:
                continue
            if services[at] is None:
                self.outcomes[at] = _rejected("the service is NULL; every row must name a service")
            elif keys is not None and keys[at] is None:
                self.outcomes[at] = _rejected("the key is NULL; every row sent through Titanic needs a key")
            else:
                sent.append(at)
        for service, group in groupby(sent, services.__getitem__):
            found = list(group)
            yield Chunk(
                service, [bodies[at] for at in found], (self, found, False), (keys and [keys[at] for at in found]) or ()
            )
        yield Chunk("", (), (self, (), True))

    def returned(self, chunk: Chunk) -> bool:
        """Take over the outcomes of a chunk.  Return whether all are there."""
        _, indexes, last = chunk.tag
        if indexes is None:
            self.outcomes = list(chunk.outcomes)
        else:
            for at, outcome in zip(indexes, chunk.outcomes, strict=True):
                self.outcomes[at] = outcome
        return bool(last)


def _rejected(text: str) -> RequestRejected:
    return RequestRejected(text, code=Code.MALFORMED, text=text)


def answer_rows(
    parts: Iterable[Rows],
    settings: RowSettings,
    connect: Connect,
    lookahead: Lookahead,
    keyed: Route | None = None,
) -> Iterator[Rows]:
    """Yield `parts` in order, with their outcomes.  Rows with keys need `keyed`, which sends them."""
    chunks = (chunk for rows in parts for chunk in rows.chunks())
    with closing(answer_chunks(chunks, settings, connect, lookahead, keyed)) as answered:
        for chunk in answered:
            rows: Rows = chunk.tag[0]
            if rows.returned(chunk):
                yield rows


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
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the batches, perhaps divided, with three more columns: reply, code and error, named `added`.

    The last column of each batch is what to send and is left out: strings or bytes, and NULL in rows that are not sent.
    With `keyed`, which sends rows with keys, the last two are what to send and the keys.  `result` is one of `RESULTS`,
    unless `columns` makes the three columns.
    """
    make = columns or partial(reply_columns, result=result)
    lookahead, selected = Lookahead(settings), 1 + (keyed is not None)

    def parts() -> Iterator[Rows]:
        for batch in batches:
            start = 0
            while start < batch.num_rows:
                most = lookahead.rows_of_size(batch.column(batch.num_columns - selected).nbytes / batch.num_rows)
                part = batch.slice(start, most)
                start += most
                bodies, *keys = part.columns[-selected:]
                yield Rows(service, frames_of(bodies), keys[0].to_pylist() if keys else None, part)

    for rows in answer_rows(parts(), settings, connect, lookahead, keyed):
        names = [*rows.tag.schema.names[:-selected], *added]
        for start, end in split_by_size(rows.outcomes):
            found = [column.slice(start, end - start) for column in rows.tag.columns[:-selected]]
            found += make(rows.outcomes[start:end])
            yield pa.RecordBatch.from_arrays(found, names)


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
    count = len(outcomes)
    if result != "frames" and set(map(type, outcomes)) == {bytes}:
        try:
            replies = pa.array(outcomes, pa.binary())
            if result == "string":
                replies = replies.cast(pa.string())
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
        return [outcome] if isinstance(outcome, bytes) else outcome, OK, None
    if not isinstance(outcome, bytes):
        text = f"the reply has {len(outcome)} frames; a request of one row needs one frame"
        return None, int(Code.FAILED), text
    if result == "binary":
        return outcome, OK, None
    try:
        return outcome.decode(), OK, None
    except UnicodeDecodeError as error:
        return None, int(Code.FAILED), f"the reply is not valid UTF-8 ({error}); use result='binary'"


def split_by_size(outcomes: Sequence[Outcome]) -> Iterator[tuple[int, int]]:
    """Yield the bounds at which to split `outcomes` so that no batch has more than `MAX_BATCH_BYTES` of replies."""
    start, size = 0, 0
    for at, outcome in enumerate(outcomes):
        more = outcome_size(outcome)
        if size + more > MAX_BATCH_BYTES and at > start:
            yield start, at
            start, size = at, 0
        size += more
    yield start, len(outcomes)
