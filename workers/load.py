"""How busy a service is, and which processes of this machine serve it, according to a broker."""

import json
import socket
from typing import Any, Protocol

from ..mdp import wire
from .scaling import Load


class LoadClient(Protocol):
    """The client that asks the broker: a `Client`."""

    def request(self, service: str, *frames: bytes) -> list[bytes]:
        """Call `service` and return the frames of its reply."""


def fetch_load(client: LoadClient, service: str) -> Load:
    """Return the load of a service.

    Raises what `client` raises; `ValueError`, `TypeError`, `LookupError` or `AttributeError` if the broker's answer is
    not that of `mmi.services`.
    """
    row: dict[str, Any] = next(iter(_ask(client, "mmi.services", wire.service_name(service))["services"]), {})
    return Load.from_row(row)


def fetch_pids(client: LoadClient, service: str) -> set[int]:
    """Return the processes on this machine that serve a service.  Raises as `fetch_load`."""
    host, found = socket.gethostname(), set()
    after: list[bytes] = []
    while True:
        answer = _ask(client, "mmi.workers", wire.service_name(service), *after)
        found |= {int(row["pid"]) for row in answer["workers"] if row["host"] == host}
        if not answer["more"]:
            return found
        after = [b"%d" % answer["workers"][-1]["id"]]


def _ask(client: LoadClient, service: str, *frames: bytes) -> Any:
    return json.loads(client.request(service, *frames)[0])
