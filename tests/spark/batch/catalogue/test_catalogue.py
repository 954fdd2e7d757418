"""The catalogue with real Spark: what each request costs, new files, catalogs, databases, reloading."""

import json
import os
from pathlib import Path

import catalogue_jobs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.postgres import cluster
from support.processes import free_endpoint
from support.sparks import LIMITS, running_batch

from zmdp.clients import Client, ServiceError
from zmdp.mdp.errors import SettingError
from zmdp.spark import drivers
from zmdp.spark.batch.catalogue import catalogue_file
from zmdp.spark.batch.catalogue.offer import checks
from zmdp.testing import running_broker

JOBS = {name: each for name, each in vars(catalogue_jobs).items() if callable(each)}
JDBC_DRIVER = Path("/usr/share/java/postgresql.jar")
pytestmark = pytest.mark.long
DERBY = """
    class = "org.apache.spark.sql.execution.datasources.v2.jdbc.JDBCTableCatalog"
    options = { url = "jdbc:derby:memory:NAME;create=true", driver = "org.apache.derby.iapi.jdbc.AutoloadedDriver" }
"""


class Running:
    """A batch with a catalogue in `folder`, and a client."""

    def __init__(self, spark, driver, client, config):
        self.driver, self.client, self.config = driver, client, config
        self._jvm = spark._jvm
        self._context = spark.sparkContext

    def load(self, text):
        """Replace the catalogue."""
        self.config.write_text(text)
        self.driver.reload()

    def rows(self, sql, **settings):
        reply = self.client.request("spark.sql", sql.encode(), json.dumps(settings).encode())
        return [tuple(row.values()) for row in json.loads(reply[-1])]

    def job(self, name, /, **arguments):
        reply = self.client.request("spark.job", name.encode(), json.dumps(arguments).encode())
        return json.loads(reply[-1])

    def refused(self, sql, **settings):
        """Return the error's text."""
        with pytest.raises(ServiceError) as raised:
            self.rows(sql, **settings)
        assert raised.value.code == 422
        return raised.value.text

    def cost(self, request, *args, **kwargs):
        """Return how many Spark jobs a request runs, and how many files Spark lists."""
        listed = self._jvm.org.apache.spark.metrics.source.HiveCatalogMetrics.METRIC_FILES_DISCOVERED()
        scheduler = self._context._jsc.sc().dagScheduler()
        before = scheduler.numTotalJobs(), listed.getCount()
        request(*args, **kwargs)
        return scheduler.numTotalJobs() - before[0], listed.getCount() - before[1]


@pytest.fixture(scope="module")
def batch(spark, tmp_path_factory):
    folder = tmp_path_factory.mktemp("catalogue")
    with (
        running_broker(limits=LIMITS, drain_timeout=0.0) as server,
        running_batch(spark, server.endpoints[0], folder, jobs=JOBS, concurrency=1, results=False) as driver,
        Client(server.endpoints[0], timeout=SPARK_TIMEOUT_SECONDS, retries=0) as client,
    ):
        yield Running(spark, driver, client, folder / "catalogue.toml")


def parquet(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def table(name, path, format="parquet", options="{}"):  # noqa: A002 - the name of the setting
    return f'[tables.{name}]\nformat = "{format}"\npath = "{path}"\noptions = {options}\n'


def count_of(batch, name):
    """Ask for the rows of a table, which takes Spark one job over the driver's listing."""
    return batch.rows(f"SELECT count(*) FROM {name}")[0][0]


# ── what a request costs ─────────────────────────────────────────────────────────────────────────────────────────────


def test_only_tables_that_are_named_are_opened_and_schemas_are_inferred_once(batch, tmp_path):
    names = [f"t{number}" for number in range(100)]
    for name in names:
        parquet(tmp_path / name / "a.parquet", a=[1, 2])
    batch.load("".join(table(name, tmp_path / name) for name in names))
    assert batch.cost(batch.job, "nothing") == (0, 0)
    assert batch.cost(batch.job, "columns", name="t7") == (1, 1)
    for _ in range(2):  # whichever of the sessions it is
        assert batch.cost(batch.job, "columns", name="t7") == (0, 1)
    first, second = (batch.cost(batch.rows, "SELECT t8.a, t9.a AS b FROM t8, t9") for _ in range(2))
    assert (first[0] - second[0], first[1], second[1]) == (2, 2, 2)
    assert batch.cost(batch.job, "columns", name="t8") == (0, 1)


def test_new_files_are_seen_without_inferring_the_schema(batch, tmp_path):
    parquet(tmp_path / "t" / "a.parquet", a=[1, 2])
    batch.load(table("t", tmp_path / "t"))
    assert count_of(batch, "t") == 2
    parquet(tmp_path / "t" / "b.parquet", a=[3])
    assert batch.cost(batch.job, "columns", name="t") == (0, 2)
    assert count_of(batch, "t") == 3
    assert batch.job("count", name="t") == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("first", "second", "before", "after", "options"),
    [
        ({"a.parquet": {"a": [1]}}, {"a.parquet": {"a": ["x"]}}, [(1,)], [("x",)], "{}"),
        ({"a.csv": "a\n1\n"}, {"b.csv": "a\nx\n"}, [(1,)], [("1",), ("x",)], "{ header = true, inferSchema = true }"),
        ({"p=1/a.parquet": {"a": [1]}}, {"p=x/a.parquet": {"a": [2]}}, [(1, 1)], [(1, "1"), (2, "x")], "{}"),
        (
            {"a.parquet": {"a": [1]}},
            {"b.parquet": {"b": [2]}},
            [(1,)],
            [(1, None), (None, 2)],
            "{ mergeSchema = true }",
        ),
    ],
    ids=["another schema", "any file of a format without one", "a partition", "merged schemas"],
)
def test_a_schema_is_inferred_again_when_its_files_change(batch, tmp_path, first, second, before, after, options):
    def write(files):
        for name, content in files.items():
            if isinstance(content, str):
                (tmp_path / "t").mkdir(exist_ok=True)
                (tmp_path / "t" / name).write_text(content)
            else:
                parquet(tmp_path / "t" / name, **content)

    write(first)
    batch.load(table("t", tmp_path / "t", "csv" if "a.csv" in first else "parquet", options))
    assert batch.rows("SELECT * FROM t") == before
    write(second)
    assert sorted(batch.rows("SELECT * FROM t"), key=str) == after


