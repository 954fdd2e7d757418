"""Titanic's SQL: its tables, and the statements on them."""
