"""Open Titanic's database on Spark's driver and executors, and parse options."""

import math
import os
from collections.abc import Mapping
from datetime import datetime
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from ...mdp.errors import SettingError, TitanicError
from ...titanic import schema

LOCK_TIMEOUT_SECONDS: Final = 60.0
"""How long to wait for locks: many tasks write at a time."""


def open_database(db: str, *, write: bool) -> Engine:
    """Return an engine for the database at `db`.  Raises `SettingError` if it or its driver is missing."""
    return schema.open_engine(
        schema.database_url(db), write=write, lock_timeout=LOCK_TIMEOUT_SECONDS, busy_timeout=LOCK_TIMEOUT_SECONDS
    )  # fmt: skip


def check_database(engine: Engine) -> None:
    """Raise `SchemaError` if the tables do not have this release's version, `TitanicError` if they cannot be read."""
    try:
        with engine.connect() as connection:
            schema.check(connection, engine.url)
    except sa.exc.DBAPIError as error:
        detail = " ".join(str(error.orig).split())
        raise TitanicError(f"cannot read {schema.shown(engine.url)}: {detail}", code=500) from None


def known_options(options: Mapping[str, str], known: frozenset[str], what: str) -> dict[str, str]:
    """Return `options` with lower-case names.  Raises `SettingError` for an unknown one."""
    found = {name.lower(): value for name, value in options.items()}
    for name in found:
        if name not in known and not name.startswith(_SPARK_OWN_PREFIXES):
            raise SettingError(
                f"titanic has no option {name!r} to {what}; available options: {', '.join(sorted(known))}"
            )
    return found


def database_option(options: Mapping[str, str]) -> str:
    """Return the database to use.  Raises `SettingError` if none is named."""
    db = options.get("db") or os.environ.get("TITANIC_DB")
    if not db:
        raise SettingError(
            'name the database: .option("db", "sqlite:///FILE") or "postgresql://USER@HOST/NAME", or set TITANIC_DB in '
            "the driver's environment"
        )
    return db


def int_option(options: Mapping[str, str], name: str, default: int, *, most: int) -> int:
    """Return an option as an integer from 1 to `most`.  Raises `SettingError` if it is anything else."""
    value = options.get(name, str(default))
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= most:
        raise SettingError(f"{name} is {value!r}; expected an integer from 1 to {most}")
    return int(value)


def time_option(name: str, text: str) -> float:
    """Return an option as seconds since 1970.  Raises `SettingError` if it is not a time."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            moment = datetime.min
        seconds = math.nan if moment.tzinfo is None else moment.timestamp()
    if not math.isfinite(seconds):
        raise SettingError(
            f"{name} is {text!r:.100}; expected seconds since 1970, or a time such as 2030-01-31T12:00:00+00:00"
        )
    return seconds


_SPARK_OWN_PREFIXES: Final = ("__", "checkpointlocation")
"""Options that Spark adds itself start with one of these."""
