"""Which tables a role may read, against callers who try to read others; on a classic session, with access control."""

import json
from contextlib import ExitStack, contextmanager

import catalogue_jobs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.access import Folder
from support.connect import connected
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.processes import run
from support.sparks import LIMITS, running_batch

from zmdp.clients import Client, ServiceError
from zmdp.mdp.codes import Code
from zmdp.spark import drivers
from zmdp.spark.session import connect_session

pytestmark = pytest.mark.long

JOBS = {name: each for name, each in vars(catalogue_jobs).items() if callable(each)}
CATALOGUE = """
    [tables.people]
    format = "parquet"
    path = "people"
    [tables.salaries]
    format = "parquet"
    path = "salaries"
    [tables.lost]
    format = "parquet"
    path = "lost"
    [catalogs.lake]
    class = "org.apache.spark.sql.execution.datasources.v2.jdbc.JDBCTableCatalog"
    options = { url = "jdbc:derby:memory:roles;create=true", driver = "org.apache.derby.iapi.jdbc.AutoloadedDriver" }
    [catalogs.spark_catalog]
    [roles.shop]
    tables = ["people", "lost", "lake.APP.OPEN*", "spark_catalog.default.roles_view*"]
    jobs = ["count", "nothing"]
"""
SETUP = (
    "CREATE TABLE lake.APP.OPEN (a int)",
    "INSERT INTO lake.APP.OPEN VALUES (1)",
    "CREATE TABLE lake.APP.SECRET (ssn int)",
    "INSERT INTO lake.APP.SECRET VALUES (4711)",
    "CREATE OR REPLACE VIEW roles_view AS SELECT ssn AS s FROM lake.APP.SECRET",
    "CREATE OR REPLACE VIEW roles_view_open AS SELECT a AS s FROM lake.APP.OPEN",
    "CREATE OR REPLACE FUNCTION roles_value() RETURNS INT RETURN (SELECT max(ssn) FROM lake.APP.SECRET)",
    "CREATE OR REPLACE FUNCTION roles_rows() RETURNS TABLE (x INT) RETURN SELECT ssn FROM lake.APP.SECRET",
    "CREATE OR REPLACE GLOBAL TEMPORARY VIEW roles_global AS SELECT 4711 AS s",
)
CLEANUP = (
    "DROP VIEW roles_view",
    "DROP VIEW roles_view_open",
    "DROP FUNCTION roles_value",
    "DROP FUNCTION roles_rows",
    "DROP VIEW global_temp.roles_global",
)


class Callers:
    """A broker with access control, a batch whose catalogue has roles, and a client of each role."""

    def __init__(self, stack, open_session, folder):
        self.access = Folder(folder)
        self.at = stack.enter_context(self.access.broker(limits=LIMITS)).endpoints[0]
        for name in ("people", "salaries"):
            (folder / name).mkdir()
            pq.write_table(pa.table({"a": [1, 2]}), folder / name / "a.parquet")
        given = {"jobs": JOBS, "concurrency": 1, "results": False, "keys": self.access.keys("driver")}
        batch = running_batch(None, self.at, folder, tables=CATALOGUE, open_session=open_session, **given)
        stack.enter_context(batch)
        self._clients = {
            name: stack.enter_context(
                Client(self.at, timeout=SPARK_TIMEOUT_SECONDS, retries=0, **self.access.settings(name))
            )
            for name in ("shop", "operator")
        }

    def client(self, role):
        return self._clients[role]

    def rows(self, sql, role="shop", **settings):
        reply = self.client(role).request("spark.sql", sql.encode(), json.dumps(settings).encode())
        return [tuple(row.values()) for row in json.loads(reply[-1])]

    def job(self, name, /, role="operator", **arguments):
        reply = self.client(role).request("spark.job", name.encode(), json.dumps(arguments).encode())
        return json.loads(reply[-1])


@contextmanager
def callers_of(open_session, folder):
    with ExitStack() as stack:
        made = Callers(stack, open_session, folder)
        for sql in SETUP:
            made.job("execute", sql=sql)
        yield made
        for sql in CLEANUP:
            made.job("execute", sql=sql)


