"""The Spark data source `titanic`; see docs/datasource.md."""
