"""What runs in a job's thread: a query, or the function of a named job, with the catalogue's tables."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ...mdp.errors import ServiceError
from ..errors import reason
from .failures import detail, withheld
from .jobs import ONLY_QUERIES, SHOW_TABLES, UNPROCESSABLE, JobCall, Query, unprocessable
from .offer import Offer
from .results import Results
from .roles import EVERYTHING, Role
from .running import Job
from .sessions import permit_everything
from .tables import RequestTables, register_when_named, request_tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LINE: Final = re.compile(r"\bline (\d+)")


def execute(offer: Offer, results: Results, role: Role, job: Job) -> list[bytes]:
    """Run a job for a caller of `role`, and return the frames of the FINAL.

    A query may read what its role may read, and a job everything: its code was chosen by whoever runs the batch.
    """
    spec = job.spec
    reads = role if isinstance(spec, Query) else EVERYTHING
    with request_tables(job.session.spark, offer.catalogue, offer.schemas, reads) as tables:
        result = _query(spec, job, tables) if isinstance(spec, Query) else _call(spec, job, tables)
        return results.frames(result, job.id, spec.format)


def _query(spec: Query, job: Job, tables: RequestTables) -> "DataFrame":
    """Return a query as a DataFrame, for which Spark has run nothing yet; or what another statement tells about it."""
    statement, query = spec.parts
    if statement == SHOW_TABLES:
        return tables.show(query)
    tables.provide(query, spec.args)
    try:
        _check(query, spec, job, tables)
        return job.session.spark.sql(f"{statement} {query}" if statement else query, args=spec.args)
    except ServiceError:
        raise
    except Exception as error:
        if tables.role.reads_everything:
            raise
        cause = tables.explain(error)
        if cause is not error:
            raise cause from None
        # Errors tell columns of whatever the query names, and paths or addresses.
        named = job.session.tables_in_failure(error)
        if named is None:
            raise withheld(error, tables.role.name) from None
        tables.check(named)
        raise


def _check(query: str, spec: Query, job: Job, tables: RequestTables) -> None:
    """Raise `ServiceError` if the query is not one, or may not be run; otherwise what Spark raises."""
    spark = job.session.spark
    try:
        # As a subquery, only a query parses: spark.sql() runs a command as soon as it has parsed it.  Callers may send
        # any query, so there is nothing to quote.
        checked = spark.sql(f"SELECT * FROM (\n{query}\n)", args=spec.args)  # noqa: S608
    except Exception as error:
        if any(kind.__name__ == "ParseException" for kind in type(error).__mro__):
            text = _LINE.sub(lambda found: f"line {int(found.group(1)) - 1}", reason(error))
            problem = f"not a valid query: {text}; {ONLY_QUERIES}"
            if "near ';'" in text and (line := _LINE.search(text)):
                problem = f"one statement a request: nothing may follow the ';' in {line.group()}"
            raise ServiceError(UNPROCESSABLE, problem, detail(error, problem)) from None
        spark.sql(query, args=spec.args)  # raises the error with the positions in the caller's own text
        raise
    else:
        unsafe = job.session.find_unsafe(query, checked)
        if unsafe is not None:
            raise unprocessable(f"{unsafe!r} is not allowed in a query because it can run programs; use spark.job")
        tables.check(job.session.tables_read(checked))


def _call(spec: JobCall, job: Job, tables: RequestTables) -> object:
    """Call the function of a named job; return what it returns, at the end of what it yields."""
    spark = job.session.spark
    register_when_named(spark, tables)
    permit_everything(spark)
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
