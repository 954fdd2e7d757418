"""A worker's description of its service, and how others read it: the option `about` of READY (docs/reference/x1.md)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .json_schemas import Schema
from .submission import read_defaults
from .tool import Tool, read_tool

_PARTS: Final = re.compile(r"([0-9]{1,18})|([^0-9]+)")


@dataclass(frozen=True)
class About:
    """A service as its workers describe it.  Nobody has checked that: it may be wrong, or meant to deceive.

        about = client.describe("images.resize").about
        about.description, about.request

    Args:
        version: The version, as its authors name it.
        description: What it does.
        codec: `"json"` or `"msgpack"`; empty if the service has no types.
        request: JSON schema of the value that it takes; None if it is unknown.
        reply: That of the value that it replies with, unless it streams.
        part: That of each value that it streams.
        submission: Its defaults for submissions to Titanic: `retries`, `backoff`, `ttl`, `priority`.
        workers: Number of workers that say this.
        said: Everything that they say, as it was received.
        media_types: Those that it can reply with; the header `accept` of a request says which one the caller wants.
        schedule: When Titanic is to submit requests to it: `every`, in seconds, or `cron` and `timezone`.
        tool: That it is meant for agents, and what they are told; None if it is not.
        argument: The name of the argument that the value is.
    """

    version: str = ""
    description: str = ""
    codec: str = ""
    request: Schema | None = None
    reply: Schema | None = None
    part: Schema | None = None
    submission: Mapping[str, float] = field(default_factory=dict)
    workers: int = 0
    said: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] = field(default_factory=dict)
    media_types: tuple[str, ...] = ()
    tool: Tool | None = None
    argument: str = ""

    @classmethod
    def read(cls, said: Mapping[str, Any], workers: int = 0) -> "About":
        """Return what `said` means; what is not of the expected type is ignored."""
        texts = {name: _of(said, name, str, "") for name in ("version", "description", "codec", "argument")}
        schemas = {name: _of(said, name, dict, None) for name in ("request", "reply", "part")}
        submission = read_defaults(_of(said, "submission", dict, {}))
        schedule = _of(said, "schedule", dict, {})
        types = tuple(each for each in _of(said, "media_types", list, []) if isinstance(each, str))
        return cls(
            **texts, **schemas, submission=submission, workers=workers, said=said, schedule=schedule,
            media_types=types, tool=read_tool(said),
        )  # fmt: skip

    def as_option(self, *, schemas: bool = True) -> dict[str, Any]:
        """Return it as the setting `about` of a worker, which sends it to the broker with READY.

            worker = Worker("resize", handler, about=About(version="2", description="Scale an image.").as_option())

        Args:
            schemas: Whether to include the schemas, which may be too long for the broker.

        Returns:
            What is known, as JSON values.
        """
        names = ("version", "description", "codec", "argument", *(("request", "reply", "part") if schemas else ()))
        option = {name: value for name in names if (value := getattr(self, name)) not in ("", None)}
        for name in ("submission", "schedule"):
            if value := getattr(self, name):
                option[name] = dict(value)
        if self.tool is not None:
            option["tool"] = self.tool.as_option()
        if self.media_types:
            option["media_types"] = list(self.media_types)
        return option


@dataclass(frozen=True)
class Description:
    """What the workers of a service say of it, at all brokers that could be asked.

        found = client.describe("images.resize")
        found.workers, [about.version for about in found.abouts]    # 3, ['2', '1']

    Args:
        service: The service's name.
        workers: Number of its workers.
        abouts: What they say, first what most of them say: several while a new version is rolled out.
        limits: The limits that a broker holds for it: `service` and `group`, each with `concurrency`, `rate`, `burst`.
    """

    service: str
    workers: int
    abouts: tuple[About, ...]
    limits: Mapping[str, Any] = field(default_factory=dict)

    @property
    def about(self) -> About:
        """What most of them say; an empty one if they say nothing."""
        return self.abouts[0] if self.abouts else About()

    @property
    def newest(self) -> About:
        """What those with the highest version say: 1.10 is higher than 1.9; an empty one if they say nothing."""
        return max(self.abouts, key=lambda about: _order(about.version), default=About())

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values, as `mdclient describe --json` prints it.

            json.dumps(found.as_dict())

        Returns:
            `service`, `workers`, `abouts` (objects with `workers` and `about`), and `limits`.
        """
        abouts = [{"workers": each.workers, "about": dict(each.said)} for each in self.abouts]
        return {"service": self.service, "workers": self.workers, "abouts": abouts, "limits": dict(self.limits)}


def _order(version: str) -> list[tuple[int, str]]:
    """Return what versions are compared by: their numbers as numbers."""
    return [(int(number or 0), text) for number, text in _PARTS.findall(version)]


def _of(said: Mapping[str, Any], name: str, kind: type, otherwise: Any) -> Any:
    value = said.get(name)
    return value if isinstance(value, kind) else otherwise
