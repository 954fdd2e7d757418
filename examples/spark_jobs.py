"""A Python job for `mdp-spark batch --job wordcount=spark_jobs:wordcount` in this folder."""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f


def wordcount(spark: SparkSession, path: str, top: int = 10) -> DataFrame:
    """Return the most frequent words of a text file, the most frequent first."""
    lines = spark.read.text(path).repartition(24)
    words = lines.select(f.explode(f.regexp_extract_all(f.lower("value"), f.lit(r"\p{L}+"), 0)).alias("word"))
    return words.groupBy("word").count().orderBy(f.desc("count"), "word").limit(top)
