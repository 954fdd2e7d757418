"""Compare the data source `titanic` with Spark's JDBC on PostgreSQL: `python bench/spark_titanic.py [ROWS]`.

The server runs with fsync on.  Write: rows become requests (checked, exactly once), with and without keys; JDBC inserts
the same rows into a table with the same columns and indexes, unchecked and at least once.  Read: all columns of these
requests, and four of them.
The JDBC driver is that of Debian's libpostgresql-jdbc-java, or the file that POSTGRESQL_JDBC names; without one, only
the data source is measured.

In each round all are measured in turn; the table shows rows per second (the median of the rounds) and the median of the
ratios.  Compare ratios, not absolute numbers, which depend on the machine and its load.
"""

import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.postgres import Cluster, cluster

from zmdp.spark.session import open_session
from zmdp.titanic import schema

ROUNDS = 5
PARTITIONS = 2
JAR = Path(os.environ.get("POSTGRESQL_JDBC", "/usr/share/java/postgresql.jar"))
FEW = "id long, service string, created timestamp, finished timestamp"
BODY = 64

with socket.socket() as probe:  # JDBC knows no unix sockets
    probe.bind(("127.0.0.1", 0))
    PORT = probe.getsockname()[1]
os.environ["PGPORT"] = str(PORT)


class Contest:
    """Number of rows that both write and read."""

    def __init__(self, spark: Any, server: Cluster, rows: int) -> None:
        self.spark = spark
        self.rows = rows
        self.url = server.url()
        self.server = server
        self.jdbc = {
            "url": f"jdbc:postgresql://127.0.0.1:{PORT}/postgres?reWriteBatchedInserts=true&stringtype=unspecified",
            "driver": "org.postgresql.Driver", "user": "postgres", "batchsize": "10000", "fetchsize": "10000",
        }  # fmt: skip

    def requests(self, *, keyed: bool) -> Any:
        key = f"concat('{time.time_ns()}-', id)" if keyed else "CAST(NULL AS STRING)"
        made = self.spark.range(self.rows, numPartitions=PARTITIONS)
        return made.selectExpr(f"rpad(string(id), {BODY}, 'x') AS request", f"{key} AS key")

    def our_write(self, *, keyed: bool = False) -> None:
        frame = self.requests(keyed=keyed)
        frame.write.format("titanic").options(db=self.url, service="echo").mode("append").save()

    def jdbc_write(self) -> None:
        frame = self.requests(keyed=False).selectExpr(
            "uuid() AS uuid", "'echo' AS service", "'pending' AS state", "0S AS priority",
            "unix_micros(now()) / 1e6D AS created", "unix_micros(now()) / 1e6D AS due", "0 AS attempts",
            "0 AS failures", "0 AS retries", "key", "CAST(request AS BINARY) AS body",
        )  # fmt: skip
        frame.write.format("jdbc").options(**self.jdbc, dbtable="beside").mode("append").save()

    def our_read(self, columns: str | None = None) -> None:
        reader = self.spark.read.format("titanic").options(db=self.url, partitions=PARTITIONS)
        self._drain((reader.schema(columns) if columns else reader).load())

    def jdbc_read(self, columns: str | None = None) -> None:
        wanted = ", ".join(each.split()[0] for each in columns.split(", ")) if columns else "*"
        self._drain(
            self.spark.read.format("jdbc")
            .options(**self.jdbc, dbtable=f"(SELECT {wanted} FROM titanic_requests) AS requests", partitionColumn="id",
                     lowerBound=self.first, upperBound=self.first + self.rows, numPartitions=PARTITIONS)
            .load()
        )  # fmt: skip

    @property
    def first(self) -> int:
        return int(self.server.execute("SELECT min(id) FROM titanic_requests")[0][0])

    def _drain(self, frame: Any) -> None:
        frame.write.format("noop").mode("overwrite").save()

    def prepare(self) -> None:
        """Create the requests to read, and an empty table for JDBC."""
        self.server.execute("TRUNCATE titanic_requests, titanic_keys CASCADE")
        self.server.execute("DROP TABLE IF EXISTS beside")
        self.server.execute("CREATE TABLE beside (LIKE titanic_requests INCLUDING ALL)")
        self.server.execute("CREATE SEQUENCE IF NOT EXISTS beside_id")
        self.server.execute("ALTER TABLE beside ALTER id SET DEFAULT nextval('beside_id')")


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(rows: int) -> None:
    beside = JAR.exists()
    with tempfile.TemporaryDirectory() as folder, cluster(
        fsync=True, listen_addresses="127.0.0.1", port=str(PORT)
    ) as server:  # fmt: skip
        conf = {"spark.ui.enabled": "false", "spark.sql.warehouse.dir": folder, "spark.local.dir": folder}
        if beside:
            conf["spark.jars"] = str(JAR)
        engine = schema.open_engine(schema.database_url(server.url()))
        schema.upgrade(engine)
        engine.dispose()
        spark = open_session("bench", master=f"local[{PARTITIONS}]", conf=conf)
        contest = Contest(spark, server, rows)
        taken: dict[str, list[float]] = {}
        try:
            for number in range(ROUNDS + 1):
                contest.prepare()
                measured = measure(contest, beside=beside)
                if number:  # not the first one, in which the JVM warms up
                    for name, time_taken in measured.items():
                        taken.setdefault(name, []).append(time_taken)
        finally:
            spark.stop()
    show(taken, rows)


def measure(contest: Contest, *, beside: bool) -> dict[str, float]:
    """Measure each once; each reads what was written last."""
    found = {"write with keys, titanic": seconds(lambda: contest.our_write(keyed=True))}
    contest.server.execute("TRUNCATE titanic_requests, titanic_keys CASCADE")
    if beside:
        found["write, jdbc"] = seconds(contest.jdbc_write)
    found["write, titanic"] = seconds(contest.our_write)
    for name, columns in (("read all columns", None), ("read four columns", FEW)):
        if beside:
            found[f"{name}, jdbc"] = seconds(lambda columns=columns: contest.jdbc_read(columns))  # type: ignore[misc]
        found[f"{name}, titanic"] = seconds(lambda columns=columns: contest.our_read(columns))  # type: ignore[misc]
    return found


def show(taken: dict[str, list[float]], rows: int) -> None:
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{rows:,} rows, {BODY} bytes a body, {PARTITIONS} partitions, {ROUNDS} rounds; load average {load}")
    if not JAR.exists():
        print(f"no JDBC driver at {JAR}: apt-get install libpostgresql-jdbc-java, or set POSTGRESQL_JDBC")
    print(f"{'':<20}{'titanic, rows/s':>18}{'jdbc, rows/s':>16}{'ratio':>8}")
    for name in ("write", "write with keys", "read all columns", "read four columns"):
        ours, theirs = taken[f"{name}, titanic"], taken.get(f"{name.removesuffix(' with keys')}, jdbc")
        line = f"{name:<20}{rows / statistics.median(ours):>18,.0f}"
        if theirs is not None:
            ratio = statistics.median(their / our for our, their in zip(ours, theirs, strict=True))
            line += f"{rows / statistics.median(theirs):>16,.0f}{ratio:>8.2f}"
        print(line)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200_000)
