"""Titanic over HTTP: metrics, health and pages for operators (`titanic serve --http`, docs/how-to/operations.md)."""
