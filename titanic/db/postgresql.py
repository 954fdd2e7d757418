"""How Titanic uses PostgreSQL: the parameters of a connection, and the settings of each transaction.

A connection pooler like PgBouncer ignores or refuses most settings of a connection, and in transaction pooling each
transaction gets any of the pooler's connections to the server.  So the settings that a transaction needs are in the
message that begins it, which costs no further round trip, and ends with it.
"""

import shlex
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote, urlencode

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine

from ...mdp.errors import SettingError
from ...mdp.program.extras import install_command

CONNECT_SECONDS: Final = 5
"""How long to wait for a connection, and how long the server waits for a transaction whose client says nothing."""
READ_ONLY_STATE: Final = "25006"
"""SQLSTATE of a write in a transaction, or at a server, that only reads."""


def open_engine(url: URL, *, lock_timeout: float) -> Engine:
    """Return an engine whose transactions wait so many seconds for another transaction's lock.

    Raises:
        SettingError: The driver is not installed, or the URL's `options` are invalid.
        sqlalchemy.exc.ArgumentError: The URL's hosts and ports are invalid.
    """
    begins = begin_statement(url, lock_timeout=lock_timeout)
    # The tables grow and shrink, and the plan of a prepared statement would stay the same.
    settings = {"prepare_threshold": None, **_connection_settings(url)}
    try:
        engine = sa.create_engine(url, connect_args=settings, pool_size=2, pool_recycle=3600)
    except ImportError as error:  # psycopg is missing, or the libpq that it needs
        raise SettingError(f"PostgreSQL needs psycopg: {install_command('postgres')} ({error})") from None

    @sa.event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        del record
        connection.autocommit = True  # `begin` below begins transactions, not psycopg

    @sa.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(begins, execution_options={"no_parameters": True})  # a % is a %

    sa.event.listen(engine, "handle_error", _give_up_reading_server)
    return engine


def _give_up_reading_server(context: sa.engine.ExceptionContext) -> None:
    """Drop the connections if their server refuses to write: after a failover, others may lead to another server."""
    if getattr(context.original_exception, "sqlstate", "") == READ_ONLY_STATE:
        context.is_disconnect = True


def begin_statement(url: URL, *, lock_timeout: float, durable: bool = True) -> str:
    """Return the SQL that begins a transaction, with the settings that it needs whatever the server's defaults.

    Args:
        url: Its `options` are set as well: `-c search_path=mine`.
        lock_timeout: Seconds to wait for another transaction's lock.
        durable: Whether a commit must be on disk when it returns.

    Raises:
        SettingError: The URL's `options` are invalid.
    """
    # A row that another transaction has changed meanwhile is no error.  Another program's lock must not block Titanic
    # forever; nor must its own locks block others if this host vanishes in the middle of a transaction.
    ours = {
        "synchronous_commit": "on" if durable else "off",
        "lock_timeout": f"{lock_timeout * 1000:.0f}",
        "idle_in_transaction_session_timeout": f"{CONNECT_SECONDS * 1000}",
        "standard_conforming_strings": "on",
    }
    # Not SET LOCAL, which takes a list, such as that of search_path, for a single name.
    given = [f"SELECT set_config({_quoted(name)}, {_quoted(value)}, true)" for name, value in _options(url)]
    return "; ".join(
        ["BEGIN ISOLATION LEVEL READ COMMITTED", *given, *(f"SET LOCAL {name} = '{ours[name]}'" for name in ours)]
    )


def _quoted(text: str) -> str:
    """Return a string constant, which reads the same whatever `standard_conforming_strings` is."""
    doubled = text.replace("\\", "\\\\").replace("'", "''")
    return f"E'{doubled}'"


def _options(url: URL) -> Iterator[tuple[str, str]]:
    """Yield name and value of each setting in the URL's `options`, which PostgreSQL reads as a command line."""
    given = url.query.get("options", "")
    lexer = shlex.shlex(given if isinstance(given, str) else " ".join(given), posix=True)
    lexer.whitespace_split, lexer.quotes, lexer.commenters = True, "", ""
    try:
        words = iter(list(lexer))
    except ValueError:  # a backslash at the end
        words = iter(["\\"])
    for word in words:
        setting = next(words, "") if word == "-c" else word[2:] if word.startswith(("-c", "--")) else ""
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise SettingError(
                f"the database URL's options: {word!r} is not a setting; expected -c NAME=VALUE, with spaces as %20 "
                "and = as %3D"
            )
        yield name.replace("-", "_"), value


def _connection_settings(url: URL) -> dict[str, Any]:
    """Return the parameters of a connection, other than those in `url`.  PgBouncer takes them without being told."""
    settings: dict[str, Any] = {
        "application_name": "titanic",
        "client_encoding": "utf8",  # otherwise, text from a database without an encoding is bytes
        "connect_timeout": CONNECT_SECONDS,
        "tcp_user_timeout": 4 * CONNECT_SECONDS * 1000,
        "keepalives_idle": CONNECT_SECONDS,
        "options": "",  # each transaction sets them
    }
    return {name: value for name, value in settings.items() if name == "options" or name not in url.query}


def libpq_uri(url: URL) -> str:
    """Return `url` with all settings of a connection, as libpq reads it.  It may contain a password."""
    _, given = url.get_dialect()().create_connect_args(url)
    return f"postgresql:///?{urlencode({**given, **_connection_settings(url)}, quote_via=quote)}"
