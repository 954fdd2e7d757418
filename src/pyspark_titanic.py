"""Where Spark looks for the data source of `spark.read.format("titanic")`: a module `pyspark_titanic`, `DefaultSource`."""
