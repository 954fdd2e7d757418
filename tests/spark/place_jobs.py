"""Python jobs that behave the same wherever Spark runs.  Functions for executors are local, so they travel by value."""

from pathlib import Path

import pandas as pd
from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - as everybody does
from pyspark.sql.types import LongType, StructType


def columns(spark):
    """Columns and literals."""
    return spark.range(3).select((F.col("id") * 2 + F.lit(1)).alias("n"))


def grouped(spark):
    """Aggregates, and a window."""
    totals = spark.range(4).groupBy((F.col("id") % 2).alias("odd")).agg(F.sum("id").alias("total"))
    ranked = totals.withColumn("rank", F.row_number().over(Window.orderBy(F.desc("total"))))
    return ranked.orderBy("rank")


def udf(spark):
    """A Python function, whose type is the name of one."""
    return spark.range(3).select(F.udf(lambda n: n + 1, "bigint")("id").alias("n"))


def decorated(spark):
    """A Python function, registered for SQL as well."""

    @F.udf(returnType=LongType())
    def square(n):
        return n * n

    spark.udf.register("square", square)
    return spark.sql("SELECT square(id) AS n FROM range(3)")


def pandas_udf(spark):
    """A function of pandas series."""

    @F.pandas_udf("bigint")
    def negative(series: pd.Series) -> pd.Series:
        return -series

    return spark.range(3).select(negative("id").alias("n"))


def frames(spark):
    """A function of pandas frames."""
    return spark.range(3).mapInPandas(lambda parts: (part * 10 for part in parts), StructType().add("id", LongType()))


def sql(spark, least: int):
    """A query with a parameter, over a table of the catalogue."""
    return spark.sql("SELECT a FROM numbers WHERE a >= :least ORDER BY a", {"least": least})


def active(spark):
    """What libraries do that are not given the session."""
    return [SparkSession.active().range(2).count(), SparkSession.getActiveSession() is not None]


def write(spark, folder: str):
    """Parquet files, written and read."""
    spark.range(5).write.mode("overwrite").parquet(folder)
    return spark.read.parquet(folder).where(F.col("id") > 1).count()


def stream(spark, folder: str):
    """A stream of files, to its end."""
    spark.range(5).write.mode("overwrite").parquet(f"{folder}/in")
    rows = spark.readStream.schema("id bigint").parquet(f"{folder}/in").select((F.col("id") + 1).alias("id"))
    sink = rows.writeStream.format("parquet").option("checkpointLocation", f"{folder}/checkpoint")
    sink.trigger(availableNow=True).start(f"{folder}/out").awaitTermination()
    return spark.read.parquet(f"{folder}/out").agg(F.sum("id").alias("total"))


def yielding(spark):
    """Values on the way."""
    yield spark.range(2).count()
    return spark.range(1)


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


def wrong_argument(spark):
    """An error of PySpark's in the driver."""
    return spark.range(1).sample("half")