def test_files_that_vanish_and_come_back(batch, tmp_path):
    file = tmp_path / "t" / "a.parquet"
    parquet(file, a=[1])
    batch.load(table("t", tmp_path / "t"))
    assert count_of(batch, "t") == 1
    file.unlink()
    assert "UNABLE_TO_INFER_SCHEMA" in batch.refused("SELECT * FROM t")
    parquet(file, b=["x"])
    assert batch.rows("SELECT b FROM t") == [("x",)]


# ── tables in jobs ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def three(batch, tmp_path_factory):
    """A catalogue with two tables that can be read, and one that cannot."""
    folder = tmp_path_factory.mktemp("three")
    for name in ("people", "places"):
        parquet(folder / name / "a.parquet", a=[1, 2])
    return "".join(table(name, folder / name) for name in ("people", "places", "missing"))


def test_a_job_sees_tables_however_it_names_them(batch, three):
    batch.load(three)
    assert batch.job("by_parameter", name="people") == [{"n": 2}]
    assert batch.job("through", name="People") == 2
    assert batch.job("exists", name="places")
    assert not batch.job("exists", name="missing")
    assert batch.job("views") == ["people", "places"]
    assert batch.rows("SELECT count(*) FROM IDENTIFIER(:t)", args={"t": "people"}) == [(2,)]


def test_a_jobs_own_view_hides_a_table_only_from_itself(batch, three):
    batch.load(three)
    for _ in range(2):
        assert batch.job("own", name="people") == 7
        assert batch.job("own", name="another") == 7
    for _ in range(2):
        assert batch.job("count", name="people") == [2, 2, 2, 2]
        assert "TABLE_OR_VIEW_NOT_FOUND" in batch.refused("SELECT * FROM another")


def test_the_reason_why_a_table_cannot_be_read_reaches_the_caller(batch, three):
    batch.load(three)
    assert "PATH_NOT_FOUND" in batch.refused("SELECT * FROM missing")
    assert "`nowhere`" in batch.refused("SELECT 'missing' FROM nowhere")
    assert batch.rows("SELECT 'missing' -- missing") == [("missing",)]
    with pytest.raises(ServiceError, match="PATH_NOT_FOUND"):
        batch.job("count", name="missing")


# ── catalogs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def two(batch, spark, tmp_path_factory):
    """A catalogue with the catalogs `lake` and `other`; both have a table APP.T."""
    spark._jvm.System.setProperty("derby.stream.error.file", str(tmp_path_factory.mktemp("derby") / "log"))
    text = f"[catalogs.lake]\n{DERBY.replace('NAME', 'lake')}\n[catalogs.other]\n{DERBY.replace('NAME', 'other')}"
    batch.load(text)
    for number, name in enumerate(("lake", "other")):
        batch.job("execute", sql=f"CREATE TABLE {name}.APP.T (a int)")
        batch.job("execute", sql=f"INSERT INTO {name}.APP.T VALUES ({number})")
    return text


