"""The Spark data source `titanic`; see docs/spark/datasource.md."""
