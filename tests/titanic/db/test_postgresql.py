"""What holds in a transaction on PostgreSQL, also behind PgBouncer, where another server connection serves each."""

from contextlib import contextmanager

import psycopg
import pyarrow as pa
import pytest
import sqlalchemy as sa
from support.pgbouncer import pgbouncer, through
from support.processes import TIMEOUT_SECONDS
from support.titanics import answer, serving, stored

from zmdp.clients import Client
from zmdp.mdp.errors import SettingError, TitanicError
from zmdp.titanic import Titanic, enqueue
from zmdp.titanic.contrib.arrow.reading import Requests
from zmdp.titanic.contrib.arrow.rows import plan_rows
from zmdp.titanic.contrib.arrow.writing import ArrowWrite
from zmdp.titanic.db import schema, store
from zmdp.titanic.db.engine import prepare
from zmdp.titanic.db.postgresql import begin_statement

pytestmark = pytest.mark.parametrize("backend", ["postgresql"], indirect=True)

WRONG = {
    "synchronous_commit": "off", "lock_timeout": "0", "idle_in_transaction_session_timeout": "0",
    "default_transaction_isolation": "serializable", "standard_conforming_strings": "off",
}  # fmt: skip
IN_FORCE = """
    SELECT concat_ws(' ', current_setting('synchronous_commit'), current_setting('lock_timeout'),
        current_setting('idle_in_transaction_session_timeout'), current_setting('transaction_isolation'),
        current_setting('standard_conforming_strings'))
"""
NOTING = f"""
    CREATE TABLE noted (by text, settings text);
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO noted VALUES (TG_TABLE_NAME || ' ' || TG_OP, ({IN_FORCE})); RETURN NULL;
    END $$;
    CREATE TRIGGER note AFTER INSERT OR UPDATE ON titanic_requests FOR EACH STATEMENT EXECUTE FUNCTION note();
    CREATE TRIGGER note AFTER INSERT OR UPDATE ON titanic_keys FOR EACH STATEMENT EXECUTE FUNCTION note();
    CREATE TRIGGER note AFTER INSERT ON titanic_staged FOR EACH STATEMENT EXECUTE FUNCTION note();
"""


@pytest.fixture(scope="module", params=["", "options"], ids=["as it comes", "ignores options"])
def bouncer(cluster, request):
    ignored = {"ignore_startup_parameters": request.param} if request.param else {}
    with pgbouncer(cluster, **ignored) as folder:
        yield folder


@pytest.fixture
def pooled(own_url, bouncer, cluster):
    """The URL, through PgBouncer, of a database whose defaults are the opposite of what Titanic needs."""
    name = schema.database_url(own_url).database
    for setting, value in WRONG.items():
        cluster.execute(f"ALTER DATABASE {name} SET {setting} = '{value}'")
    return through(bouncer, own_url)


@contextmanager
def opened(url, **how):
    engine = schema.open_engine(schema.database_url(url), **how)
    try:
        yield engine
    finally:
        engine.dispose()


def value(engine, sql):
    with engine.begin() as connection:
        return connection.exec_driver_sql(sql).scalar()


@pytest.fixture
def noted(own_url):
    """Let triggers note what is in force; `noted()` returns that by the table and what was done."""
    with psycopg.connect(own_url) as connection:
        connection.execute(NOTING)

    def read():
        with psycopg.connect(own_url) as connection:
            found = {}
            for by, settings in connection.execute("SELECT DISTINCT by, settings FROM noted"):
                found.setdefault(by, set()).add(settings)
            return found

    return read


def test_each_transaction_has_its_settings(pooled):
    with opened(pooled, lock_timeout=0.25) as first, opened(pooled) as second:
        with first.begin() as open_transaction:  # keeps one of the two server connections
            assert open_transaction.exec_driver_sql(IN_FORCE).scalar() == "on 250ms 5s read committed on"
            assert {value(second, IN_FORCE) for _ in range(3)} == {"on 5s 5s read committed on"}
        assert {value(first, IN_FORCE) for _ in range(3)} == {"on 250ms 5s read committed on"}


def test_nothing_is_left_for_the_other_users_of_the_pool(pooled):
    """As with `SET` outside of a transaction: PgBouncer resets nothing."""
    write = ArrowWrite(pooled, plan_rows(pa.schema({"request": pa.string()}), {"service": "s"}), "w")
    write.commit(None, [write.stage([pa.RecordBatch.from_pydict({"request": ["a"]})], 0)])
    for _ in range(4):
        with psycopg.connect(pooled) as other:
            assert other.execute(IN_FORCE).fetchone() == ("off 0 0 serializable off",)


