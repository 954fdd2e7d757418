"""Titanic over HTTP: metrics, health and pages for operators (`titanic serve --http`, docs/monitoring.md)."""
