"""The database: its URL, its engine, group commit, and in `store` the SQL."""
