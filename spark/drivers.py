"""The control service of a driver: a batch or fleet NAME offers `spark.control.NAME` (`mdp/program/control.py`).

All drivers have the operations `status` and `drain`; batches also have `catalogue`, `cancel`, `reload` and `history`.
"""

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from ..clients import Client, control
from ..mdp.errors import ZmdpError
from ..mdp.program.control import SPARK, validate_name
from ..mdp.security.keys import ClientKeys
from ..workers import Worker
from ..workers.control import Operation, control_handler

log = logging.getLogger("zmdp.spark")

names = partial(control.programs, prefix=SPARK)
ask = partial(control.ask, prefix=SPARK)
ask_all = partial(control.ask_all, prefix=SPARK)


@contextmanager
def control_service(
    name: str, operations: Mapping[str, Operation], *, broker: str | Sequence[str], keys: ClientKeys | None = None
) -> Generator[None]:
    """Offer the control service of the driver `name` while the `with` block lasts.

    Raises `SettingError` if the name is not valid.
    """
    service = SPARK + validate_name(name)
    with suppress(ZmdpError), Client(broker, timeout=1.0, retries=0, key=keys) as client:
        if client.available(service):
            log.warning(
                "another driver named %s exists, or has just died; status and drain reach only one of them, so "
                "choose another --name",
                name,
            )
    handler = control_handler(name, operations, admin_only={"drain", "reload"})
    with Worker(service, handler, broker=broker, key=keys, concurrency=2):
        yield
