"""The gateway's access file: roles with their tokens, and the services that each may call.

    [roles.shop]
    tokens = ["sha256:9f86d081…"]          # mdp-gateway token shop
    call = ["resize", "spark.*"]           # default: ["*"]
    mmi = "service"                        # none, service or all; default: service

Roles have the names that they have in the broker's access file, if there is one.  With a key, the gateway calls
services on behalf of the role, and the broker checks what that role may call as well.  About `mmi.*`, the broker asks
only what the gateway's own role may know, so here `mmi` and `call` decide.  `mmi.cancel`, `mmi.failures`, `mmi.tail`
and control services cannot be called through a gateway.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from ..mdp.errors import SettingError
from ..mdp.http.problems import Problem
from ..mdp.program import toml
from ..mdp.program.control_services import SPARK
from ..mdp.security.access import Mmi, Patterns, Permissions, bearer, digest_of, digests, roles_in

_CHALLENGE: Final = ((b"www-authenticate", b'Bearer realm="zmdp"'),)
_MMI_PREFIX: Final = b"mmi."
_CONTROL_PREFIX: Final = SPARK.encode()
_ABOUT_SERVICES: Final = (b"mmi.service", b"mmi.services")
_ABOUT_OTHERS: Final = (b"mmi.cancel", b"mmi.failures", b"mmi.tail")
"""Services about the requests of all callers: the broker lets admins call them, and no caller of a gateway is one."""


@dataclass(frozen=True)
class Caller:
    """The sender of a request."""

    role: str | None
    """The name of the role, or None without access control."""
    permissions: Permissions | None = None
    options: Mapping[str, Any] | None = None
    """The options of requests that are made on behalf of the role."""

    anybody: ClassVar["Caller"]

    def may_call(self, service: bytes) -> bool:
        """Return whether the gateway's access file allows it."""
        if self.permissions is None:
            return True
        if service in _ABOUT_OTHERS or service.startswith(_CONTROL_PREFIX):  # even if a pattern such as `*` matches
            return False
        if service.startswith(_MMI_PREFIX):
            return self.permissions.mmi == "all" or (self.permissions.mmi == "service" and service in _ABOUT_SERVICES)
        return self.permissions.may_call(service)


Caller.anybody = Caller(None)


@dataclass(frozen=True)
class Access:
    """The content of an access file."""

    path: Path
    roles: Mapping[str, Caller]
    tokens: Mapping[bytes, Caller] = field(repr=False)
    """By their SHA-256 digests, so that the time of a look-up tells nothing about a token."""

    def identify(self, authorization: bytes | None) -> Caller:
        """Return the caller with this Authorization header.  Raises `Problem`."""
        if authorization is not None:
            token = bearer(authorization)
            if token is None:
                raise _unauthorized("the header Authorization must be: Bearer TOKEN")
            caller = self.tokens.get(digest_of(token))
            if caller is None:
                raise _unauthorized("the token is unknown", b', error="invalid_token"')
            return caller
        raise _unauthorized("pass a token in the header Authorization: Bearer TOKEN")


def _unauthorized(detail: str, more: bytes = b"") -> Problem:
    return Problem("unauthorized", detail, headers=[(name, value + more) for name, value in _CHALLENGE])


class _Role(msgspec.Struct, forbid_unknown_fields=True):
    tokens: tuple[str, ...] = ()
    call: Patterns = ("*",)
    mmi: Mmi = "service"


class _File(msgspec.Struct, forbid_unknown_fields=True):
    roles: dict[str, Any] = {}


def load(path: str | Path) -> Access:
    """Return the content of the access file `path`.  Raises `SettingError`."""
    path = Path(path)
    return parse(toml.read(path, "mdp-gateway token creates it"), path)


def parse(text: str, path: Path) -> Access:
    """Return the content of the access file `path`, whose text is `text`.  Raises `SettingError`."""
    file = toml.convert(toml.parse(text, path), _File, str(path))
    roles: dict[str, Caller] = {}
    tokens: dict[bytes, Caller] = {}
    for name, where, given in roles_in(file.roles, _Role, path):
        roles[name] = caller = Caller(
            name, Permissions(name, call=given["call"], mmi=given["mmi"]), {"on_behalf": name}
        )
        for digest in digests(given["tokens"], where, f"see mdp-gateway token {name}"):
            _put(tokens, digest, caller, where, f"token sha256:{digest.hex()[:8]}…")
    return Access(path, roles, tokens)


def _put(callers: dict[Any, Caller], key: object, caller: Caller, where: str, called: str) -> None:
    if key in callers:
        also = "twice" if callers[key] is caller else f"in role {callers[key].role} already"
        raise SettingError(f"{where}: {called} is listed {also}")
    callers[key] = caller
