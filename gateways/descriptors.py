"""How many file descriptors a gateway may have: each connection takes one, and each offered service some."""

import logging
import resource
from contextlib import suppress
from typing import Final

BESIDES: Final = 200
"""Descriptors that a gateway needs besides those of connections and services."""

log = logging.getLogger("zmdp.gateway")


def raise_descriptor_limit(wanted: int) -> None:
    """Let this process have `wanted` descriptors and `BESIDES`, or as many as the system allows."""
    wanted += BESIDES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with suppress(ValueError, OSError):  # the system's own limit is lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < wanted:
        log.warning("the system allows %d descriptors, of which %d may be needed (ulimit -n)", allowed, wanted)
