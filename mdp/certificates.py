"""ZeroMQ certificate files: a CURVE key pair, or only its public half, in text.

`zmq.auth`, CZMQ and others read and write the same format.  A public certificate (`NAME.key`) can be shown to anybody.
A secret one (`NAME.key_secret`) has both halves, and only its owner may read it.
"""

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .errors import SettingError

PUBLIC_SUFFIX: Final = ".key"
SECRET_SUFFIX: Final = ".key_secret"  # noqa: S105 - not a password
KEY_LENGTH: Final = 40
"""Length of a key in characters of Z85."""
OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
"""The permissions that a secret file must not have."""
ROOT: Final = 0
"""The user id of root."""

_Z85: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_DIGITS: Final = {character: digit for digit, character in enumerate(_Z85)}
_SETTING: Final = re.compile(r"\s*([\w.-]+)\s*=\s*(.*)")
_LARGEST_FILE: Final = 65536


@dataclass(frozen=True, slots=True)
class Certificate:
    """The keys and the metadata in a certificate file; `secret` is empty in a public one.  Keys are in Z85."""

    public: bytes
    secret: bytes = field(default=b"", repr=False)
    metadata: Mapping[str, str] = field(default_factory=dict)


def is_key(text: str) -> bool:
    """Return whether `text` is a key in Z85."""
    if len(text) != KEY_LENGTH or not _DIGITS.keys() >= set(text):
        return False
    groups = [text[start : start + 5] for start in range(0, KEY_LENGTH, 5)]
    return all(sum(_DIGITS[each] * 85 ** (4 - place) for place, each in enumerate(group)) < 1 << 32 for group in groups)


def read_certificate(path: Path, *, private: bool = False) -> Certificate:
    """Return the certificate in the file `path`.

    With `private`, raise if users other than the owner have access to the file.  Raises `SettingError` if the file
    cannot be read, or is not a certificate.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(_LARGEST_FILE).decode()
    except OSError as error:
        if "\n" in str(path) or is_key(str(path)):  # it is not shown: it may be the secret one
            raise SettingError("expected the file of a key, not the key itself") from None
        raise SettingError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:  # not UTF-8, or no possible name of a file
        raise SettingError(f"{path} is not a certificate file: it is not text") from None
    keys, metadata = _parse(text)
    for name, key in keys.items():
        if not is_key(key):  # the key is not shown: it may be the secret one
            raise SettingError(f"{path} is damaged: its {name} is not {KEY_LENGTH} characters of Z85")
    if "public-key" not in keys:
        raise SettingError(f"{path} is not a certificate file: it has no public-key")
    if private and "secret-key" in keys and _others_have_access(status):
        mode = stat.S_IMODE(status.st_mode)
        raise SettingError(f"{path} is secret, but other users have access to it (mode {mode:04o}): chmod 600 {path}")
    return Certificate(keys["public-key"].encode(), keys.get("secret-key", "").encode(), metadata)


def read_secret(path: Path) -> Certificate:
    """Return the certificate in a secret file.

    Raises `SettingError` as `read_certificate` does, and if the file is a public one.
    """
    certificate = read_certificate(path, private=True)
    if not certificate.secret:
        raise SettingError(f"{path} is a public certificate, which has no secret key: use {_secret_of(path)}")
    return certificate


def read_public(path: Path) -> bytes:
    """Return the key in a public file.

    Raises `SettingError` as `read_certificate` does, and if the file is a secret one.
    """
    certificate = read_certificate(path)
    if certificate.secret:
        raise SettingError(f"{path} contains a secret key: use the public certificate, {_public_of(path)}")
    return certificate.public


def public_key(text: str, folder: Path) -> bytes:
    """Return the public key that `text` is, or that is in the file of this name, which may be relative to `folder`.

    Raises `SettingError` if it is neither.
    """
    path = folder / text
    if os.path.exists(path):  # False where Path.exists raises
        return read_public(path)
    if is_key(text) and not text.endswith(PUBLIC_SUFFIX):
        return text.encode()
    if "\n" in text:  # it is not shown: it may contain a secret key
        raise SettingError(f"expected the file of a public key, or the key itself: {KEY_LENGTH} characters of Z85")
    raise SettingError(f"cannot find the file {path}, nor is this a public key ({KEY_LENGTH} characters of Z85)")


def write_pair(name: str, folder: Path, public: bytes, secret: bytes, metadata: Mapping[str, str]) -> tuple[Path, Path]:
    """Write the two files of a key pair and return their paths, the public one first.

    Raises `SettingError` if one of them exists: a key is never overwritten.
    """
    public_path, secret_path = folder / f"{name}{PUBLIC_SUFFIX}", folder / f"{name}{SECRET_SUFFIX}"
    for path in (public_path, secret_path):
        if path.exists():
            raise SettingError(f"{path} exists, and keys are not overwritten: choose another name")
    lines = ["metadata", *(f'    {key} = "{value}"' for key, value in metadata.items())]
    lines += ["curve", f'    public-key = "{public.decode()}"']
    secret_line = f'    secret-key = "{secret.decode()}"'
    _create(secret_path, 0o600, ["#   Secret ZeroMQ CURVE certificate: show it to nobody.", *lines, secret_line])
    try:
        _create(public_path, 0o644, ["#   Public ZeroMQ CURVE certificate.", *lines])
    except SettingError:
        secret_path.unlink()
        raise
    return public_path, secret_path


def _create(path: Path, mode: int, lines: list[str]) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with open(descriptor, "w") as file:
                file.write("\n".join([*lines, ""]))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            path.unlink()  # part of a key, such as nothing on a full disk, would stand in the way of the next attempt
            raise
    except OSError as error:
        raise SettingError(f"cannot write {path}: {error.strerror}") from None


def _others_have_access(status: os.stat_result) -> bool:
    if not hasattr(os, "geteuid"):  # on Windows, where the mode does not tell
        return False
    # Containers mount the secrets of a process that is not root as files of root, which the process's group may read.
    mounted = status.st_uid == ROOT and os.geteuid() != ROOT
    return bool(status.st_mode & (OTHERS & ~stat.S_IRGRP if mounted else OTHERS))


def _parse(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the keys and the metadata in the text of a certificate."""
    keys: dict[str, str] = {}
    metadata: dict[str, str] = {}
    section = keys
    for line in text.splitlines():
        match = _SETTING.fullmatch(line)
        if line.lstrip().startswith("#"):
            continue
        if match:
            section[match[1]] = match[2].strip("\"' \t")
        elif line.strip():
            section = metadata if line.strip() == "metadata" else keys
    return {name: key for name, key in keys.items() if name in {"public-key", "secret-key"}}, metadata


def _secret_of(path: Path) -> Path:
    return path.with_suffix(SECRET_SUFFIX)


def _public_of(path: Path) -> Path:
    return path.with_suffix(PUBLIC_SUFFIX)
