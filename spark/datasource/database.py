"""Titanic's database, as the drivers and the executors of Spark open it."""

import os
from collections.abc import Mapping
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from ...mdp.errors import SettingError, TitanicError
from ...titanic import schema

PATIENCE: Final = 60.0
"""Seconds to wait for somebody else's lock: many tasks write at a time."""


def open_database(db: str, *, write: bool) -> Engine:
    """An engine for the database at `db`.  Raises `SettingError` if there is none, or no driver for it."""
    return schema.open_engine(
        schema.database_url(db), write=write, lock_timeout=PATIENCE, busy_timeout=PATIENCE
    )  # fmt: skip


def check_database(engine: Engine) -> None:
    """Raises `SchemaError` if it has not the tables of this release, `TitanicError` if it cannot be reached."""
    try:
        with engine.connect() as connection:
            schema.check(connection, engine.url)
    except sa.exc.DBAPIError as error:
        told = " ".join(str(error.orig).split())
        raise TitanicError(f"{schema.shown(engine.url)} cannot be read: {told}", code=500) from None


def known_options(options: Mapping[str, str], known: frozenset[str], what: str) -> dict[str, str]:
    """`options` with their names in small letters.  Raises `SettingError` for one that does not exist."""
    found = {name.lower(): value for name, value in options.items()}
    for name in found:
        if name not in known and not name.startswith(_SPARKS):
            raise SettingError(f"titanic has no option {name!r} to {what}: it takes {', '.join(sorted(known))}")
    return found


def database_option(options: Mapping[str, str]) -> str:
    """The database that is meant.  Raises `SettingError` if none is named."""
    db = options.get("db") or os.environ.get("TITANIC_DB")
    if not db:
        raise SettingError(
            'titanic needs its database: .option("db", "sqlite:///FILE") or "postgresql://USER@HOST/NAME", or '
            "TITANIC_DB in the driver's environment"
        )
    return db


def whole_option(options: Mapping[str, str], name: str, default: int, *, most: int) -> int:
    """A whole number from 1 to `most`.  Raises `SettingError` for anything else."""
    value = options.get(name, str(default))
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= most:
        raise SettingError(f"{name} is {value!r}: it takes a whole number from 1 to {most}")
    return int(value)


_SPARKS: Final = ("__", "checkpointlocation")
"""What Spark adds by itself begins like this."""
