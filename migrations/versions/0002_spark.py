"""Number requests in the order in which they end, and create the tables for Spark's writes."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Number the requests that have ended, and create the tables for Spark's writes."""
    postgresql = op.get_bind().dialect.name == "postgresql"
    op.add_column("titanic_requests", sa.Column("ended", sa.BigInteger))
    op.create_table(
        "titanic_counters",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.BigInteger, nullable=False),
    )
    op.execute(
        "UPDATE titanic_requests SET ended = old.number "
        "FROM (SELECT id, row_number() OVER (ORDER BY finished, id) AS number "
        "      FROM titanic_requests WHERE state IN ('done', 'failed')) AS old "
        "WHERE titanic_requests.id = old.id"
    )
    if postgresql:
        op.execute(sa.schema.CreateSequence(sa.Sequence("titanic_ended")))
        op.execute("SELECT setval('titanic_ended', max(ended)) FROM titanic_requests HAVING max(ended) IS NOT NULL")
    else:
        op.execute(
            "INSERT INTO titanic_counters (name, value) "
            "SELECT 'ended', max(ended) FROM titanic_requests HAVING max(ended) IS NOT NULL"
        )
    where = sa.text("ended IS NOT NULL")
    op.create_index("titanic_requests_ended", "titanic_requests", ["ended"], sqlite_where=where, postgresql_where=where)
    op.create_table(
        "titanic_staging",
        sa.Column("id", ID, primary_key=True),
        sa.Column("write", sa.Text, nullable=False),
        sa.Column("touched", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "titanic_staged",
        sa.Column("staging", ID, primary_key=True, autoincrement=False),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("uuid", sa.Uuid, nullable=False),
        sa.Column("service", sa.Text, nullable=False),
        sa.Column("priority", sa.SmallInteger, nullable=False),
        sa.Column("due", sa.Double),
        sa.Column("delay", sa.Double),
        sa.Column("retries", sa.Integer, nullable=False),
        sa.Column("backoff", sa.Double),
        sa.Column("result_ttl", sa.Double),
        sa.Column("key", sa.Text),
        sa.Column("key_ttl", sa.Double),
        sa.Column("headers", sa.Text),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    if postgresql:  # which halves the work; the commit counts the rows, and so detects those that a crash has lost
        op.execute("ALTER TABLE titanic_staged SET UNLOGGED")
    op.create_table(
        "titanic_written",
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("batch", sa.BigInteger, nullable=False),
        sa.Column("query", sa.Text),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("committed", sa.Double, nullable=False),
    )


def downgrade() -> None:
    """Drop the numbers and Spark's tables: staged requests are lost, and committed writes are forgotten."""
    op.drop_table("titanic_written")
    op.drop_table("titanic_staged")
    op.drop_table("titanic_staging")
    op.drop_index("titanic_requests_ended", "titanic_requests")
    if op.get_bind().dialect.name == "postgresql":
        op.execute(sa.schema.DropSequence(sa.Sequence("titanic_ended")))
    op.drop_table("titanic_counters")
    op.drop_column("titanic_requests", "ended")
