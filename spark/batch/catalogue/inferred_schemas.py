"""Remember the schemas that Spark has inferred, so that opening a table of files again runs no Spark job."""

import json
import re
import threading
from typing import TYPE_CHECKING, Any, Final

from ...session import is_connect
from .catalogue_file import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_SCHEMA_IN_ONE_FILE: Final = {"parquet", "orc"}
"""Formats of which Spark reads the schema from one file, unless it merges the schemas of all."""
_ACCESS_TIME: Final = re.compile(r"access_time=\d+; ")


class Schemas:
    """The schemas of tables, for all sessions.  Safe from any thread.

    A schema is inferred again if the files from which it was inferred have changed: one file for Parquet and ORC, any
    file for other formats, such as CSV and JSON.  Databases and Spark Connect are always asked.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Table, str, StructType]] = {}
        self._locks: dict[str, threading.Lock] = {}

    def open(self, session: "SparkSession", table: Table) -> "DataFrame":
        """Open `table` with the files that exist now.  Raises what Spark raises."""
        if table.schema is not None or is_connect(session):
            return table.read(session)
        with self._locks.setdefault(table.name, threading.Lock()):  # others wait rather than infer the same
            known = self._known.get(table.name)
            if known is not None and known[0] == table:
                opened = table.read(session, known[2])
                if _evidence(opened, session, table) == known[1]:
                    return opened
            self._known.pop(table.name, None)
            opened = table.read(session)
            evidence = _evidence(opened, session, table)
            if evidence is not None:
                self._known[table.name] = (table, evidence, _data_schema(opened))
            return opened


def _relation(opened: "DataFrame") -> Any:
    """Return Spark's relation of the files that a DataFrame reads.

    None if it reads a database, or a format that keeps its own list of files, such as Delta.
    """
    plan = opened._jdf.queryExecution().analyzed()
    if _class_of(plan) != "LogicalRelation" or _class_of(plan.relation()) != "HadoopFsRelation":
        return None
    return plan.relation() if _class_of(plan.relation().location()) == "InMemoryFileIndex" else None


def _class_of(found: Any) -> str:
    return str(found.getClass().getSimpleName())


def _evidence(opened: "DataFrame", session: "SparkSession", table: Table) -> str | None:
    """Return names, sizes and times of the files that determine the schema; None if it cannot be remembered.

    The driver's JVM has already listed the files.
    """
    relation = _relation(opened)
    if relation is None:
        return None
    jvm: Any = session._jvm
    files = jvm.scala.jdk.javaapi.CollectionConverters.asJava(relation.location().allFiles())
    both = set(relation.dataSchema().fieldNames()) & set(relation.partitionSchema().fieldNames())
    if files.isEmpty() or both:  # Spark orders columns that are in files and in paths differently if given a schema
        return None
    if table.format not in _SCHEMA_IN_ONE_FILE or _merges_schemas(session, table):
        found = files
    else:  # the file with the smallest path for Parquet, and the first for ORC
        found = jvm.java.util.Collections.min(files) if table.format == "parquet" else files.get(0)
    return _ACCESS_TIME.sub("", str(found.toString()))


def _merges_schemas(session: "SparkSession", table: Table) -> bool:
    given = {name.lower(): value.lower() for name, value in table.options.items()}
    default = str(session.conf.get(f"spark.sql.{table.format}.mergeSchema"))
    return given.get("mergeschema", default) == "true"


def _data_schema(opened: "DataFrame") -> "StructType":
    """Return the schema without partition columns, which Spark infers from the names of folders in any case."""
    from pyspark.sql.types import StructType  # noqa: PLC0415

    return StructType.fromJson(json.loads(_relation(opened).dataSchema().json()))
