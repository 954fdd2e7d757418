"""The access file of a broker: its own key, and roles with keys, tokens, permissions and limits.

docs/how-to/security.md describes it.  Programs that speak HTTP show their role by a bearer token, of which an access
file has only the digest.  A token has 256 random bits, so a digest needs no salt and no slow function.
"""

import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import translate
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args

import msgspec

from ..errors import SettingError
from ..limits import LARGEST
from ..program import toml
from ..service_limits import ServiceLimits
from .certificates import public_key, read_secret

Mmi = Literal["none", "service", "all"]
"""What a role may ask the broker itself: nothing, whether a service exists, everything."""
MMI: Final[tuple[str, ...]] = get_args(Mmi)
Patterns = tuple[Annotated[str, msgspec.Meta(min_length=1)], ...]
Limit = Annotated[int, msgspec.Meta(gt=0, lt=LARGEST)]

_ROLE_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MMI_PREFIX: Final = "mmi."


def _limit(unit: str, text: str) -> Any:
    return field(default=None, metadata={"unit": unit, "help": text})


@dataclass(frozen=True)
class Permissions:
    """What a role may do.  A limit that is None does not exist; the broker's own limits hold in any case."""

    name: str
    call: Patterns = ()
    """Patterns of the services that it may call, as in `fnmatch`, case-sensitive."""
    offer: Patterns = ()
    """Patterns of the services that its workers may offer."""
    mmi: Mmi = "service"
    """What it may ask the broker."""
    admin: bool = False
    """Whether it may fetch, close and cancel what belongs to others; implies `mmi` "all"."""
    on_behalf: bool = False
    """Whether it may ask on behalf of other roles, which are then the users of its requests."""
    link: bool = False
    """Whether it is for other brokers, which may open links to this one and be linked to."""
    outstanding: int | None = _limit("requests", "Maximum number of unanswered requests.")
    queued_requests: int | None = _limit("requests", "Maximum number of requests waiting for a worker.")
    request_bytes: int | None = _limit("bytes", "Maximum memory of its requests, waiting or held by workers.")
    connections: int | None = _limit("connections", "Maximum number of open connections.")
    _calls: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _offers: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.admin:
            object.__setattr__(self, "mmi", "all")
        object.__setattr__(self, "_calls", _matcher(self.call))
        object.__setattr__(self, "_offers", _matcher(self.offer))

    def may_call(self, service: bytes) -> bool:
        """Return whether a pattern of `call` matches the name.  None matches `mmi.*`, which `mmi` governs."""
        return _matches(self._calls, service)

    def may_offer(self, service: bytes) -> bool:
        """Return whether a pattern of `offer` matches the name.  None matches `mmi.*`, which the broker offers."""
        return _matches(self._offers, service)


FileState = tuple[int, int, int] | None
"""What `state_of` returns."""
SETTLE_SECONDS: Final = 0.5
"""How long an access file must stay as it is before it is read again: half a file may be valid, too."""
LIMITS: Final = tuple(each for each in fields(Permissions) if "unit" in each.metadata)
"""The fields of `Permissions` that are limits."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    secret_key: str
    roles: dict[str, Any] = {}
    limits: dict[str, dict[str, Any]] = {}


_Role = msgspec.defstruct(
    "_Role",
    [
        ("keys", tuple[str, ...], ()),
        ("tokens", tuple[str, ...], ()),
        *(
            (each.name, Limit | None if each in LIMITS else each.type, each.default)
            for each in fields(Permissions)
            if each.init and each.name != "name"
        ),
    ],
    forbid_unknown_fields=True,
)


@dataclass(frozen=True)
class Access:
    """What an access file says.  Keys are in Z85."""

    path: Path
    secret_key: bytes = field(repr=False)
    public_key: bytes
    roles: Mapping[str, Permissions]
    keys: Mapping[bytes, str]
    """The role of each public key."""
    named: Mapping[bytes, str]
    """What the file calls each public key: the name of a certificate file, or the key itself."""

    limits: Mapping[str, ServiceLimits] = field(default_factory=dict)
    """The limits of services, by patterns of their names; the first that matches applies."""
    tokens: Mapping[bytes, str] = field(default_factory=dict, repr=False)
    """The role of each token, by the token's digest (`digest_of`)."""
    added: Mapping[bytes, Permissions] = field(default_factory=dict, repr=False)
    """The permissions of keys that are not in the file, but that the program itself has added."""

    def adding(self, added: Mapping[bytes, Permissions]) -> Self:
        """Return it with further keys, each with a role of its own."""
        return replace(
            self,
            roles={**self.roles, **{role.name: role for role in added.values()}},
            keys={**self.keys, **{key: role.name for key, role in added.items()}},
            named={**self.named, **{key: key.decode() for key in added}},
            added={**self.added, **added},
        )

    def read_again(self) -> "Access":
        """Return what the file says now.  Raises `SettingError`."""
        return load(self.path).adding(self.added)

    def keys_of(self, role: str) -> list[str]:
        """Return what the file calls the keys of `role`."""
        return [self.named[key] for key, owner in self.keys.items() if owner == role]

    def lost_in(self, after: "Access") -> set[bytes]:
        """Return the keys that lose their role in `after`, a later state of the file: their connections must end."""
        return {key for key, role in self.keys.items() if after.keys.get(key) != role}


