"""The access file of a broker: its own key, and roles with keys, permissions and limits (docs/how-to/security.md)."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import translate
from pathlib import Path
from typing import Any, Final, NoReturn, Self

from . import toml
from .certificates import public_key, read_secret
from .errors import AccessError, SettingError
from .limits import LARGEST
from .spelling import spelling_hint
from .tokens import parse_digest

MMI: Final = ("none", "service", "all")
"""What a role may ask the broker itself: nothing, whether a service exists, everything."""

_ROLE_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MMI_PREFIX: Final = "mmi."
_TOP: Final = ("secret_key", "roles")


def _limit(unit: str, text: str) -> Any:
    return field(default=None, metadata={"unit": unit, "help": text})


@dataclass(frozen=True)
class Permissions:
    """What a role may do.  A limit that is None does not exist; the broker's own limits hold in any case."""

    name: str
    call: tuple[str, ...] = ()
    """Patterns of the services that it may call, as in `fnmatch`, case-sensitive."""
    offer: tuple[str, ...] = ()
    """Patterns of the services that its workers may offer."""
    mmi: str = "service"
    """What it may ask the broker: one of `MMI`."""
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
_ROLE: Final = ("keys", "tokens", *(each.name for each in fields(Permissions) if each.init and each.name != "name"))


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

    tokens: Mapping[bytes, str] = field(default_factory=dict, repr=False)
    """The role of each token, by the token's digest (`zmdp.mdp.tokens`)."""
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
        """Return what the file says now.  Raises `AccessError`."""
        return load(self.path).adding(self.added)

    def keys_of(self, role: str) -> list[str]:
        """Return what the file calls the keys of `role`."""
        return [self.named[key] for key, owner in self.keys.items() if owner == role]

    def lost_in(self, after: "Access") -> set[bytes]:
        """Return the keys that lose their role in `after`, a later state of the file: their connections must end."""
        return {key for key, role in self.keys.items() if after.keys.get(key) != role}


def load(path: str | Path) -> Access:
    """Return what the access file `path` says.  Raises `AccessError`."""
    path = Path(path)
    return parse(read_text(path, "mdp-keys allow creates it"), path)


def state_of(path: Path) -> FileState:
    """Return what changes when a file is written or replaced; None if there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_text(path: Path, hint: str) -> str:
    """Return the text of an access file.

    Raises `AccessError`; if the file does not exist, the message ends with `hint`.
    """
    try:
        return toml.read(path)
    except OSError as error:
        more = f": {hint}" if isinstance(error, FileNotFoundError) else ""
        raise AccessError(f"cannot read the access file {path}: {error.strerror}{more}") from None
    except UnicodeDecodeError:
        raise AccessError(f"the access file {path} is not text in UTF-8") from None


def read_toml(text: str, path: Path) -> dict[str, Any]:
    """Return the content of an access file.  Raises `AccessError`."""
    try:
        return toml.parse(text, path)
    except SettingError as error:
        raise AccessError(str(error)) from None


def parse(text: str, path: Path) -> Access:
    """Return what `text`, the content of the access file `path`, says.  Raises `AccessError`."""
    content = read_toml(text, path)
    check_names(content, _TOP, f"{path}")
    secret_file = content.get("secret_key")
    if not isinstance(secret_file, str) or not secret_file:
        raise AccessError(
            f'{path} must name the broker\'s key: secret_key = "broker.key_secret" (make it with mdp-keys new broker)'
        )
    try:
        public, secret = read_secret(path.parent / secret_file)
    except SettingError as error:
        raise AccessError(f"{path}: secret_key: {error}") from None
    roles: dict[str, Permissions] = {}
    keys: dict[bytes, str] = {}
    named: dict[bytes, str] = {}
    tokens: dict[bytes, str] = {}
    for name, table, where in role_tables(content, path):
        roles[name] = _permissions(name, table, where)
        for key, called in _keys(table, where, path.parent):
            if key in keys:
                also = "" if named[key] == called else f" (as {named[key]!r})"
                again = "it is listed twice" + also
                if keys[key] != name:
                    again = f"it has role {keys[key]}{also}, and a key has one role: mdp-keys revoke {called} first"
                raise AccessError(f"{where}: key {called!r}: {again}")
            keys[key], named[key] = name, called
        for digest in token_digests(table, where, "mdp-keys token makes one"):
            if digest in tokens:
                also = "twice" if tokens[digest] == name else f"in role {tokens[digest]} already"
                raise AccessError(f"{where}: token sha256:{digest.hex()[:8]}… is listed {also}")
            tokens[digest] = name
    return Access(path, secret, public, roles, keys, named, tokens)


def role_tables(content: Mapping[str, Any], path: Path) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name of each role, its table, and how to begin an error in it.  Raises `AccessError`."""
    tables = content.get("roles", {})
    if not isinstance(tables, dict):
        raise AccessError(f"{path}: roles is {tables!r}: write each role as a table, [roles.NAME]")
    for name, table in tables.items():
        if not _ROLE_NAME.fullmatch(name):
            raise AccessError(
                f"{path}: {name!r} cannot be the name of a role: use up to 64 letters, digits, and the characters - _ ."
            )
        where = f"{path}, role {name}"
        if not isinstance(table, dict):
            raise AccessError(f"{where}: it is {table!r}: write a role as a table, [roles.{name}]")
        yield name, table, where


