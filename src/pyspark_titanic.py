"""Makes Spark find the format `titanic`: Spark looks for a `DefaultSource` in a module of this name."""

from zmdp.spark.datasource.provider import TitanicSource as DefaultSource

__all__ = ["DefaultSource"]
