"""Queries and jobs as function calls, with results as Arrow tables and pandas frames."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ...clients import Client
from ...mdp.errors import ServiceError, SettingError
from .frames import STREAM_TIMEOUT_SECONDS, copy_rows, job_frames, parse_result, sql_frames
from .job_failed import JobFailed
from .notebook import html_table, watching
from .partials import event_of

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

MAX_YIELDED: Final = 1000
"""How many values of a job are kept: the last ones."""
SHOWN_ROWS: Final = 20


class SparkJobs:
    """Runs queries and jobs of a batch (`mdp-spark batch`), and shows their progress.

        with Client() as client:
            jobs = SparkJobs(client)
            people = jobs.sql("SELECT name, age FROM people WHERE age > :than", than=3).to_pandas()
            older = jobs.run("older", than=3).to_arrow()

    In a notebook, progress is a bar; on a terminal it is a line, and elsewhere a line now and then, on stderr.  An
    interrupt (Ctrl-C, or the button of the notebook) cancels the job.

    Args:
        client: A client for threads; its connection, and its key, are used.
        prefix: The first part of the names of the services, as for `mdp-spark batch --prefix`.
        deadline: Seconds that each query or job may take before it is cancelled; None for no limit.
        progress: Whether to show progress.
    """

    def __init__(
        self, client: Client, *, prefix: str = "spark", deadline: float | None = None, progress: bool = True
    ) -> None:
        self.client = client
        self._prefix = prefix
        self._deadline = deadline
        self._progress = progress

    def sql(self, query: str, /, *values: Any, **parameters: Any) -> "JobResult":
        """Run a query over the tables of the batch.

            result = jobs.sql("SELECT * FROM people WHERE age > :than", than=3)
            result = jobs.sql("SELECT * FROM people WHERE age > ?", 3)
            result = jobs.sql("SELECT * FROM orders WHERE price = :price", price=Decimal("19.90"))

        Args:
            query: One query.
            values: The values of its parameters that are written `?`.
            parameters: The values of its parameters that are written `:name`: strings, numbers, `Decimal`, dates,
                `datetime` (`TIMESTAMP_NTZ` if it has no zone), `timedelta`, bytes, UUIDs, enums, None, and lists,
                dicts and dataclasses of these, which become arrays and structs.

        Returns:
            The result.

        Raises:
            JobFailed: The query failed, or is not allowed.
            SettingError: Both `values` and `parameters` are given, or Spark has no type for one of them.
            RequestError: As from `Client.stream`.
        """
        if values and parameters:
            raise SettingError("a query has values for `?`, or parameters for `:name`, but not both")
        return self._run(f"{self._prefix}.sql", sql_frames(query, values or parameters, "arrow"), query)

    def run(self, job: str, /, **arguments: Any) -> "JobResult":
        """Run a Python job of the batch.

            print(jobs.run("count_orders", day=date(2026, 11, 21)).value)

        Args:
            job: The name of the job.
            arguments: Its arguments: what JSON can represent, dates, times, decimals, bytes, UUIDs, enums, dataclasses,
                values of NumPy, and lists and dicts of these.  The job's annotations say what it gets.

        Returns:
            The result.

        Raises:
            JobFailed: The job failed, or its arguments do not fit.
            SettingError: JSON cannot represent an argument.
            RequestError: As from `Client.stream`.
        """
        return self._run(f"{self._prefix}.job", job_frames(job, arguments, "arrow"))

    def _run(self, service: str, frames: list[bytes], query: str = "") -> "JobResult":
        started: dict[str, Any] = {}
        yielded: deque[Any] = deque(maxlen=MAX_YIELDED)
        parts = self.client.stream(
            service, *frames, timeout=STREAM_TIMEOUT_SECONDS, retries=0, wait=False, deadline=self._deadline
        )
        try:
            for part in watching(parts) if self._progress else parts:
                event = event_of(part)
                if event.get("event") == "started":
                    started = event
                elif event.get("event") == "yielded":
                    yielded.append(event["value"] if "value" in event else _table(part[1]))
        except ServiceError as error:
            raise JobFailed.of(error, job=started.get("job", ""), query=query) from None
        finally:
            parts.close()  # an interrupt cancels the job now, and not when the generator is collected
        described, data = parse_result(part)
        return JobResult(self.client, started.get("driver", ""), described, data, list(yielded))


@dataclass(frozen=True, repr=False)
class JobResult:
    """The result of a query or job: rows, or the value that a job returned.

        result = jobs.sql("SELECT * FROM orders")
        result.to_pandas()

    Rows that are too large for a reply are fetched from the batch when `to_arrow` or `to_pandas` is called.  Notebooks
    show the first rows.

    Args:
        client: Through which large results are fetched.
        driver: The name of the batch.
        described: The description of the result, as docs/spark/index.md has it.
        data: The rows, or the value; empty if they are too large for a reply.
        yielded: The values that the job yielded, at most the last 1000; tables are Arrow's.
    """

    client: Client
    driver: str
    described: dict[str, Any]
    data: bytes
    yielded: Sequence[Any] = ()

    @property
    def value(self) -> Any:
        """The value that a job returned, for jobs that do not return rows.

        Raises `SettingError` if there are rows.
        """
        if self.described["format"] != "value":
            raise SettingError(f"job {self.described['job']} returned rows: use to_arrow() or to_pandas()")
        return msgspec.json.decode(self.data or self._fetched())

    def to_arrow(self) -> "pa.Table":
        """Return the rows as an Arrow table; needs PyArrow.

            table = jobs.sql("SELECT * FROM orders").to_arrow()

        Returns:
            The rows.

        Raises:
            SettingError: The job returned a value.
            ServiceError: The rows were too large to send, and the batch cannot read them any more.
        """
        if self.described["format"] == "value":
            raise SettingError(f"job {self.described['job']} returned a value: use .value")
        return _table(self.data or self._fetched())

    def to_pandas(self) -> "pd.DataFrame":
        """Return the rows as a pandas frame; needs PyArrow and pandas.

            frame = jobs.sql("SELECT * FROM orders").to_pandas()

        Returns:
            The rows.

        Raises:
            SettingError: The job returned a value.
            ServiceError: As from `to_arrow`.
        """
        return self.to_arrow().to_pandas()

    def _fetched(self) -> bytes:
        file = BytesIO()
        copy_rows(self.client, self.driver, self.described["job"], "arrow", file)
        return file.getvalue()

    def __repr__(self) -> str:
        rows = "a value" if self.described["format"] == "value" else f"{self.described['rows']:,} rows"
        where = "" if self.described["path"] is None else f", to be fetched from {self.driver}"
        return f"JobResult(job {self.described['job']}: {rows}{where})"

    def _repr_html_(self) -> str:
        if not self.data or self.described["format"] == "value":
            return f"<code>{escape(repr(self))}</code>"
        table = self.to_arrow()
        shown = f"{table.num_rows:,} rows" + (f", the first {SHOWN_ROWS} shown" if table.num_rows > SHOWN_ROWS else "")
        return html_table(table.column_names, table.slice(0, SHOWN_ROWS).to_pylist(), shown)


def _table(stream: bytes) -> "pa.Table":
    import pyarrow.ipc  # noqa: PLC0415 - optional dependency

    with pyarrow.ipc.open_stream(stream) as rows:
        return rows.read_all()