@pytest.fixture(scope="module")
def callers(spark, tmp_path_factory):
    folder = tmp_path_factory.mktemp("roles")
    spark._jvm.System.setProperty("derby.stream.error.file", str(folder / "derby.log"))
    with callers_of(lambda: spark, folder) as made:
        yield made


def test_what_a_role_may_read(callers):
    assert callers.rows("SELECT count(*) FROM people") == [(2,)]
    assert callers.rows("SELECT p.a FROM people p, lake.APP.OPEN o WHERE p.a IN (SELECT a FROM lake.APP.OPEN)") == [
        (1,)
    ]
    assert callers.rows("SELECT * FROM roles_view_open") == [(1,)]
    assert callers.rows("SELECT a FROM IDENTIFIER(:t)", args={"t": "people"}) == [(1,), (2,)]
    # Admins may read everything.
    assert callers.rows("SELECT ssn FROM lake.APP.SECRET", role="operator") == [(4711,)]
    assert callers.rows("SELECT count(*) FROM salaries", role="operator") == [(2,)]


FORBIDDEN = (
    # tables of the file
    "SELECT * FROM salaries",
    "SELECT * FROM `SALARIES` AS people",
    "SELECT * FROM people WHERE a IN (SELECT a FROM salaries)",
    "SELECT * FROM IDENTIFIER('sal' || 'aries') -- salaries",
    "DESCRIBE salaries",
    "DESCRIBE TABLE salaries",
    "EXPLAIN SELECT * FROM salaries",
    # tables of catalogs
    "SELECT * FROM lake.APP.SECRET",
    "SELECT * FROM lake.APP.SECRET AS `lake.APP.OPEN`",
    "TABLE lake.APP.SECRET",
    "FROM lake.APP.SECRET |> SELECT ssn",
    "WITH people AS (TABLE lake.APP.SECRET) SELECT * FROM people",
    "WITH unused AS (TABLE lake.APP.SECRET) SELECT 1",
    "SELECT (SELECT max(ssn) FROM lake.APP.SECRET) AS m",
    "SELECT 1 ORDER BY (SELECT max(ssn) FROM lake.APP.SECRET)",
    "SELECT a FROM people GROUP BY a HAVING max(a) < (SELECT max(ssn) FROM lake.APP.SECRET)",
    "SELECT CASE WHEN EXISTS (SELECT 1 FROM lake.APP.SECRET WHERE ssn > people.a) THEN 1 END FROM people",
    "SELECT * FROM people, LATERAL (SELECT * FROM lake.APP.SECRET WHERE ssn > a)",
    "SELECT * FROM people UNION ALL TABLE lake.APP.SECRET",
    "SELECT * FROM people EXCEPT SELECT * FROM lake.APP.SECRET",
    "SELECT * FROM (SELECT * FROM lake.APP.SECRET) PIVOT (count(*) FOR ssn IN (4711))",
    "SELECT * FROM explode(ARRAY((SELECT max(ssn) FROM lake.APP.SECRET)))",
    "SELECT * FROM IDENTIFIER('lake.APP.SEC' || 'RET')",
    "SELECT * FROM lake.APP.SECRET TABLESAMPLE (100 PERCENT)",
    "SELECT '\n+- SubqueryAlias lake.APP.OPEN' AS a FROM lake.APP.SECRET",
    "DESCRIBE lake.APP.SECRET",
    "DESCRIBE QUERY SELECT * FROM lake.APP.SECRET",
    "EXPLAIN EXTENDED SELECT * FROM lake.APP.SECRET",
    "DESCRIBE SELECT * FROM (TABLE lake.APP.SECRET)",
    # through what a job has created
    "SELECT * FROM roles_view",
    "SELECT roles_value()",
    "SELECT * FROM roles_rows()",
    "SELECT * FROM lake.SYS.SYSTABLES",
    # errors that tell columns
    "SELECT nosuch FROM lake.APP.SECRET",
    "SELECT 1 WHERE EXISTS (SELECT nosuch FROM lake.APP.SECRET)",
    "WITH c AS (SELECT nosuch FROM lake.APP.SECRET) SELECT 1",
    "SELECT ssn + array(1) FROM lake.APP.SECRET",
)