def test_three_part_names(batch, two):
    batch.load(two)
    assert batch.rows("SELECT * FROM lake.APP.T") == [(0,)]
    assert batch.rows("SELECT x.a, y.a AS b FROM lake.APP.T x, other.APP.T y") == [(0, 1)]
    assert batch.rows("SELECT (SELECT max(a) FROM lake.APP.T) AS m") == [(0,)]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM lake.APP.T",
        "SELECT 1 AS a WHERE 0 IN (SELECT a FROM lake.APP.T)",
        "SELECT (SELECT max(a) FROM lake.APP.T x) AS m",
        "WITH c AS (TABLE lake.APP.T) SELECT * FROM c AS d",
        "SELECT * FROM IDENTIFIER('lake' || '.APP.T')",
        "SELECT * FROM `lake`.`APP`.`T` JOIN other.APP.T USING (a)",
        "SELECT * FROM range(1) r, LATERAL (SELECT * FROM lake.APP.T)",
        "SELECT '\n== Optimized Logical Plan ==\n' AS a FROM lake.APP.T",
    ],
)
def test_only_catalogs_of_the_file_may_be_read(batch, spark, two, sql):
    class_name, options = (line.partition(" = ")[2].strip('"') for line in DERBY.strip().splitlines())
    del options
    spark.sparkContext._jsc.sc().conf().set("spark.sql.catalog.lake", class_name)  # configured, but not in the file
    for option, value in (("url", "jdbc:derby:memory:lake"), ("driver", "org.apache.derby.iapi.jdbc.AutoloadedDriver")):
        spark.sparkContext._jsc.sc().conf().set(f"spark.sql.catalog.lake.{option}", value)
    batch.load(two[two.index("[catalogs.other]") :])
    assert "lake.APP.T: queries may not read the catalog lake; allowed: other" in batch.refused(sql)
    batch.load("[catalogs.lake]\n")  # allowed, and configured elsewhere
    if "other" not in sql:
        assert len(batch.rows(sql)) == 1


def test_tables_of_the_session_catalog_have_to_be_allowed_too(batch, spark):
    spark.range(3).write.mode("overwrite").saveAsTable("managed")
    try:
        for name in ("managed", "default.managed", "spark_catalog.default.managed"):
            batch.load("")
            assert "may not read the catalog spark_catalog; allowed: none" in batch.refused(f"SELECT * FROM {name}")
            batch.load("[catalogs.spark_catalog]")
            assert count_of(batch, name) == 3
    finally:
        spark.sql("DROP TABLE managed")


def test_what_a_job_sets_and_registers_does_not_reach_later_requests(batch):
    for sql in ("SET TIME ZONE '+05:00'", "CREATE TEMPORARY FUNCTION seven() RETURNS INT RETURN 7"):
        batch.job("execute", sql=sql)
    for _ in range(4):  # more than there are sessions
        assert "UNRESOLVED_ROUTINE" in batch.refused("SELECT seven()")
    for _ in range(4):
        assert batch.rows("SELECT current_timezone() AS zone") != [("+05:00",)]


# ── databases ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(
    not JDBC_DRIVER.exists(), reason=f"no {JDBC_DRIVER}: apt-get install libpostgresql-jdbc-java"
)  # fmt: skip
def test_tables_and_a_catalog_on_postgresql(batch, monkeypatch):
    port = free_endpoint().rpartition(":")[2]
    with cluster(listen_addresses="127.0.0.1", port=port) as server:
        server.execute("CREATE TABLE sales (id int, name text, price numeric(8, 2), at timestamp)")
        server.execute("INSERT INTO sales VALUES (1, 'a', 1.50, '2026-01-02 03:04:05'), (2, NULL, 2, NULL)")
        monkeypatch.setenv("SALES_USER", "postgres")
        options = f'url = "jdbc:postgresql://127.0.0.1:{port}/postgres", user = {{ env = "SALES_USER" }}'
        batch.load(f"""
            [tables.sales]
            format = "jdbc"
            options = {{ {options}, dbtable = "sales" }}
            [catalogs.pg]
            class = "org.apache.spark.sql.execution.datasources.v2.jdbc.JDBCTableCatalog"
            options = {{ {options}, driver = "org.postgresql.Driver" }}
        """)
        expected = [(1, "a", "1.50", "2026-01-02T03:04:05"), (2, None, "2.00", None)]
        for name in ("sales", "pg.public.sales"):
            assert sorted(batch.rows(f"SELECT id, name, price, CAST(at AS timestamp_ntz) FROM {name}")) == expected, (
                name
            )
        assert batch.job("count", name="sales") == [2, 2, 2, 2]
        server.execute("ALTER TABLE sales ADD COLUMN more int DEFAULT 7")
        assert batch.rows("SELECT more FROM sales WHERE id = 1") == [(7,)]


