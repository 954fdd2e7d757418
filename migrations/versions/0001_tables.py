"""Create the tables: requests, PARTIALs of their replies, callers' keys, schedules, leases, and what Spark writes."""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create the tables, and give the database its identity."""
    _create_requests()
    op.create_table(
        "titanic_holders",
        sa.Column("holder", sa.Text, primary_key=True),
        sa.Column("lease", sa.Double, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
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
        sa.Column("owner", sa.Text, primary_key=True, server_default=sa.text("''")),
    )
    _partial("titanic_keys_expires", "titanic_keys", ["expires"], "expires IS NOT NULL")
    _create_schedules()
    identity = op.create_table("titanic_identity", sa.Column("id", sa.Text, primary_key=True))
    op.execute(sa.insert(identity).values(id=secrets.token_hex(8)))
    _create_what_spark_writes()


def _create_requests() -> None:
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
        sa.Column("holder", sa.Text),
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
        sa.Column("ended", sa.BigInteger),
        sa.Column("deaths", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("owner", sa.Text, nullable=False, server_default=sa.text("''")),
        sa.CheckConstraint(
            "state IN ('delayed', 'pending', 'running', 'done', 'failed')", name="titanic_requests_state"
        ),
        sqlite_autoincrement=True,
    )
    ready: list[str | sa.TextClause] = ["service", sa.text("priority DESC"), "id"]
    _partial("titanic_requests_ready", "titanic_requests", ready, "state = 'pending'")
    _partial("titanic_requests_due", "titanic_requests", ["due"], "state = 'delayed'")
    _partial("titanic_requests_retry", "titanic_requests", ["due"], "state = 'delayed' AND attempts > 0")
    _partial("titanic_requests_holder", "titanic_requests", ["holder"], "state = 'running'")
    _partial("titanic_requests_failed", "titanic_requests", ["id"], "state = 'failed'")
    _partial("titanic_requests_expires", "titanic_requests", ["expires"], "expires IS NOT NULL")
    _partial("titanic_requests_owner", "titanic_requests", ["owner", "id"], "owner <> ''")
    _partial("titanic_requests_ended", "titanic_requests", ["ended"], "ended IS NOT NULL")
    if _on_postgresql():
        op.execute(sa.schema.CreateSequence(sa.Sequence("titanic_ended")))
    op.create_table(
        "titanic_counters",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.BigInteger, nullable=False),
    )


def _create_schedules() -> None:
    op.create_table(
        "titanic_schedules",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("service", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("headers", sa.Text),
        sa.Column("priority", sa.SmallInteger, nullable=False),
        sa.Column("retries", sa.Integer, nullable=False),
        sa.Column("backoff", sa.Double),
        sa.Column("result_ttl", sa.Double),
        sa.Column("cron", sa.Text),
        sa.Column("every", sa.Double),
        sa.Column("timezone", sa.Text, nullable=False),
        sa.Column("missed", sa.Text, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("next", sa.Double),
        sa.Column("last", sa.Double),
        sa.Column("last_uuid", sa.Uuid),
        sa.Column("declared", sa.Boolean, nullable=False),
    )
    _partial("titanic_schedules_next", "titanic_schedules", ["next"], "next IS NOT NULL")


def _create_what_spark_writes() -> None:
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
    if (
        _on_postgresql()
    ):  # which halves the work; the commit counts the rows, and so detects those that a crash has lost
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


def _partial(name: str, table: str, columns: list[str | sa.TextClause], where: str) -> None:
    op.create_index(name, table, columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


def _on_postgresql() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def downgrade() -> None:
    """Drop the tables and everything in them."""
    for table in (
        "written", "staged", "staging", "identity", "schedules", "keys", "parts", "holders", "counters", "requests",
    ):  # fmt: skip
        op.drop_table(f"titanic_{table}")
    if _on_postgresql():
        op.execute(sa.schema.DropSequence(sa.Sequence("titanic_ended")))
