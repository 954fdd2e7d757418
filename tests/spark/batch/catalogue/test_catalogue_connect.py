"""The catalogue of a batch whose sessions are on a Spark Connect server."""

import json

import catalogue_jobs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.connect import connected
from support.fleets import SPARK_TIMEOUT_SECONDS
from support.sparks import running_batch

from zmdp.clients import Client, ServiceError
from zmdp.spark.session import connect_session

CATALOGUE = """
    [tables.people]
    format = "parquet"
    path = "people"
    [tables.missing]
    format = "parquet"
    path = "missing"
    [catalogs.lake]
    class = "org.apache.spark.sql.execution.datasources.v2.jdbc.JDBCTableCatalog"
    options = { url = "jdbc:derby:memory:lake;create=true", driver = "org.apache.derby.iapi.jdbc.AutoloadedDriver" }
"""


@pytest.mark.long
@pytest.mark.usefixtures("java")
@pytest.mark.timeout(2400)
def test_tables_and_catalogs_on_connect(tmp_path, endpoint):
    (tmp_path / "people").mkdir()
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "people" / "a.parquet")
    jobs = {name: each for name, each in vars(catalogue_jobs).items() if callable(each)}
    with connected(tmp_path) as session:
        port = session.client._builder.endpoint.rpartition(":")[2]
        session.sql("CREATE TABLE managed AS SELECT 1 AS a")

        given = {"open_session": lambda: connect_session(f"sc://127.0.0.1:{port}"), "jobs": jobs, "concurrency": 1}
        with (
            running_batch(None, endpoint, tmp_path, tables=CATALOGUE, results=False, **given) as driver,
            Client(endpoint, timeout=SPARK_TIMEOUT_SECONDS, retries=0) as client,
        ):

            def rows(sql):
                return json.loads(client.request("spark.sql", sql.encode())[-1])

            def job(name, /, **arguments):
                return json.loads(client.request("spark.job", name.encode(), json.dumps(arguments).encode())[-1])

            for _ in range(2):
                assert rows("SELECT count(*) AS n FROM people") == [{"n": 2}]
                assert job("count", name="people") == [2, 2, 2, 2]
                assert job("own", name="people") == 7
            assert job("views") == ["people"]
            job("execute", sql="CREATE TEMPORARY FUNCTION seven() RETURNS INT RETURN 7")
            job("execute", sql="CREATE TABLE lake.APP.T (a int)")
            assert rows("SELECT a FROM lake.APP.T") == []
            refusals = {
                "SELECT * FROM missing": "PATH_NOT_FOUND",
                "SELECT * FROM nowhere": "TABLE_OR_VIEW_NOT_FOUND",
                "SELECT seven()": "UNRESOLVED_ROUTINE",
                "SELECT reflect('java.lang.System', 'gc')": "'reflect' is not allowed in a query",
            }
            for sql, message in refusals.items():
                with pytest.raises(ServiceError, match=message) as raised:
                    rows(sql)
                assert raised.value.code == 422
            assert rows("SELECT a FROM managed") == [{"a": 1}]  # the server decides
            (tmp_path / "catalogue.toml").write_text("")
            driver.reload()
            with pytest.raises(ServiceError):
                rows("SELECT a FROM lake.APP.T")
