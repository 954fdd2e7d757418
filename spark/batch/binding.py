"""Bind the parameters of a query to values of their types in Spark."""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..reasons import reason
from .failures import unprocessable
from .parsing import Query

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
