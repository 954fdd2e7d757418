"""Count lost workers, bound leases and retries when a clock is set back, and give the database an identity."""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns, the index of retries, and the database's identity.

    The leases of running Titanics are dropped: their requests are executed again.
    """
    op.add_column("titanic_requests", sa.Column("deaths", sa.Integer, nullable=False, server_default=sa.text("0")))
    where = sa.text("state = 'delayed' AND attempts > 0")
    op.create_index("titanic_requests_retry", "titanic_requests", ["due"], sqlite_where=where, postgresql_where=where)
    op.drop_table("titanic_owners")
    op.create_table(
        "titanic_owners",
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("lease", sa.Double, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
    )
    identity = op.create_table("titanic_identity", sa.Column("id", sa.Text, primary_key=True))
    op.execute(sa.insert(identity).values(id=secrets.token_hex(8)))


def downgrade() -> None:
    """Drop the columns, the index, and the identity."""
    op.drop_table("titanic_identity")
    op.drop_column("titanic_owners", "seconds")
    op.drop_index("titanic_requests_retry", "titanic_requests")
    op.drop_column("titanic_requests", "deaths")
