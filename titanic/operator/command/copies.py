"""The commands `titanic backup` and `titanic move`."""

from pathlib import Path

import click
from sqlalchemy.engine import URL

from ....clients.console import bodies
from ....mdp.errors import SettingError
from ...db import schema
from .. import copies
from .database import DB, opened_engine


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@DB
@bodies.JSON
def backup(*, file: Path, db: str, as_json: bool) -> None:
    """Copy the SQLite database to the new FILE, also while Titanic is running.

    FILE has everything that was committed when the copy began. It appears once it is complete and on disk; until then
    its name ends in .part. Do not use `cp` instead: the latest requests are in titanic.db-wal. For PostgreSQL, use
    pg_dump.
    """
    url = schema.database_url(db)
    if not schema.is_sqlite(url):
        raise SettingError(
            f"{schema.shown(url)} is not a SQLite file: back up a PostgreSQL database with `pg_dump --format custom`"
        )
    with opened_engine(db, write=False) as engine:
        size = copies.back_up(engine, file)
    if as_json:
        bodies.print_json({"database": schema.shown(url), "file": str(file), "bytes": size})
    else:
        click.echo(f"{schema.shown(url)}: backed up to {file}, {size} bytes")


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@DB
@bodies.JSON
def move(*, file: Path, db: str, as_json: bool) -> None:
    """Copy everything from the SQLite database FILE to the PostgreSQL database --db, whose tables must be empty.

    `titanic db upgrade --db URL` creates the tables. No Titanic may use FILE meanwhile, nor afterwards: it stays as it
    is. All is copied, or nothing: requests with their UUIDs and replies, keys and schedules.
    """
    source, target = schema.database_url(URL.create("sqlite", database=str(file))), schema.database_url(db)
    if schema.is_sqlite(target):
        raise SettingError(
            f"--db is {schema.shown(target)}: it must be the PostgreSQL database to which {file} is moved"
        )
    with opened_engine(db) as engine:
        moved = copies.move(source, engine)
    if as_json:
        bodies.print_json(moved)
    else:
        told = ", ".join(f"{name.removeprefix('titanic_')} {rows}" for name, rows in moved.items())
        click.echo(f"{schema.shown(source)}: copied to {schema.shown(target)}: {told}")
