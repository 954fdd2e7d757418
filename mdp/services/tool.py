"""`Tool`: that agents may call a service, and what their programs are told about it (docs/how-to/agents.md)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import SettingError


@dataclass(frozen=True, kw_only=True)
class Tool:
    """Says that a service is meant for agents, which call it through `mdp-gateway mcp`.

        @services.service("report.build", tool=Tool(read_only=True, durable=True))
        def build(month: str) -> Report: ...

    The first three are hints: they decide what an agent's program asks its user, and nothing is enforced by them.

    Args:
        title: What people are shown as its name.
        read_only: It changes nothing.
        destructive: It may delete or overwrite something.
        durable: Its calls are tasks that Titanic keeps: they outlive the agent, the gateway and the worker.

    Raises:
        SettingError: A value is of the wrong type.
    """

    title: str = ""
    read_only: bool | None = None
    destructive: bool | None = None
    durable: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.title, str):
            raise SettingError(f"a tool's title is {self.title!r}: it must be text")
        for name in ("read_only", "destructive", "durable"):
            if not isinstance(getattr(self, name), bool | None):
                raise SettingError(f"a tool's {name} is {getattr(self, name)!r}: it must be true or false")

    def as_option(self) -> dict[str, Any]:
        """Return what a worker says of it.

            Tool(read_only=True).as_option()                    # {'read_only': True}

        Returns:
            What is known, as JSON values.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value or (value is False and name != "durable")}


def checked_tool(given: Any) -> Tool | None:
    """Return what the setting `tool` of a service means: True, False, None or a `Tool`.  Raises `SettingError`."""
    if given is None or given is False:
        return None
    if given is True:
        return Tool()
    if not isinstance(given, Tool):
        raise SettingError(f"tool is {given!r:.100}: it must be true, or a Tool such as Tool(read_only=True)")
    return given


def read_tool(said: Mapping[str, Any]) -> Tool | None:
    """Return what a worker says of a tool; None if it is not one.  What is not of the expected type is ignored."""
    given = said.get("tool")
    if not isinstance(given, dict):
        return None
    kinds = {"title": str, "read_only": bool, "destructive": bool, "durable": bool}
    return Tool(**{name: given[name] for name, kind in kinds.items() if isinstance(given.get(name), kind)})