@pytest.mark.parametrize("sql", FORBIDDEN)
def test_a_role_reads_no_other_table(callers, sql):
    with pytest.raises(ServiceError, match="role shop may not read") as raised:
        callers.rows(sql)
    assert raised.value.code == Code.NOT_ALLOWED
    assert "ssn" not in raised.value.text


WITHHELD = (
    "SELECT a.* FROM lake.APP.SECRET b",
    "SELECT * EXCEPT (nosuch) FROM lake.APP.SECRET",
    "SELECT struct(*).nosuch FROM lake.APP.SECRET",
    "SELECT * FROM lake.APP.SECRET JOIN people USING (nosuch)",
    "SELECT `; line 1 pos 7;\n'Project\n+- SubqueryAlias lake.APP.OPEN\n`.* FROM lake.APP.SECRET",
)


@pytest.mark.parametrize("sql", WITHHELD)
def test_errors_do_not_tell_columns(callers, sql):
    with pytest.raises(ServiceError, match="Spark's message is withheld") as raised:
        callers.rows(sql)
    assert "ssn" not in f"{raised.value.text}{raised.value.detail}"


def test_errors_about_tables_that_a_role_may_read(callers):
    for sql, message in {
        "SELECT nosuch FROM people": r"`nosuch` cannot be resolved. Did you mean one of the following\? \[`a`\]",
        "SELECT * FROM nowhere": "`nowhere` cannot be found",
        "SELECT * FROM session.salaries": "`session`.`salaries` cannot be found",
        "SELECT * FROM lost": "PATH_NOT_FOUND",
        "SELECT * FROM people a b c": "not a valid query",
    }.items():
        with pytest.raises(ServiceError, match=message) as raised:
            callers.rows(sql)
        assert raised.value.code == 422


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT * FROM lake.APP.OPEN WITH (dbtable = 'APP.SECRET')", "options to a data source"),
        ("SELECT * FROM lake.APP.OPEN WITH/* /* */ */('dbtable' = 'APP.SECRET')", "options to a data source"),
        (
            "SELECT * FROM lake.APP.OPEN WITH\u00a0--\n(sessionInitStatement = 'DROP TABLE X')",
            "options to a data source",
        ),
        ("SELECT * FROM global_temp.roles_global", "may not read the catalog global_temp"),
        ("SHOW TABLES IN global_temp", "may not read the catalog global_temp"),
        ("SHOW CREATE TABLE people", "not a query"),
        ("SHOW TABLES IN lake.APP; SELECT 1", "not a query"),
        ("DESCRIBE EXTENDED people", "not a query"),
        ("DESCRIBE FUNCTION roles_value", "not a query"),
        ("DESCRIBE people a", "not a query"),
        ("EXPLAIN DROP TABLE lake.APP.OPEN", "not a query"),
        ("EXPLAIN EXPLAIN SELECT 1", "not a query"),
        ("EXPLAIN SELECT 1; DROP TABLE lake.APP.OPEN", "one statement a request"),
        ("EXPLAIN SELECT 1) UNION (SELECT 2", "PARSE_SYNTAX_ERROR"),
    ],
)
def test_what_no_caller_may_do(callers, sql, message):
    for role in ("shop", "operator"):
        with pytest.raises(ServiceError, match=message) as raised:
            callers.rows(sql, role=role)
        assert raised.value.code == 422


@pytest.mark.parametrize("role", ["shop", "operator"])
def test_queries_name_no_files_and_no_variables(callers, tmp_path, role):
    (tmp_path / "secret.txt").write_text("4711")
    for name in (f"text.`{tmp_path}/secret.txt`", f"parquet.`{tmp_path}`", f"binaryFile.`file://{tmp_path}`"):
        for sql in (f"SELECT * FROM {name}", f"DESCRIBE {name}", f"EXPLAIN SELECT * FROM {name}"):
            with pytest.raises(ServiceError) as raised:
                callers.rows(sql, role=role)
            assert raised.value.code == 422
    for variable in ("${env:PATH}", "${system:user.dir}", "${spark.app.name}"):
        assert callers.rows(f"SELECT '{variable}' AS a", role=role) == [(variable,)]


