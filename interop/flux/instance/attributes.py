"""The attributes of a broker that Flux programs ask for with `attr.get`; their values are always texts."""

import os
import re
import socket
from typing import Final

from .topology import Topology

VERSION: Final = "0.88.0"
"""The release of flux-core that the gateway behaves like."""
_IMMUTABLE: Final = frozenset({
    "broker.boot-method", "broker.pid", "broker.starttime", "broker.uuid", "hostname", "instance-level", "local-uri",
    "rank", "security.owner",
})  # fmt: skip
"""Not `size`, as in Flux: here, brokers may be added."""
_PLAIN_HOST: Final = re.compile(r"[^\s,\[\]!]+")


def attributes(topology: Topology, rank: int, *, uri: str, uuid: str, started: float) -> dict[str, tuple[str, int]]:
    """Return value and flags (1: it never changes, and may be cached) of each attribute of a rank.

    A broker's name takes the place of its host's, so that `flux ping NAME` reaches it.
    """
    values = {
        "broker.boot-method": "zmdp",
        "broker.mapping": f"[[0,{topology.size},1,1]]",
        "broker.pid": str(os.getpid()),
        "broker.starttime": f"{started:.2f}",
        "broker.uuid": uuid,
        "hostlist": ",".join(host(topology, each) for each in range(topology.size)),
        "hostname": socket.gethostname(),
        "instance-level": "0",
        "local-uri": uri,
        "rank": str(rank),
        "security.owner": str(os.getuid()),
        "size": str(topology.size),
        "tbon.descendants": str(topology.descendants(rank)),
        "tbon.level": str(topology.level(rank)),
        "tbon.maxlevel": str(topology.max_level),
        "version": VERSION,
    }
    return {name: (value, int(name in _IMMUTABLE)) for name, value in values.items()}


def host(topology: Topology, rank: int) -> str:
    """Return the name of a rank in the host list: its broker's, if a host list can contain it."""
    name = topology.names[rank]
    if not name:
        return socket.gethostname()
    return name if _PLAIN_HOST.fullmatch(name) else f"rank{rank}"
