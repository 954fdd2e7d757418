"""The pages of gateways, and who is connected to them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .control import ControlServices, Program, amount, count, rows, text
from .observer import Observer
from .shell import NotFoundError, Page, Section, View
from .tables import Column, table


@dataclass(frozen=True)
class Gateway:
    """A gateway, and the sums of its connections."""

    name: str
    kind: str
    listen: str
    host: str
    pid: int
    version: str
    connections: int
    outstanding: int
    requests: int
    memory: int
    up_seconds: float
    more: int
    """Connections that it did not list."""
    trouble: str


@dataclass(frozen=True)
class GatewayConnection:
    """A connection of a gateway."""

    number: int
    peer: str
    kind: str
    user: str
    outstanding: int
    unread_bytes: int
    up_seconds: float


class GatewaySection:
    """The pages of gateways, for those who look at a broker."""

    def __init__(self, observer: Observer, controls: ControlServices) -> None:
        self._observer = observer
        self._controls = controls

    def section(self) -> Section:
        """Return what to mount in a shell."""
        return Section(
            pages=[
                Page("/gateways", "gateways.html", self._overview, "Gateways", "a"),
                Page("/gateway", "gateway.html", self._gateway, part_of="/gateways"),
            ],
            version=lambda: self._observer.generation,
            until_changed=self._observer.until_changed,
        )

    async def _overview(self, view: View) -> Mapping[str, Any]:
        programs, more, trouble = await self._controls.try_to_look()
        gateways = [_gateway_of(each) for each in programs if _is_known(each)]
        columns = [
            Column.text("name", "Name", lambda row: row.name.casefold()),
            Column.text("kind", "Kind", lambda row: row.kind),
            Column.text("listen", "Listens at", lambda row: row.listen),
            Column.text("host", "Host", lambda row: (row.host, row.pid)),
            Column("pid", "PID", lambda row: row.pid),
            Column("connections", "Connections", lambda row: row.connections),
            Column("outstanding", "Outstanding", lambda row: row.outstanding),
            Column("requests", "Requests", lambda row: row.requests),
            Column("memory", "Memory", lambda row: row.memory),
            Column("up", "Up", lambda row: row.up_seconds),
        ]
        found = table(
            gateways, columns, view.path, view.query, default="name",
            text=lambda row: f"{row.name} {row.kind} {row.listen} {row.host} {row.pid}",
        )  # fmt: skip
        return {
            "trouble": self._observer.trouble or trouble, "table": found, "gateways": gateways, "more": more,
            "silent": [each for each in programs if not _is_known(each)],
        }  # fmt: skip

    async def _gateway(self, view: View) -> Mapping[str, Any]:
        name = view.query.get("name", "")
        programs, _, trouble = await self._controls.try_to_look()
        program = next((each for each in programs if each.name == name), None)
        if program is None and not trouble:
            raise NotFoundError(f"The broker knows no gateway {name!r}. Perhaps it has ended.")
        gateway = None if program is None else _gateway_of(program)
        columns = [
            Column.text("peer", "Peer", lambda row: row.peer),
            Column.text("kind", "Kind", lambda row: row.kind),
            Column.text("user", "User", lambda row: row.user),
            Column("outstanding", "Outstanding", lambda row: row.outstanding),
            Column("unread", "Unread", lambda row: row.unread_bytes),
            Column("up", "Connected", lambda row: row.up_seconds),
        ]
        found = table(
            [] if program is None else _connections(program), columns, view.path, view.query, default="-outstanding",
            text=lambda row: f"{row.peer} {row.kind} {row.user}",
        )  # fmt: skip
        return {
            "trouble": self._observer.trouble or trouble, "table": found, "name": name, "gateway": gateway,
            "silent": "" if program is None else program.trouble,
        }  # fmt: skip


def _is_known(program: Program) -> bool:
    return isinstance(program.status.get("kind"), str)


def _gateway_of(program: Program) -> Gateway:
    told = program.status
    return Gateway(
        program.name, text(told.get("kind")), text(told.get("listen")), text(told.get("host")), count(told.get("pid")),
        text(told.get("version")), count(told.get("connections")), count(told.get("outstanding")),
        count(told.get("requests")), count(told.get("memory")), amount(told.get("up_seconds")), count(told.get("more")),
        program.trouble,
    )  # fmt: skip


def _connections(program: Program) -> Iterator[GatewayConnection]:
    for number, row in enumerate(rows(program.status.get("listed"))):
        yield GatewayConnection(
            number, text(row.get("peer")), text(row.get("kind")), text(row.get("user")), count(row.get("outstanding")),
            count(row.get("unread_bytes")), amount(row.get("up_seconds")),
        )  # fmt: skip
