"""What a worker says of its service, and how others read it: the option `about` of READY (docs/reference/x1.md)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Schema = Mapping[str, Any]
RAW: Final[Schema] = {"type": "string", "contentMediaType": "application/octet-stream"}
"""The schema of a value that is the frame itself, whatever the codec."""


@dataclass(frozen=True)
class About:
    """What workers say of their service.  Nobody has checked it: it may be wrong, or meant to deceive."""

    version: str = ""
    description: str = ""
    codec: str = ""
    """`"json"` or `"msgpack"`; empty if the service has no types."""
    request: Schema | None = None
    """JSON schema of the value that it takes; None if it is unknown."""
    reply: Schema | None = None
    """That of the value that it replies with, unless it streams."""
    part: Schema | None = None
    """That of each value that it streams."""
    workers: int = 0
    """Number of workers that say this."""
    said: Mapping[str, Any] = field(default_factory=dict)
    """Everything that they say, as it was received."""

    @classmethod
    def read(cls, said: Mapping[str, Any], workers: int = 0) -> "About":
        """Return what `said` means; what is not of the expected type is ignored."""
        texts = {name: _of(said, name, str, "") for name in ("version", "description", "codec")}
        schemas = {name: _of(said, name, dict, None) for name in ("request", "reply", "part")}
        return cls(**texts, **schemas, workers=workers, said=said)

    def as_option(self, *, schemas: bool = True) -> dict[str, Any]:
        """Return the option of READY."""
        names = ("version", "description", "codec", *(("request", "reply", "part") if schemas else ()))
        return {name: value for name in names if (value := getattr(self, name)) not in ("", None)}


@dataclass(frozen=True)
class Description:
    """What the workers of a service say of it, at all brokers that could be asked."""

    service: str
    workers: int
    abouts: tuple[About, ...]
    """What they say, first what most of them say: several while a new version is rolled out."""

    @property
    def about(self) -> About:
        """What most of them say; an empty one if they say nothing."""
        return self.abouts[0] if self.abouts else About()

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        abouts = [{"workers": each.workers, "about": dict(each.said)} for each in self.abouts]
        return {"service": self.service, "workers": self.workers, "abouts": abouts}


def _of(said: Mapping[str, Any], name: str, kind: type, otherwise: Any) -> Any:
    value = said.get(name)
    return value if isinstance(value, kind) else otherwise