# ── a lakehouse ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(
    "ICEBERG_JAR" not in os.environ, reason="set ICEBERG_JAR to an iceberg-spark-runtime for this version of Spark"
)
def test_iceberg(batch, spark, tmp_path):
    lake = f"""
        [catalogs.lakehouse]
        class = "org.apache.iceberg.spark.SparkCatalog"
        options = {{ type = "hadoop", warehouse = "{tmp_path}", cache-enabled = false }}
    """
    batch.load(lake + table("orders", tmp_path / "shop" / "orders", "iceberg"))
    name = "lakehouse.shop.orders"
    batch.job("execute", sql=f"CREATE TABLE {name} (id bigint, text string) USING iceberg")
    batch.job("append", name=name, ids=[1, 2])
    ((first, made),) = batch.rows(f"SELECT snapshot_id, string(committed_at) FROM {name}.snapshots")
    before = [(1, "order 1"), (2, "order 2")]
    for sql in (name, f"{name} VERSION AS OF {first}", f"{name} TIMESTAMP AS OF '{made}'", "orders"):
        assert sorted(batch.rows(f"SELECT * FROM {sql}")) == before
    other = spark.newSession()  # writes as another program would, while the batch's sessions have read the table
    for setting, value in catalogue_file.read(batch.config).settings.items():
        other.conf.set(setting, value)
    other.sql(f"INSERT INTO {name} VALUES (3, 'order 3')")
    assert count_of(batch, name) == 3
    batch.job("execute", sql=f"ALTER TABLE {name} ADD COLUMN price double")
    merged = f"MERGE INTO {name} t USING (SELECT 1 AS id) s ON t.id = s.id WHEN MATCHED THEN UPDATE SET price = 9.5"
    batch.job("execute", sql=merged)
    after = [(1, "order 1", 9.5), (2, "order 2", None), (3, "order 3", None)]
    for _ in range(3):  # each session of the pool sees the same
        assert sorted(batch.rows(f"SELECT * FROM {name}")) == sorted(batch.rows("SELECT * FROM orders")) == after
        assert sorted(batch.rows(f"SELECT * FROM {name} VERSION AS OF {first}")) == before
    assert batch.job("count", name=name) == [3, 3, 3, 3]
    for catalog in ("iceberg", "lakehouse"):  # files by their path
        batch.refused(f"SELECT * FROM {catalog}.`{tmp_path}/shop/orders`")
    batch.refused(f"INSERT INTO {name} VALUES (4, 'by a query', 1.0)")


# ── reloading ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_invalid_file_changes_nothing(batch, three):
    batch.load(three)
    with pytest.raises(SettingError, match="is not valid TOML"):
        batch.load("[tables")
    assert count_of(batch, "people") == 2
    with pytest.raises(ServiceError, match="is not valid TOML"):
        drivers.ask(batch.client, "batch", "reload")


def test_a_reload_infers_schemas_again(batch, tmp_path):
    parquet(tmp_path / "t" / "a.parquet", a=[1])
    batch.load(table("t", tmp_path / "t"))
    assert batch.job("columns", name="t") == ["a"]
    parquet(tmp_path / "t" / "b.parquet", a=[2], b=["x"])
    assert batch.job("columns", name="t") == ["a"]  # one file is enough
    batch.load(table("t", tmp_path / "t", options="{ mergeSchema = true }"))
    assert batch.job("columns", name="t") == ["a", "b"]
    drivers.ask(batch.client, "batch", "reload")
    jobs, _ = batch.cost(batch.job, "columns", name="t")
    assert jobs > 0


def test_a_reload_changes_catalogs(batch, two):
    batch.load(two)
    for _ in range(2):  # both sessions use the catalogs
        assert batch.rows("SELECT * FROM lake.APP.T") == [(0,)]
    batch.load(two.replace("memory:lake", "memory:other"))
    for _ in range(2):
        assert batch.rows("SELECT * FROM lake.APP.T") == [(1,)]


# ── checking ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_checks(spark, two, three, tmp_path):
    file = tmp_path / "catalogue.toml"
    file.write_text(two + three + table("torn", tmp_path / "torn.parquet") + "schema = 'a int'\n")
    (tmp_path / "torn.parquet").write_text("PAR1 and no more")
    jobs = {"use": "catalogue_jobs:use", "none": "catalogue_jobs:none"}
    found = {name: each for name, *each in checks(spark.newSession(), catalogue_file.read(file), jobs)}
    assert found["table people"] == [True, "a:bigint"]
    assert found["catalog lake"][0]
    assert found["job use"] == [True, "takes (catalog: str)"]
    failed = {name: text for name, (opened, text) in found.items() if not opened}
    assert failed.keys() == {"table missing", "table torn", "job none"}
    assert "PATH_NOT_FOUND" in failed["table missing"]
    assert "none" in failed["job none"]
