"""The options of the data source, for reads, streams and writes, and their values."""

import os
from collections.abc import Mapping
from typing import Final

from ...mdp.errors import SettingError
from ...titanic.contrib.arrow.rows import ROW_OPTIONS

READ_OPTIONS: Final = frozenset({"db", "service", "state", "since", "until", "partitions"})
STREAM_OPTIONS: Final = READ_OPTIONS | {"events", "startingoffsets", "maxrowspertrigger"}
WRITE_OPTIONS: Final = ROW_OPTIONS | {"db", "max_waiting", "wait"}
"""The options of both writers; batches can also set `job`, streams `sink`."""
_SPARK_OWN_PREFIXES: Final = ("__", "checkpointlocation")
"""Options that Spark adds itself start with one of these."""


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
