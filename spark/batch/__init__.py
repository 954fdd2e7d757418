"""Spark jobs as services."""