def _permissions(name: str, table: dict[str, Any], where: str) -> Permissions:
    for inner, value in table.items():
        if inner not in _ROLE and isinstance(value, dict):
            raise AccessError(f'{where}: a role name with a dot needs quotes: [roles."{name}.{inner}"]')
    check_names(table, _ROLE, where)
    given = {key: value for key, value in table.items() if key not in {"keys", "tokens"}}
    for key in ("call", "offer"):
        if key in given:
            given[key] = _patterns(table, key, where)
    if given.get("mmi", "none") not in MMI:
        fail(where, "mmi", given["mmi"], f"it must be one of {', '.join(MMI)}")
    for key in ("admin", "on_behalf", "link"):
        if not isinstance(given.get(key, False), bool):
            fail(where, key, given[key], "it must be true or false")
    for limit in LIMITS:
        value = given.get(limit.name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < LARGEST:
            unit = limit.metadata["unit"]
            fail(where, limit.name, value, f"it must be a whole number of {unit} above 0; leave it out for no limit")
    return Permissions(name, **given)


def _patterns(table: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    found = texts(table, key, where, '["*"]')
    for pattern in found:
        if not pattern:
            fail(where, key, found, "an empty pattern matches nothing: remove it")
        if pattern.startswith(_MMI_PREFIX):
            hint = 'set mmi to "service" or "all" instead' if key == "call" else "the broker itself offers these"
            fail(where, key, found, f"patterns do not apply to mmi.*: {hint}")
    return tuple(found)


def _keys(table: Mapping[str, Any], where: str, folder: Path) -> Iterator[tuple[bytes, str]]:
    for called in texts(table, "keys", where, '["shop.key"]'):
        try:
            yield public_key(called, folder), called
        except SettingError as error:
            raise AccessError(f"{where}: key {called!r}: {error}") from None


def token_digests(table: Mapping[str, Any], where: str, hint: str) -> Iterator[bytes]:
    """Yield the digests of a role's tokens.  Raises `AccessError`, which ends with `hint`."""
    for text in texts(table, "tokens", where, '["sha256:…"]'):
        try:
            yield parse_digest(text)
        except SettingError as error:
            raise AccessError(f"{where}: tokens: {error}: {hint}") from None


def texts(table: Mapping[str, Any], key: str, where: str, example: str) -> list[str]:
    """Return a list of texts in a table, empty if it is not there.  Raises `AccessError`."""
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        fail(where, key, value, f"it must be a list of texts, such as {example}")
    return value


def check_names(table: Mapping[str, object], known: tuple[str, ...], where: str) -> None:
    """Raise `AccessError` if the table has a setting that is not `known`."""
    for name in table:
        if name not in known:
            raise AccessError(f"{where}: there is no setting {name!r}: {spelling_hint(name, known)}")


def fail(where: str, key: str, value: object, expected: str) -> NoReturn:
    """Raise `AccessError` for the value of a setting."""
    raise AccessError(f"{where}: {key} is {value!r}: {expected}")


def _matcher(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)) or r"(?!)")


def _matches(matcher: re.Pattern[str], service: bytes) -> bool:
    name = service.decode(errors="surrogateescape")
    return not name.startswith(_MMI_PREFIX) and matcher.match(name) is not None
