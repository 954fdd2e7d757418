"""Send the rows of Arrow batches and of pandas series, and make columns of the replies.  Runs on executors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import chain, groupby, pairwise
from typing import Any, Final

from ...clients import RequestError, RequestRejected, RequestTimeout, ServiceNotFound, SettingError
from ...clients.rows import Caller, Chunk, Keyed, Lookahead, RowOutcome, answer_chunks
from ...mdp.codes import Code
from ...titanic.keyed import KeyedRows
from ..python_workers import exempt_imports_from_collection
from .settings import CallSettings

MAX_BATCH_BYTES: Final = 64 << 20
"""Maximum size of the replies in a batch handed to Spark, unless one row has more."""
OK: Final = 200
"""The code of a row that has its reply, as in Titanic."""

Outcome = RowOutcome | None
"""None if the row was not sent."""


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


def answer_rows(parts: Iterator[Rows], settings: CallSettings, lookahead: Lookahead, *, keyed: bool) -> Iterator[Rows]:
    """Yield `parts` in order, with their outcomes."""

    def through_titanic(client: Caller) -> Keyed:
        return KeyedRows(client, settings.headers, settings.keep)

    chunks = (chunk for rows in parts for chunk in rows.chunks())
    route: Callable[[Caller], Keyed] | None = through_titanic if keyed else None
    with closing(answer_chunks(chunks, settings, settings.connect, lookahead, route)) as answered:
        for chunk in answered:
            rows: Rows = chunk.tag[0]
            if rows.returned(chunk):
                yield rows
    exempt_imports_from_collection()


# ── Arrow ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def call_batches(
    batches: Iterator[Any], service: str, added: Sequence[str], settings: CallSettings, *, keyed: bool
) -> Iterator[Any]:
    """Yield Arrow record batches with the replies.

    The last column of each batch, or the last two with a key, is what to send.
    """
    import pyarrow as pa  # noqa: PLC0415 - optional on the driver

    lookahead, selected = Lookahead(settings), 1 + keyed

    def parts() -> Iterator[Rows]:
        for batch in batches:
            start = 0
            while start < batch.num_rows:
                most = lookahead.rows_of_size(batch.column(batch.num_columns - selected).nbytes / batch.num_rows)
                part = batch.slice(start, most)
                start += most
                bodies, *keys = part.columns[-selected:]
                yield Rows(service, frames_of(bodies), keys[0].to_pylist() if keyed else None, part)

    for rows in answer_rows(parts(), settings, lookahead, keyed=keyed):
        names = [*rows.tag.schema.names[:-selected], *added]
        for start, end in split_by_size(rows.outcomes):
            columns = [column.slice(start, end - start) for column in rows.tag.columns[:-selected]]
            columns += reply_columns(rows.outcomes[start:end], settings.result)
            yield pa.RecordBatch.from_arrays(columns, names)


def frames_of(column: Any) -> list[bytes | None]:
    """Return the values of a column of strings or bytes.

    Slicing its data is several times as fast as `to_pylist`, which makes an object of Arrow for each value first.
    """
    import pyarrow as pa  # noqa: PLC0415

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


def reply_columns(outcomes: Sequence[Outcome], result: str) -> list[Any]:
    """Return reply, code and error of rows, as arrays."""
    import pyarrow as pa  # noqa: PLC0415

    count = len(outcomes)
    if result != "frames" and set(map(type, outcomes)) == {bytes}:
        try:
            replies = pa.array(outcomes, pa.binary())
            if result == "string":
                replies = replies.cast(pa.string())
            return [replies, pa.repeat(pa.scalar(OK, pa.int32()), count), pa.nulls(count, pa.string())]
        except pa.ArrowInvalid:
            pass  # a reply is not UTF-8: find out which
    kinds = {"string": pa.string(), "binary": pa.binary(), "frames": pa.list_(pa.binary())}
    answers = list(zip(*[answer(outcome, result) for outcome in outcomes], strict=True)) or [(), (), ()]
    return [
        pa.array(values, kind) for values, kind in zip(answers, (kinds[result], pa.int32(), pa.string()), strict=True)
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
        more = 0
        if isinstance(outcome, bytes):
            more = len(outcome)
        elif isinstance(outcome, list):
            more = sum(map(len, outcome))
        if size + more > MAX_BATCH_BYTES and at > start:
            yield start, at
            start, size = at, 0
        size += more
    yield start, len(outcomes)


# ── pandas ───────────────────────────────────────────────────────────────────────────────────────────────────────────


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

    for rows in answer_rows(parts(), settings, Lookahead(settings), keyed=len(first) == 3):
        reply, code, error = (
            list(values) for values in zip(*[answer(each, settings.result) for each in rows.outcomes], strict=True)
        )
        yield pd.DataFrame({"reply": reply, "code": pd.Series(code, dtype="Int32"), "error": error})


def _checked(series: Any, role: str, kinds: Any, hint: str = " or binary, or use to_json()") -> list[Any]:
    """Return the values of a series, which must be of these types or None.  Raises `SettingError`."""
    values: list[Any] = list(series)
    wrong = next((each for each in values if each is not None and not isinstance(each, kinds)), None)
    if wrong is not None:
        raise SettingError(f"the {role} is a {type(wrong).__name__}; cast it to string{hint}")
    return values
