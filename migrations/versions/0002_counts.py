"""Keep counts of requests, keys and PARTIALs: triggers change them in the transactions that change the rows.

On SQLite, which has one writer at a time, each row changes its count.  On PostgreSQL, several Titanics would wait for
each other's counts: there, each statement adds its changes as rows, which maintenance adds to the counts.
"""
# ruff: noqa: S608 - our own

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")
NUMBERS = ("requests", "attempts", "deaths")
COUNTED = {
    "titanic_requests": ("{row}.service", "{row}.state", "1", "{row}.attempts", "{row}.deaths"),
    "titanic_keys": ("{row}.service", "'key'", "1", "0", "0"),
    "titanic_parts": ("''", "'partial'", "1", "0", "0"),
}
"""What each row of a table stands for: service, state, and what it adds to the numbers."""
CHANGED = ("service", "state", "attempts", "deaths")
"""The columns of requests that counts depend on.  Those of the other tables do not change."""


def upgrade() -> None:
    """Create the counts, count what there is, and create the triggers and the indexes of the oldest requests."""
    for table, key in (("titanic_counts", []), ("titanic_count_changes", [sa.Column("id", ID, primary_key=True)])):
        op.create_table(
            table,
            *key,
            sa.Column("service", sa.Text, primary_key=not key, nullable=False),
            sa.Column("state", sa.Text, primary_key=not key, nullable=False),
            *(sa.Column(each, sa.BigInteger, nullable=False) for each in NUMBERS),
        )
    _partial("titanic_counts_zero", "titanic_counts", ["service"], "requests = 0")
    _partial("titanic_requests_oldest_pending", "titanic_requests", ["service", "due"], "state = 'pending'")
    _partial("titanic_requests_oldest", "titanic_requests", ["service", "created"], "ended IS NULL")
    on_postgresql = op.get_bind().dialect.name == "postgresql"
    for table, columns in COUNTED.items():
        if on_postgresql:  # nothing may change between the count and the triggers
            op.execute(f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE")
        service, state, *numbers = (each.format(row=table) for each in columns)
        sums = ", ".join(f"sum({each})" for each in numbers)
        op.execute(f"INSERT INTO titanic_counts SELECT {service}, {state}, {sums} FROM {table} GROUP BY 1, 2")
        (_create_statement_triggers if on_postgresql else _create_row_triggers)(table, columns)


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
        transitions = " ".join(f"{kind} TABLE AS {source}" for kind, source, _ in sources)
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
            f"CREATE TRIGGER {table}_{name} AFTER {event} ON {table} REFERENCING {transitions} "
            f"FOR EACH STATEMENT EXECUTE FUNCTION {table}_{name}()"
        )

    added, removed = ("NEW", "new_rows", ""), ("OLD", "old_rows", "-")
    create("added", "INSERT", added)
    create("removed", "DELETE", removed)
    if table == "titanic_requests":
        create("changed", "UPDATE", removed, added)


def _partial(name: str, table: str, columns: list[str], where: str) -> None:
    op.create_index(name, table, columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


def downgrade() -> None:
    """Drop the counts, the triggers and the indexes."""
    on_postgresql = op.get_bind().dialect.name == "postgresql"
    for table in COUNTED:
        for name in ("added", "removed", *(("changed",) if table == "titanic_requests" else ())):
            if on_postgresql:
                op.execute(f"DROP TRIGGER {table}_{name} ON {table}")
                op.execute(f"DROP FUNCTION {table}_{name}()")
            else:
                op.execute(f"DROP TRIGGER {table}_{name}")
    op.drop_index("titanic_requests_oldest", "titanic_requests")
    op.drop_index("titanic_requests_oldest_pending", "titanic_requests")
    op.drop_table("titanic_count_changes")
    op.drop_table("titanic_counts")
