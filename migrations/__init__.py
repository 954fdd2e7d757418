"""The versions of Titanic's tables (Alembic)."""
