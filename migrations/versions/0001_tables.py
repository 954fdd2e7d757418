"""Create the tables: requests, PARTIALs, keys, schedules, leases, counts, and what Spark writes.

Triggers keep the counts in the transactions that change the rows.  On SQLite, which has one writer at a time, each row
changes its count.  On PostgreSQL, several Titanics would wait for each other's counts: there, each statement adds its
changes as rows, which maintenance adds to the counts.
"""
# ruff: noqa: S608 - our own

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")
NUMBERS = ("requests", "attempts", "deaths")
COUNTED = {
    "titanic_requests": ("{row}.service", "{row}.state", "1", "{row}.attempts", "{row}.deaths"),
    "titanic_keys": ("{row}.service", "'key'", "1", "0", "0"),
    "titanic_parts": ("''", "'partial'", "1", "0", "0"),
}
"""The service, the state and the numbers that each row of a table counts for."""
CHANGED = ("service", "state", "attempts", "deaths")
"""The columns of requests that counts depend on.  The columns of the other tables do not change."""


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
    _create_counts()


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
        sa.Column("group_name", sa.Text, nullable=False, server_default=sa.text("''")),
        sa.CheckConstraint(
            "state IN ('delayed', 'pending', 'running', 'done', 'failed')", name="titanic_requests_state"
        ),
        sqlite_autoincrement=True,
    )
    ready: list[str | sa.TextClause] = ["service", "group_name", sa.text("priority DESC"), "id"]
    _partial("titanic_requests_ready", "titanic_requests", ready, "state = 'pending'")
    _partial("titanic_requests_due", "titanic_requests", ["due"], "state = 'delayed'")
    _partial("titanic_requests_retry", "titanic_requests", ["due"], "state = 'delayed' AND attempts > 0")
    _partial("titanic_requests_holder", "titanic_requests", ["holder"], "state = 'running'")
    _partial("titanic_requests_failed", "titanic_requests", ["id"], "state = 'failed'")
    _partial("titanic_requests_expires", "titanic_requests", ["expires"], "expires IS NOT NULL")
    _partial("titanic_requests_owner", "titanic_requests", ["owner", "id"], "owner <> ''")
    _partial("titanic_requests_ended", "titanic_requests", ["ended"], "ended IS NOT NULL")
    _partial("titanic_requests_oldest_pending", "titanic_requests", ["service", "due"], "state = 'pending'")
    _partial("titanic_requests_oldest", "titanic_requests", ["service", "created"], "ended IS NULL")
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
        sa.Column("seen", sa.Double),
        sa.Column("group_name", sa.Text, nullable=False, server_default=sa.text("''")),
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
        sa.Column("group_name", sa.Text),
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


def _create_counts() -> None:
    for table, key in (("titanic_counts", []), ("titanic_count_changes", [sa.Column("id", ID, primary_key=True)])):
        op.create_table(
            table,
            *key,
            sa.Column("service", sa.Text, primary_key=not key, nullable=False),
            sa.Column("state", sa.Text, primary_key=not key, nullable=False),
            *(sa.Column(each, sa.BigInteger, nullable=False) for each in NUMBERS),
        )
    _partial("titanic_counts_zero", "titanic_counts", ["service"], "requests = 0")
    for table, columns in COUNTED.items():
        (_create_statement_triggers if _on_postgresql() else _create_row_triggers)(table, columns)


def _create_row_triggers(table: str, columns: tuple[str, ...]) -> None:
    def add(row: str, sign: str) -> str:
        service, state, *numbers = (each.format(row=row) for each in columns)
        values = ", ".join((service, state, *(f"{sign}{each}" for each in numbers)))
        changes = ", ".join(f"{each} = {each} + excluded.{each}" for each in NUMBERS)
        return f"INSERT INTO titanic_counts VALUES ({values}) ON CONFLICT (service, state) DO UPDATE SET {changes};"

    op.execute(f"CREATE TRIGGER {table}_added AFTER INSERT ON {table} BEGIN {add('NEW', '')} END")
    op.execute(f"CREATE TRIGGER {table}_removed AFTER DELETE ON {table} BEGIN {add('OLD', '-')} END")
    if table == "titanic_requests":
        when = f"AFTER UPDATE OF {', '.join(CHANGED)} ON {table}"
        op.execute(f"CREATE TRIGGER {table}_changed {when} BEGIN {add('OLD', '-')} {add('NEW', '')} END")


def _create_statement_triggers(table: str, columns: tuple[str, ...]) -> None:
    def rows(source: str, sign: str) -> str:
        service, state, *numbers = (each.format(row=source) for each in columns)
        values = ", ".join(f"{sign}{each} AS {name}" for each, name in zip(numbers, NUMBERS, strict=True))
        return f"SELECT {service} AS service, {state} AS state, {values} FROM {source}"

    def create(name: str, event: str, *sources: tuple[str, str, str]) -> None:
        transitions = " ".join(f"{kind} TABLE AS {source}" for kind, source, _ in sources if kind)
        referencing = f"REFERENCING {transitions}" if transitions else ""
        union = " UNION ALL ".join(rows(source, sign) for _, source, sign in sources)
        sums = ", ".join(f"sum({each})" for each in NUMBERS)
        is_zero = " OR ".join(f"sum({each}) <> 0" for each in NUMBERS)
        # With the rights of the tables' owner: a program that only submits need not be allowed to write the counts.
        op.execute(
            f"CREATE FUNCTION {table}_{name}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER "
            f"SET search_path FROM CURRENT AS $$ BEGIN "
            f"INSERT INTO titanic_count_changes (service, state, {', '.join(NUMBERS)}) "
            f"SELECT service, state, {sums} FROM ({union}) AS changes GROUP BY service, state HAVING {is_zero}; "
            f"RETURN NULL; END $$"
        )
        op.execute(
            f"CREATE TRIGGER {table}_{name} {event} ON {table} {referencing} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {table}_{name}()"
        )

    added, removed = ("NEW", "new_rows", ""), ("OLD", "old_rows", "-")
    create("added", "AFTER INSERT", added)
    create("removed", "AFTER DELETE", removed)
    create("emptied", "BEFORE TRUNCATE", ("", table, "-"))
    if table == "titanic_requests":
        create("changed", "AFTER UPDATE", removed, added)


def _partial(name: str, table: str, columns: list[str | sa.TextClause], where: str) -> None:
    op.create_index(name, table, columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


def _on_postgresql() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def downgrade() -> None:
    """Drop the tables and everything in them."""
    for table in (
        "count_changes", "counts", "written", "staged", "staging", "identity", "schedules", "keys", "parts", "holders",
        "counters", "requests",
    ):  # fmt: skip
        op.drop_table(f"titanic_{table}")
    if _on_postgresql():
        op.execute(sa.schema.DropSequence(sa.Sequence("titanic_ended")))
        for table in COUNTED:
            for name in ("added", "removed", "emptied", *(("changed",) if table == "titanic_requests" else ())):
                op.execute(f"DROP FUNCTION {table}_{name}()")
