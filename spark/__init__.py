"""Spark integration: jobs as services, executors as workers, DataFrames through services, and Titanic as a table.

Needs the extra `spark` and Java 17 or newer; merely importing this package needs neither.
"""
