"""Alembic's environment: migrates the connection that it is given, or the database that TITANIC_DB names."""

import os

from alembic import context
from sqlalchemy.engine import Connection

from zmdp.titanic.db import schema
from zmdp.titanic.db.store.models import VERSION_TABLE, Base


def migrate(connection: Connection) -> None:
    """Run the migrations in one transaction, so that a failure changes nothing."""
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        render_as_batch=True,
        include_name=lambda name, kind, parents: kind != "table" or str(name).startswith("titanic_"),
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    migrate(given)
else:
    url = schema.database_url(os.environ.get("TITANIC_DB", schema.DEFAULT_DB))
    engine = schema.open_engine(url, create=True)
    try:
        with engine.begin() as opened:
            migrate(opened)
    finally:
        engine.dispose()
