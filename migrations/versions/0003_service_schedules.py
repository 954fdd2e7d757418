"""Schedules that services declare."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add when a schedule was last declared."""
    op.add_column("titanic_schedules", sa.Column("seen", sa.Double))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("titanic_schedules", "seen")
