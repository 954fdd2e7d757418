"""Ask programs through their control services (`mdp/program/control_services.py`)."""

import json
from collections.abc import Iterator
from typing import Any

from ..mdp.errors import RequestTimeout, ServiceError, ServiceNotFound
from ..mdp.program.control_services import UNKNOWN_OPERATION, names_in, validate_name
from .mdclient import Client


def programs(client: Client, *, prefix: str) -> list[str]:
    """Return the names of the programs at the broker whose control services have this prefix, sorted."""
    answer = json.loads(client.request("mmi.services")[0])
    offered = (str(row["name"]) for row in answer["services"] if row["workers"] or row.get("hops"))
    return names_in(offered, prefix)


def ask(client: Client, name: str, op: str, *, prefix: str, **arguments: Any) -> dict[str, Any]:
    """Ask the program `name` to perform `op` and return its answer.

    Raises `SettingError` if the name is not valid, `ServiceNotFound` if there is no such program, otherwise as
    `Client.request`.
    """
    service = prefix + validate_name(name)
    try:
        reply = client.request(service, json.dumps({"op": op, **arguments}).encode(), wait=False)
    except ServiceNotFound as error:
        there = ", ".join(programs(client, prefix=prefix)) or "none"
        text = f"no program offers {service} at the broker; available names: {there}"
        raise ServiceNotFound(text, service=service, code=error.code) from None
    found: dict[str, Any] = json.loads(reply[0])
    return found


def ask_all(client: Client, op: str, *, prefix: str, **arguments: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ask each program that has the operation, and yield its name and its answer.  Raises as `Client.request`."""
    for name in programs(client, prefix=prefix):
        try:
            yield name, ask(client, name, op, prefix=prefix, **arguments)
        except (RequestTimeout, ServiceNotFound):  # the program is ending
            continue
        except ServiceError as error:
            if error.code != UNKNOWN_OPERATION:
                raise