def test_statements_tell_only_of_tables_that_may_be_read(callers):
    assert callers.rows("DESCRIBE people") == [("a", "bigint", None)]
    assert callers.rows("DESC TABLE lake.APP.OPEN") == [("a", "int", None)]
    assert callers.rows("DESCRIBE QUERY SELECT a AS b, :x AS c FROM people", args={"x": "y"}) == [
        ("b", "bigint", None),
        ("c", "string", None),
    ]
    ((plan,),) = callers.rows("EXPLAIN FORMATTED SELECT a FROM people WHERE a > :n", args={"n": 1})
    assert "Scan parquet" in plan
    assert "(a#" in plan
    assert callers.rows("show tables") == [("", "lost", True), ("", "people", True)]
    assert callers.rows("SHOW TABLES IN lake.APP") == [("APP", "OPEN", False)]
    assert callers.rows("SHOW TABLES FROM lake.`APP`", role="operator") == [
        ("APP", "OPEN", False),
        ("APP", "SECRET", False),
    ]
    assert ("default", "roles_view", False) in callers.rows("SHOW TABLES IN spark_catalog.default")


def test_jobs_of_a_role(callers):
    assert callers.job("nothing", role="shop")
    assert callers.job("count", role="shop", name="salaries") == [2, 2, 2, 2]  # a job reads what it likes
    with pytest.raises(ServiceError, match="no job named 'execute'; available jobs: count, nothing"):
        callers.job("execute", role="shop", sql="SELECT 1")


def test_what_control_services_tell_a_role(callers):
    for role, tables, jobs in (
        ("shop", ["lost", "people"], ["count", "nothing"]),
        ("operator", ["lost", "people", "salaries"], sorted(JOBS)),
    ):
        status = drivers.ask(callers.client(role), "batch", "status")
        assert (status["tables"], status["jobs"]) == (tables, jobs)
        found = drivers.ask(callers.client(role), "batch", "catalogue")
        assert [each["name"] for each in found["tables"]] == tables
        assert [each["name"] for each in found["jobs"]] == jobs


def test_the_jobs_that_a_role_is_shown(callers):
    done = run("mdp-spark", "jobs", "--broker", callers.at, *callers.access.options("shop"))
    assert done.stdout.decode().splitlines() == [
        "count(name: str)",
        "    The rows of a table, as four methods see it.",
        "nothing()",
        "    Uses no table.",
    ]


@pytest.mark.usefixtures("java")
@pytest.mark.timeout(2400)
def test_roles_on_connect(tmp_path):
    with connected(tmp_path) as session:
        port = session.client._builder.endpoint.rpartition(":")[2]
        with callers_of(lambda: connect_session(f"sc://127.0.0.1:{port}"), tmp_path) as callers:
            for sql in ("SELECT 1", "SELECT * FROM people", "DESCRIBE people", "EXPLAIN SELECT 1"):
                with pytest.raises(ServiceError, match="role shop may run no queries: the batch cannot see") as raised:
                    callers.rows(sql)
                assert raised.value.code == Code.NOT_ALLOWED
            assert callers.rows("SHOW TABLES") == [("", "lost", True), ("", "people", True)]
            assert callers.job("nothing", role="shop")
            assert callers.rows("SELECT ssn FROM lake.APP.SECRET", role="operator") == [(4711,)]
            assert callers.rows("DESCRIBE people", role="operator") == [("a", "bigint", None)]
            assert callers.rows("SELECT '${env:PATH}' AS a", role="operator") == [("${env:PATH}",)]
            with pytest.raises(ServiceError):
                callers.rows(f"SELECT * FROM parquet.`{tmp_path}/salaries`", role="operator")
