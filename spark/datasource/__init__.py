"""The data source `titanic`: see docs/datasource.md."""
