"""Run a query, or the function of a named job, with the catalogue's tables: the work of a job's thread."""

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from ...mdp.errors import ServiceError, ZmdpError
from ..reasons import reason
from .catalogue.offer import Offer
from .catalogue.request_tables import RequestTables, register_when_named, request_tables
from .catalogue.roles import EVERYTHING, Role
from .failures import UNPROCESSABLE, detail, unprocessable, withheld
from .parsing import ONLY_QUERIES, SHOW_TABLES, JobCall, Query, not_in_queries, unsafe_word
from .results.sending import Results, as_dataframe
from .running_jobs import Job

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LINE: Final = re.compile(r"\bline (\d+)")


def execute(offer: Offer, results: Results, role: Role, job: Job) -> list[bytes]:
    """Run a job for a caller of `role`, and return the frames of the FINAL.

    A query may read the tables of its role.  A job may read everything: the operator of the batch chose its code.
    """
    spec = job.spec
    reads = role if isinstance(spec, Query) else EVERYTHING
    spark = job.session.spark
    with request_tables(spark, offer.catalogue, offer.schemas, reads) as tables:
        if isinstance(spec, JobCall):
            value = _call(spec, job, tables, results)
            job.raise_if_cancelled()
            return results.frames(value, job.id, spec.format)
        with bound(spark, spec, job.id) as args:
            found = _query(spec, args, job, tables)
            job.raise_if_cancelled()
            return results.frames(found, job.id, spec.format)


def _query(spec: Query, args: Any, job: Job, tables: RequestTables) -> "DataFrame":
    """Return the DataFrame of a query, before Spark runs it, or of a statement about the query."""
    statement, query = spec.parts
    session = job.session
    if statement == SHOW_TABLES:
        return tables.show(query)
    tables.provide(query, spec.args)
    try:
        _check_syntax(query, args, job, tables.role)
        job.raise_if_cancelled()
        found = session.spark.sql(query, args=args)
        tables.check(session.tables_read(found))
        return session.spark.sql(f"{statement} {query}", args=args) if statement else found
    except ZmdpError:
        raise
    except Exception as error:
        if (function := _unsafe_function(error)) is not None:
            raise not_in_queries(function) from None
        if tables.role.reads_everything:
            raise
        cause = tables.explain(error)
        if cause is not error:
            raise cause from None
        # Spark's errors can name columns, paths and addresses of every table in the query.
        named = session.tables_in_failure(error)
        if named is None:
            raise withheld(error, tables.role.name) from None
        tables.check(named)
        raise


def _unsafe_function(error: Any) -> str | None:
    """Return the name of the function that Spark did not find because queries do not have it; None for other errors."""
    with suppress(Exception):  # it is about something else, or Spark is lost
        return unsafe_word(error.getMessageParameters()["routineName"])
    return None


def _check_syntax(query: str, args: Any, job: Job, role: Role) -> None:
    """Raise `ServiceError` if the query is not one."""
    try:
        # As a subquery, only a query parses: spark.sql() runs a command as soon as it has parsed it.  Callers may send
        # any query, so there is nothing to quote.
        job.session.parse(f"SELECT * FROM (\n{query}\n)", args, role)  # noqa: S608
    except ServiceError:
        raise
    except Exception as error:  # noqa: BLE001 - raised again, with the positions in the caller's own text
        if any(kind.__name__ == "ParseException" for kind in type(error).__mro__):
            text = _LINE.sub(lambda found: f"line {int(found.group(1)) - 1}", reason(error))
            problem = f"not a valid query: {text}; {ONLY_QUERIES}"
            if "near ';'" in text and (line := _LINE.search(text)):
                problem = f"one statement a request: nothing may follow the ';' in {line.group()}"
            raise ServiceError(UNPROCESSABLE, problem, detail(error, problem)) from None


def _call(spec: JobCall, job: Job, tables: RequestTables, results: Results) -> object:
    """Call the function of a named job; send the values that it yields, and return its result."""
    spark = job.session.spark
    register_when_named(spark, tables)
    result: object = spec.function(spark, **spec.arguments)
    while isinstance(result, Iterator):
        try:
            value = next(result)
        except StopIteration as end:
            result = end.value
        else:
            job.send(*results.yielded(value, spec.format))
    return as_dataframe(spark, result)


# ── the parameters of a query ────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def bound(session: "SparkSession", spec: Query, job: str) -> Generator[Any]:
    """Yield `args` for `session.sql` while the block runs the query.  Raises `ServiceError` 422 for a value's misfit.

    Spark takes literals only, of which it has none for the types of NULLs, or for lists whose items differ in digits.
    So values with a type are session variables, which it makes of JSON itself.
    """
    from pyspark.sql import functions  # noqa: PLC0415

    args: Any = spec.args.copy() if spec.args else spec.args
    variables = []
    try:
        for number, (place, (kind, text)) in enumerate(spec.typed.items()):
            variable = f"zmdp_{job}_{number}"  # which no other caller knows
            variables.append(variable)
            values = f"decode(X'{f'[{text}]'.encode().hex()}', 'UTF-8')"
            value = f"element_at(from_json({values}, 'array<{kind}>', map('mode', 'FAILFAST')), 1)"
            try:
                session.sql(f"DECLARE OR REPLACE VARIABLE {variable} DEFAULT {value}")
            except Exception as error:  # noqa: BLE001 - also errors of Java's, which PySpark leaves as they are
                name = place + 1 if isinstance(place, int) else place
                problem = f"parameter {name} is {text:.100}, which is not of type {kind:.100}: {reason(error)}"
                raise unprocessable(problem) from None
            args[place] = functions.expr(variable)
        yield args
    finally:
        for variable in variables:
            with suppress(Exception):  # Spark is lost, and the variable with it
                session.sql(f"DROP TEMPORARY VARIABLE IF EXISTS {variable}")
