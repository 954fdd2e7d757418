"""A declarative pipeline, of Spark 4.1 or newer: `spark-pipelines run` in this folder, with BROKER and TITANIC_DB set.

The query functions of a pipeline must not look at columns, as `call_service` does, so it is called outside of them.
"""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

from zmdp.spark.pipeline import call_service

spark = SparkSession.active()
reviews = spark.sql("VALUES (1, 'good and cheap'), (2, NULL), (3, 'very good') AS reviews(id, text)")
called = call_service(reviews, "shout", input="text", broker=os.environ["BROKER"])


@dp.materialized_view
def replies() -> DataFrame:
    """Return each review with the reply of the service."""
    return called


@dp.materialized_view
def outcomes() -> DataFrame:
    """Return how many rows have which code."""
    return spark.read.table("replies").groupBy("reply_code").count()


@dp.materialized_view
def history() -> DataFrame:
    """Return how many of Titanic's requests are in which state."""
    return spark.read.format("titanic").load().groupBy("service", "state").count()
