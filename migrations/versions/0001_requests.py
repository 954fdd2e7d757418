"""Create the tables for requests, PARTIALs, keys and leases."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "titanic_requests",
        sa.Column("id", ID, primary_key=True),
        sa.Column("uuid", sa.Uuid, nullable=False, unique=True),
        sa.Column("service", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("priority", sa.SmallInteger, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("due", sa.Double, nullable=False),
        sa.Column("started", sa.Double),
        sa.Column("finished", sa.Double),
        sa.Column("expires", sa.Double),
        sa.Column("owner", sa.Text),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("retries", sa.Integer, nullable=False),
        sa.Column("backoff", sa.Double),
        sa.Column("result_ttl", sa.Double),
        sa.Column("key", sa.Text),
        sa.Column("headers", sa.Text),
        sa.Column("code", sa.SmallInteger),
        sa.Column("error", sa.Text),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("reply", sa.LargeBinary),
        sa.CheckConstraint(
            "state IN ('delayed', 'pending', 'running', 'done', 'failed')", name="titanic_requests_state"
        ),
        sqlite_autoincrement=True,
    )
    _partial(
        "titanic_requests_ready", "titanic_requests", ["service", sa.text("priority DESC"), "id"], "state = 'pending'"
    )
    _partial("titanic_requests_due", "titanic_requests", ["due"], "state = 'delayed'")
    _partial("titanic_requests_owner", "titanic_requests", ["owner"], "state = 'running'")
    _partial("titanic_requests_failed", "titanic_requests", ["id"], "state = 'failed'")
    _partial("titanic_requests_expires", "titanic_requests", ["expires"], "expires IS NOT NULL")
    op.create_table(
        "titanic_owners",
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("lease", sa.Double, nullable=False),
    )
    op.create_table(
        "titanic_parts",
        sa.Column("request", ID, sa.ForeignKey("titanic_requests.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("attempt", sa.Integer, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "titanic_keys",
        sa.Column("service", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("uuid", sa.Uuid, nullable=False),
        sa.Column("expires", sa.Double),
    )
    _partial("titanic_keys_expires", "titanic_keys", ["expires"], "expires IS NOT NULL")


def _partial(name: str, table: str, columns: list[str | sa.TextClause], where: str) -> None:
    op.create_index(name, table, columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


def downgrade() -> None:
    """Drop the tables and everything in them."""
    op.drop_table("titanic_keys")
    op.drop_table("titanic_parts")
    op.drop_table("titanic_owners")
    op.drop_table("titanic_requests")
