"""What runs in a job's thread: a query, or the function of a named job, with the catalogue's tables."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ...mdp.errors import ServiceError
from ..errors import reason
from .failures import detail
from .jobs import ONLY_QUERIES, UNPROCESSABLE, JobCall, Query, unprocessable
from .offer import Offer
from .results import Results
from .running import Job
from .tables import RequestTables, register_when_named, request_tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ON_FILES: Final = "spark.sql.runSQLOnFiles"
"""Spark's setting for whether SQL may name files, as in csv.`/etc/passwd`: jobs may, callers' queries may not."""
_LINE: Final = re.compile(r"\bline (\d+)")


def execute(offer: Offer, results: Results, job: Job) -> list[bytes]:
    """Run a job, and return the frames of the FINAL."""
    with request_tables(job.session.spark, offer.catalogue, offer.schemas) as tables:
        result = _query(job.spec, job, tables) if isinstance(job.spec, Query) else _call(job.spec, job, tables)
        return results.frames(result, job.id, job.spec.format)


def _query(spec: Query, job: Job, tables: RequestTables) -> "DataFrame":
    """Return a query as a DataFrame, for which Spark has run nothing yet."""
    spark = job.session.spark
    spark.conf.set(ON_FILES, "false")
    tables.provide(spec.text, spec.args)
    try:
        # As a subquery, only a query parses: spark.sql() runs a command as soon as it has parsed it.  Callers may send
        # any query, so there is nothing to quote.
        checked = spark.sql(f"SELECT * FROM (\n{spec.text}\n)", args=spec.args)  # noqa: S608
    except Exception as error:  # noqa: BLE001 - any other error is raised again below, with the caller's own text
        if any(kind.__name__ == "ParseException" for kind in type(error).__mro__):
            text = _LINE.sub(lambda found: f"line {int(found.group(1)) - 1}", reason(error))
            problem = f"not a valid query: {text}; {ONLY_QUERIES}"
            if "near ';'" in text and (line := _LINE.search(text)):
                problem = f"one statement a request: nothing may follow the ';' in {line.group()}"
            raise ServiceError(UNPROCESSABLE, problem, detail(error, problem)) from None
    else:
        unsafe = job.session.find_unsafe(spec.text, checked)
        if unsafe is not None:
            raise unprocessable(f"{unsafe!r} is not allowed in a query because it can run programs; use spark.job")
        tables.check_catalogs(job.session.tables_read(checked))
    return spark.sql(spec.text, args=spec.args)


def _call(spec: JobCall, job: Job, tables: RequestTables) -> object:
    """Call the function of a named job; return what it returns, at the end of what it yields."""
    spark = job.session.spark
    register_when_named(spark, tables)
    spark.conf.set(ON_FILES, "true")
    result: object = spec.function(spark, **spec.arguments)
    if not isinstance(result, Iterator):
        return result
    while True:
        try:
            value = next(result)
        except StopIteration as end:
            returned: object = end.value
            return returned
        job.send(value)
