"""Edit an access file, of a broker or of a gateway, keeping its comments and its layout."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import tomlkit
from tomlkit.exceptions import TOMLKitError

from ..errors import SettingError
from ..program import toml
from ..program.arguments import spelling_hint
from ..security.access import Access, load, parse
from ..security.certificates import PUBLIC_SUFFIX, SECRET_SUFFIX, public_key
from ..security.keys import create_keys

T = TypeVar("T")

BROKER_NAME: Final = "broker"
"""Name of the broker's own key, if it is made together with the access file."""
_BEGINNING: Final = f"""\
# Who may use the broker: mdp-broker --access FILE.  Edit this file, or use mdp-keys allow and mdp-keys revoke.
secret_key = "{BROKER_NAME}{SECRET_SUFFIX}"
"""


def allow(path: Path, role: str, keys: Sequence[str], settings: Mapping[str, Any]) -> Access:
    """Add `keys` to `role`, and `settings` to its permissions; return what the file says then.

    Patterns are added to those that the role has, other settings replaced.  The role is created if it does not exist,
    and so is the file, with a key for the broker beside it.  Raises `SettingError`.
    """

    def change(content: Any) -> None:
        table = content.setdefault("roles", tomlkit.table(is_super_table=True)).setdefault(role, tomlkit.table())
        _extend(table, "keys", [_called(key, path.parent) for key in keys])
        for name, value in settings.items():
            if isinstance(value, tuple):
                _extend(table, name, value)
            else:
                table[name] = value

    with locked(path.parent):
        if not path.exists():
            if not (path.parent / f"{BROKER_NAME}{SECRET_SUFFIX}").exists():
                create_keys(BROKER_NAME, path.parent)
            return replace(path, _BEGINNING, change, parse)
        load(path)
        return replace(path, toml.read(path), change, parse)


def add_token(path: Path, role: str, digest: str) -> Access:
    """Add `digest` to the tokens of `role`; return what the file says then.

    Raises `SettingError`, also if there is no such role: a token of a misspelt one would open nothing.
    """

    def change(content: Any) -> None:
        _extend(content["roles"][role], "tokens", [digest])

    with locked(path.parent):
        roles = load(path).roles
        if role not in roles:
            hint = spelling_hint(role, list(roles)) if roles else "it has none"
            raise SettingError(f"{path} has no role {role!r}: {hint} (mdp-keys allow adds a role)")
        return replace(path, toml.read(path), change, parse)


def revoke(path: Path, key: str) -> list[tuple[str, str]]:
    """Remove `key` from the file; return the roles that had it, each with what the file called it.

    `key` is what the file calls it, or the name of a certificate file, or a key in Z85.  Raises `SettingError`.
    """
    removed: list[tuple[str, str]] = []

    def change(content: Any) -> None:
        roles = content.get("roles")
        tables = roles.items() if isinstance(roles, dict) else ()
        lists = {name: table["keys"] for name, table in tables if isinstance(table, dict) and "keys" in table}
        lists = {name: listed for name, listed in lists.items() if isinstance(listed, list)}
        called = _find(key, {str(each) for listed in lists.values() for each in listed}, path)
        for name, listed in lists.items():
            while called in listed:
                listed.remove(called)
                removed.append((name, called))

    with locked(path.parent):
        replace(path, toml.read(path), change, parse)
    return removed


def _extend(table: Any, name: str, values: Iterable[str]) -> None:
    if name not in table:
        table[name] = []
    for value in values:
        if value not in table[name]:
            table[name].append(value)


def _called(key: str, folder: Path) -> str:
    """Return what to call `key`, a certificate file or a key in Z85, in an access file in `folder`."""
    public_key(key, Path())
    return os.path.relpath(key, folder) if os.path.exists(key) else key


def _find(key: str, listed: Iterable[str], path: Path) -> str:
    """Return the entry of `listed`, the keys in the access file `path`, that the user calls `key`."""
    if key in listed:
        return key
    value = _value(key, Path())
    names = {key, f"{key}{PUBLIC_SUFFIX}"}
    same = [each for each in listed if value is not None and _value(each, path.parent) == value]
    found = sorted(same or [each for each in listed if os.path.basename(each) in names])
    if not found:
        raise SettingError(f"{path} has no key {key!r}: mdp-keys ls lists its keys")
    if len(found) > 1:
        raise SettingError(f"{path} has several keys {key!r}: choose one of {', '.join(found)}")
    return found[0]


def _value(key: str, folder: Path) -> bytes | None:
    try:
        return public_key(key, folder)
    except SettingError:
        return None


def replace(
    path: Path, text: str, change: Callable[[Any], None], parse: Callable[[str, Path], T], *, mode: int = 0o644
) -> T:
    """Replace the file, atomically, by `text` after `change`, if `parse` finds that valid; return what it returns.

    A new file gets the permissions `mode`.  Raises `SettingError`.
    """
    try:
        content = tomlkit.parse(text)
        change(content)
        changed = content.as_string()
    except TOMLKitError as error:
        raise SettingError(f"{path} is not valid TOML: {error}") from None
    parsed = parse(changed, path)
    target = path.resolve()
    try:
        before = target.stat() if target.exists() else None
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as file:
            try:
                file.write(changed)
                file.flush()
                for owner, group in () if before is None else ((-1, before.st_gid), (before.st_uid, -1)):
                    with suppress(PermissionError):  # where it is allowed, so that the broker may still read it
                        os.fchown(file.fileno(), owner, group)
                os.fchmod(file.fileno(), mode if before is None else before.st_mode & 0o777)
                os.fsync(file.fileno())
                os.replace(file.name, target)
            except BaseException:
                os.unlink(file.name)
                raise
        _sync_folder(target.parent)
    except OSError as error:
        raise SettingError(f"cannot write {path}: {error.strerror}") from None
    return parsed


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Wait until no other command edits a file in `folder`."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise SettingError(f"cannot use the folder {folder}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
