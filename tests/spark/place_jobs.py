"""Python jobs that behave the same wherever Spark runs.  Functions for executors are local, so they travel by value."""

from pathlib import Path

import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody does


def columns(spark):
    """Columns and literals."""
    return spark.range(3).select((F.col("id") * 2 + F.lit(1)).alias("n"))


def udf(spark):
    """A Python function, whose type is the name of one."""
    return spark.range(3).select(F.udf(lambda n: n + 1, "bigint")("id").alias("n"))


def pandas_udf(spark):
    """A function of pandas series."""

    @F.pandas_udf("bigint")
    def negative(series: pd.Series) -> pd.Series:
        return -series

    return spark.range(3).select(negative("id").alias("n"))


def sql(spark, least: int):
    """A query with a parameter, over a table of the catalogue."""
    return spark.sql("SELECT a FROM numbers WHERE a >= :least ORDER BY a", {"least": least})


def active(spark):
    """What libraries do that are not given the session."""
    return [SparkSession.active().range(2).count(), SparkSession.getActiveSession() is not None]


def stream(spark, folder: str):
    """A stream of files, to its end."""
    spark.range(5).write.mode("overwrite").parquet(f"{folder}/in")
    rows = spark.readStream.schema("id bigint").parquet(f"{folder}/in").select((F.col("id") + 1).alias("id"))
    sink = rows.writeStream.format("parquet").option("checkpointLocation", f"{folder}/checkpoint")
    sink.trigger(availableNow=True).start(f"{folder}/out").awaitTermination()
    return spark.read.parquet(f"{folder}/out").agg(F.sum("id").alias("total"))


def wrong_column(spark):
    """An error that Spark finds while it plans."""
    return spark.range(1).select(F.col("nothing")).columns  # on Connect, nothing is planned before this


def failing_function(spark):
    """An error of Python on an executor."""

    def fail(n):
        raise ValueError(f"not {n}")

    return spark.range(1).select(F.udf(fail, "bigint")("id"))


def failing_job(spark):
    """An error of Python in the driver."""
    return spark.range(1).count() + Path("x")
