"""Give requests and keys an owner.

The column that named the Titanic which runs a request was called `owner` until now; it becomes `holder`.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

RUNNING = sa.text("state = 'running'")


def upgrade() -> None:
    """Rename what concerns leases, and add the owners.  Requests and keys that exist have none."""
    _rename_holders("owner", "holder")
    op.add_column("titanic_requests", _owner())
    if op.get_context().dialect.name == "sqlite":
        _recreate_keys(_owner(), columns="service, key, uuid, expires", primary_key=("service", "key", "owner"))
        return
    op.add_column("titanic_keys", _owner())
    op.drop_constraint("titanic_keys_pkey", "titanic_keys")
    op.create_primary_key("titanic_keys_pkey", "titanic_keys", ["service", "key", "owner"])


def downgrade() -> None:
    """Drop the owners: their keys are forgotten, and everybody can fetch their requests."""
    op.execute("DELETE FROM titanic_keys WHERE owner <> ''")
    if op.get_context().dialect.name == "sqlite":
        _recreate_keys(columns="service, key, uuid, expires", primary_key=("service", "key"))
    else:
        op.drop_constraint("titanic_keys_pkey", "titanic_keys")
        op.drop_column("titanic_keys", "owner")
        op.create_primary_key("titanic_keys_pkey", "titanic_keys", ["service", "key"])
    op.drop_column("titanic_requests", "owner")
    _rename_holders("holder", "owner")


def _owner() -> "sa.Column[str]":
    return sa.Column("owner", sa.Text, nullable=False, server_default=sa.text("''"))


def _rename_holders(before: str, after: str) -> None:
    op.drop_index(f"titanic_requests_{before}", "titanic_requests")
    op.execute(f"ALTER TABLE titanic_requests RENAME COLUMN {before} TO {after}")
    op.create_index(
        f"titanic_requests_{after}", "titanic_requests", [after], sqlite_where=RUNNING, postgresql_where=RUNNING
    )
    # Not renamed: that would leave the old name in the primary key's on PostgreSQL, and quotes in SQLite's schema.
    op.create_table(
        f"titanic_{after}s",
        sa.Column(after, sa.Text, primary_key=True),
        sa.Column("lease", sa.Double, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
    )
    op.execute(f"INSERT INTO titanic_{after}s SELECT {before}, lease, seconds FROM titanic_{before}s")  # noqa: S608
    op.drop_table(f"titanic_{before}s")


def _recreate_keys(*more: "sa.Column[str]", columns: str, primary_key: tuple[str, ...]) -> None:
    """Create the table again with its rows: SQLite cannot change a primary key."""
    op.execute(f"CREATE TEMPORARY TABLE kept AS SELECT {columns} FROM titanic_keys")  # noqa: S608 - our own
    op.drop_table("titanic_keys")
    op.create_table(
        "titanic_keys",
        sa.Column("service", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("uuid", sa.Uuid, nullable=False),
        sa.Column("expires", sa.Double),
        *more,
        sa.PrimaryKeyConstraint(*primary_key),
    )
    where = sa.text("expires IS NOT NULL")
    op.create_index("titanic_keys_expires", "titanic_keys", ["expires"], sqlite_where=where)
    op.execute(f"INSERT INTO titanic_keys ({columns}) SELECT {columns} FROM temp.kept")  # noqa: S608 - our own
    op.execute("DROP TABLE temp.kept")
