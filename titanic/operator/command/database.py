"""Opens the database for commands, and explains its errors."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

import click
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from ....mdp.errors import TitanicError
from ...db import schema

DB = click.option(
    "--db",
    default=schema.DEFAULT_DB,
    envvar="TITANIC_DB",
    show_envvar=True,
    metavar="URL",
    help="Database: sqlite:///FILE (or just FILE), or postgresql://USER@HOST/NAME.",
)
Begin = Callable[[], AbstractContextManager[Connection]]
"""Begin a transaction."""


@contextmanager
def database_errors(db: str) -> Generator[None]:
    """Convert the database's errors to one-line errors."""
    try:
        yield
    except sa.exc.DBAPIError as error:
        url = schema.database_url(db)
        raise TitanicError(f"{schema.shown(url)}: {schema.explain(error, url)}", code=500) from None


@contextmanager
def opened_engine(db: str, **how: bool) -> Generator[Engine]:
    """Yield an engine that `schema.open_engine` opens, and close its connections."""
    engine = schema.open_engine(schema.database_url(db), **how)
    try:
        with database_errors(db):
            yield engine
    finally:
        engine.dispose()


@contextmanager
def opened_tables(db: str, *, write: bool = False) -> Generator[Begin]:
    """Check the tables and yield a function that begins a transaction."""
    with opened_engine(db, write=write) as engine:
        with engine.begin() as connection:
            schema.check(connection, engine.url)
        yield engine.begin