def load(path: str | Path) -> Access:
    """Return what the access file `path` says.  Raises `SettingError`."""
    path = Path(path)
    return parse(toml.read(path, "mdp-keys allow creates it"), path)


def state_of(path: Path) -> FileState:
    """Return what changes when a file is written or replaced; None if there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def parse(text: str, path: Path) -> Access:
    """Return what `text`, the content of the access file `path`, says.  Raises `SettingError`."""
    file = toml.convert(toml.parse(text, path), _File, str(path))
    try:
        public, secret = read_secret(path.parent / file.secret_key)
    except SettingError as error:
        raise SettingError(f"{path}: secret_key: {error}") from None
    roles: dict[str, Permissions] = {}
    keys: dict[bytes, str] = {}
    named: dict[bytes, str] = {}
    tokens: dict[bytes, str] = {}
    for name, where, given in roles_in(file.roles, _Role, path):
        for key, called in _keys(given.pop("keys"), where, path.parent):
            if key in keys:
                also = "" if named[key] == called else f" (as {named[key]!r})"
                again = "it is listed twice" + also
                if keys[key] != name:
                    again = f"it has role {keys[key]}{also}, and a key has one role: mdp-keys revoke {called} first"
                raise SettingError(f"{where}: key {called!r}: {again}")
            keys[key], named[key] = name, called
        for digest in digests(given.pop("tokens"), where, "mdp-keys token makes one"):
            if digest in tokens:
                also = "twice" if tokens[digest] == name else f"in role {tokens[digest]} already"
                raise SettingError(f"{where}: token sha256:{digest.hex()[:8]}… is listed {also}")
            tokens[digest] = name
        roles[name] = Permissions(name, **given)
    return Access(path, secret, public, roles, keys, named, _service_limits(file.limits, path), tokens)


def _service_limits(tables: Mapping[str, Any], path: Path) -> dict[str, ServiceLimits]:
    """Return the limits of services by pattern: of all requests, and under `per_group` those of each group."""
    found = {}
    for pattern, table in tables.items():
        given = dict(table)
        per_group = given.pop("per_group", {})
        try:
            found[pattern] = ServiceLimits.read({"service": given, "group": per_group})
        except SettingError as error:
            raise SettingError(f"{path}, limits of {pattern!r}: {error}") from None
    return found


def roles_in(
    tables: Mapping[str, Any], kind: type[msgspec.Struct], path: Path
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name of each role, how to begin an error in it, and its settings, the fields of `kind`.

    Raises `SettingError`.
    """
    for name, table in tables.items():
        if not _ROLE_NAME.fullmatch(name):
            raise SettingError(
                f"{path}: {name!r} cannot be the name of a role: use up to 64 letters, digits, and the characters - _ ."
            )
        where = f"{path}, role {name}"
        given = msgspec.structs.asdict(toml.convert(table, kind, where))
        for pattern in (*given["call"], *given.get("offer", ())):
            if pattern.startswith(_MMI_PREFIX):
                raise SettingError(f"{where}: {pattern!r}: patterns do not apply to mmi.*: use the setting mmi")
        yield name, where, given


def _keys(listed: tuple[str, ...], where: str, folder: Path) -> Iterator[tuple[bytes, str]]:
    for called in listed:
        try:
            yield public_key(called, folder), called
        except SettingError as error:
            raise SettingError(f"{where}: key {called!r}: {error}") from None


def digests(listed: tuple[str, ...], where: str, hint: str) -> Iterator[bytes]:
    """Yield the digests of a role's tokens.  Raises `SettingError`, which ends with `hint`."""
    for text in listed:
        try:
            yield parse_digest(text)
        except SettingError as error:
            raise SettingError(f"{where}: tokens: {error}: {hint}") from None


def _matcher(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)) or r"(?!)")


def _matches(matcher: re.Pattern[str], service: bytes) -> bool:
    name = service.decode(errors="surrogateescape")
    return not name.startswith(_MMI_PREFIX) and matcher.match(name) is not None


TOKEN_PREFIX: Final = "zmdp_"  # noqa: S105 - not a password
"""Makes tokens recognisable, for example by programs that look for secrets in source code."""
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")


def new_token() -> tuple[str, str]:
    """Return a new token, and what access files say instead of it."""
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    return token, written(digest_of(token.encode()))


def written(digest: bytes) -> str:
    """Return a digest as access files have it."""
    return f"sha256:{digest.hex()}"


def digest_of(token: bytes) -> bytes:
    """Return the digest by which a token is looked up: how long that takes tells nothing about the token."""
    return hashlib.sha256(token).digest()


def parse_digest(text: str) -> bytes:
    """Return the digest that an access file names.  Raises `SettingError`."""
    match = _DIGEST.fullmatch(text)
    if match is None:
        shown = text if text.startswith("sha256:") else "a text without sha256:"  # it may be a token
        raise SettingError(f"{shown}: expected sha256: and 64 hexadecimal digits")
    return bytes.fromhex(match[1])


def bearer(authorization: bytes) -> bytes | None:
    """Return the token in a header Authorization, or None if there is none."""
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None
