"""A Python job for `mdp-spark batch` in this folder, which sends a DataFrame through a service."""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from zmdp import Service
from zmdp.spark.pipeline import call_service

WORDS = Service("text.words", str, int)


def wordiest(spark: SparkSession, broker: str, top: int = 3) -> DataFrame:
    """Return the chapters with the most words, which the service `text.words` has counted, a request for each row."""
    counted = call_service(spark.table("chapters"), WORDS, input="text", output="words", broker=broker)
    return counted.select("title", "words").orderBy(f.desc("words")).limit(top)
