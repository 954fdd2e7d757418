"""What callers get for Spark's own errors: the condition, the file and the remedy."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zmdp.spark.batch.failures import failure, lost_error


def parquet_of_another_type(spark, folder):
    pq.write_table(pa.table({"id": [1]}), folder / "a.parquet")
    pq.write_table(pa.table({"id": ["x"]}), folder / "b.parquet")
    spark.read.schema("id bigint").parquet(str(folder)).toArrow()


def malformed_csv(spark, folder):
    (folder / "c.csv").write_text("1\nx\n")
    spark.read.schema("id int").option("mode", "FAILFAST").csv(str(folder)).toArrow()


def missing_jar(spark, folder):
    spark.read.format("iceberg").load(str(folder))


def missing_catalog(spark, folder):
    own = spark.newSession()
    own.conf.set("spark.sql.catalog.lake", "org.apache.iceberg.spark.SparkCatalog")
    own.sql(f"SELECT * FROM lake.{folder.name}").collect()


@pytest.mark.long
@pytest.mark.parametrize(
    ("fail", "condition", "sqlstate", "said"),
    [
        (parquet_of_another_type, "FAILED_READ_FILE.PARQUET_COLUMN_DATA_TYPE_MISMATCH", "KD001", "/b.parquet"),
        (malformed_csv, "FAILED_READ_FILE.NO_HINT", "KD001", "/c.csv"),
        (malformed_csv, "FAILED_READ_FILE.NO_HINT", "KD001", "try setting the option 'mode' as 'PERMISSIVE'"),
        (missing_jar, "DATA_SOURCE_NOT_FOUND", "42K02", "Failed to find the data source: iceberg"),
        (missing_jar, "DATA_SOURCE_NOT_FOUND", "42K02", "--conf spark.jars.packages=GROUP:ARTIFACT:VERSION"),
        (missing_catalog, "CANNOT_LOAD_CATALOG.PLUGIN_CLASS_NOT_FOUND", "46103", "Cannot load catalog 'lake'"),
        (missing_catalog, "CANNOT_LOAD_CATALOG.PLUGIN_CLASS_NOT_FOUND", "46103", "--conf spark.jars.packages="),
    ],
)
def test_the_outermost_condition_is_reported(spark, tmp_path, fail, condition, sqlstate, said):
    with pytest.raises(Exception) as raised:  # noqa: PT011 - py4j's and PySpark's
        fail(spark, tmp_path)
    error = failure(raised.value)
    found = json.loads(error.detail)
    assert (found["condition"], found["sqlstate"], found["message"]) == (condition, sqlstate, error.text)
    assert error.text.startswith(f"[{condition}] ")
    assert said in error.text


class Shutdown(Exception):
    """What Spark raises in every job when its driver ends."""

    java_exception = object()


@pytest.mark.parametrize("error", [ConnectionError(), Shutdown("Job 7 cancelled because SparkContext was shut down")])
def test_a_bystander_is_told_that_another_job_may_be_the_cause(error):
    assert "in this job, or in another one that ran beside it" in lost_error("1", error).text