def test_a_titanic_behind_pgbouncer(pooled, own_url, bench, noted):
    with serving(bench.endpoint, pooled), Client(bench.endpoint, timeout=TIMEOUT_SECONDS, retries=0) as client:
        titanic = Titanic(client)
        tickets = [titanic.submit("echo", b"", key=key) for key in (None, "a", "b", "a", *[None] * 16)]
        worker = bench.x1_worker(b"echo")
        for _ in range(19):  # two of the keys are the same
            answer(worker)
        for ticket in tickets:
            assert ticket.result(timeout=TIMEOUT_SECONDS) == [b"done"]
    assert {row["state"] for row in stored(own_url)["requests"]} == {"done"}
    with_key, without = "on 1s 5s read committed on", "on 2500ms 5s read committed on"
    assert noted() == {
        "titanic_keys INSERT": {with_key},
        "titanic_requests INSERT": {with_key, without},
        "titanic_requests UPDATE": {without},
    }


def test_arrow_behind_pgbouncer(pooled, noted):
    write = ArrowWrite(
        pooled, plan_rows(pa.schema({"request": pa.string(), "key": pa.string()}), {"service": "s"}), "w"
    )
    write.check()
    rows = [pa.RecordBatch.from_pydict({"request": [body], "key": [body]}) for body in ("a", "b")]
    write.commit(None, [write.stage(rows, 0)])
    requests = Requests(pooled, pa.schema({"service": pa.string()}))
    with opened(pooled) as other, other.begin():  # keeps one of the two server connections
        read = [requests.read(low, high) for low, high in requests.ranges(2)]
        assert [row for batches in read for batch in batches for row in batch.to_pylist()] == [{"service": "s"}] * 2
    assert noted() == {
        # Staged rows do not survive a crash of the server anyway, so only what accepts them waits for the disk.
        "titanic_staged INSERT": {"off 1min 5s read committed on"},
        "titanic_requests INSERT": {"on 1min 5s read committed on"},
        "titanic_keys INSERT": {"on 1min 5s read committed on"},
    }


def test_a_schema_in_the_url_is_where_the_tables_are_behind_pgbouncer(pooled, own_url):
    with psycopg.connect(own_url) as admin:
        admin.execute("CREATE SCHEMA mine")
    with opened(f"{pooled}&options=-csearch_path%3Dmine,other") as mine:
        with mine.connect() as connection, pytest.raises(schema.SchemaError, match="has no tables yet"):
            schema.check(connection, mine.url)
        assert schema.upgrade(mine) == (None, schema.head())
        with mine.begin() as connection:
            enqueue(connection, "s", b"")
        assert value(mine, "SELECT count(*) FROM mine.titanic_requests") == 1


def test_a_server_that_only_reads_is_refused_at_the_start(own_url, cluster):
    cluster.execute(f"ALTER DATABASE {schema.database_url(own_url).database} SET default_transaction_read_only = on")
    with pytest.raises(TitanicError, match="only reads: it is a standby, or default_transaction_read_only is set"):
        prepare(schema.database_url(own_url), store.Clock(), 10)


# ── the options of a URL ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "sql"),
    [
        ("-c%20work_mem%3D5MB", ["E'work_mem', E'5MB'"]),
        ("-cwork_mem%3D5MB%20--search-path%3Da%5C%20b,c", ["E'work_mem', E'5MB'", "E'search_path', E'a b,c'"]),
        ("-c%20application_name%3Dit's%20--x.y%3D%5C%5C%3D%25", ["E'application_name', E'it''s'", r"E'x.y', E'\\=%'"]),
        ("", []),
    ],
)
def test_options_are_read_as_postgresql_reads_them(backend, options, sql):
    del backend
    url = schema.database_url(f"postgresql:///name?options={options}")
    assert [each for each in begin_statement(url, lock_timeout=1).split("; ") if "set_config" in each] == [
        f"SELECT set_config({each}, true)" for each in sql
    ]


@pytest.mark.parametrize("options", ["-B%2016", "work_mem%3D5MB", "-c", "-c%20work_mem", "--%3D5", "-cx%3Dy%20%5C"])
def test_other_options_are_rejected(backend, options):
    del backend
    with pytest.raises(SettingError, match="is not a setting; expected -c NAME=VALUE"):
        schema.open_engine(schema.database_url(f"postgresql:///name?options={options}"))


def test_an_option_that_the_server_does_not_know(own_url):
    with opened(f"{own_url}&options=-cserch_path%3D100%25") as engine:
        for _ in range(2):
            with pytest.raises(sa.exc.ProgrammingError, match='unrecognized configuration parameter "serch_path"'):
                value(engine, "SELECT 1")
