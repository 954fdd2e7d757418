"""Control services, through which programs report their status and receive commands.

A batch or fleet of Spark named NAME offers `spark.control.NAME`.  A request is one frame with a JSON object whose `op`
names the operation; the reply is one frame with a JSON object.
"""

import re
import socket
from collections.abc import Iterable
from typing import Final

from ..errors import SettingError

SPARK: Final = "spark.control."
UNKNOWN_OPERATION: Final = 422
"""Error code for a request that names no operation of the program."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")


def validate_name(name: str) -> str:
    """Return `name` if it is a valid name of a program.  Raises `SettingError`."""
    if not _NAME.fullmatch(name):
        raise SettingError(f"{name!r} is not a valid name: use up to 100 letters, digits, '.', '_' and '-'")
    return name


def name_or_default(name: str | None, kind: str, number: int) -> str:
    """Return `name`, or KIND-HOST-NUMBER if it is None.  Raises `SettingError` if the name is not valid."""
    if name is None:
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]
        name = f"{kind}-{host}-{number}"
    return validate_name(name)


def names_in(services: Iterable[str], prefix: str) -> list[str]:
    """Return the names of the programs whose control services, with this prefix, are among `services`; sorted."""
    found = (service.removeprefix(prefix) for service in services if service.startswith(prefix))
    return sorted(filter(_NAME.fullmatch, found))  # NAME/… is where the slots of the fleet NAME report
