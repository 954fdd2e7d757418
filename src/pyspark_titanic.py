"""Where Spark looks for the data source of `spark.read.format("titanic")`: `DefaultSource` in a module of this name."""

from zmdp.spark.datasource.provider import TitanicSource as DefaultSource

__all__ = ["DefaultSource"]
