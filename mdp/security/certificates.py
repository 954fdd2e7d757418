"""ZeroMQ certificate files, read and written by `zmq.auth`: a CURVE key pair, or only its public half, in text.

A public certificate (`NAME.key`) can be shown to anybody.  A secret one (`NAME.key_secret`) has both halves, and only
its owner may read it.
"""

import os
import stat
import struct
from pathlib import Path
from typing import Final

import zmq.auth
from zmq.utils import z85

from ..errors import SettingError

PUBLIC_SUFFIX: Final = ".key"
SECRET_SUFFIX: Final = ".key_secret"  # noqa: S105 - not a password
KEY_BYTES: Final = 32
KEY_LENGTH: Final = 40
"""Length of a key in characters of Z85."""
OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
"""The permissions that a secret file must not have."""
ROOT: Final = 0
"""The user id of root."""


def is_key(text: str | bytes) -> bool:
    """Return whether `text` is a key in Z85."""
    try:
        return len(z85.decode(text)) == KEY_BYTES
    except (ValueError, LookupError, struct.error):  # its length, a character, and five that are no number of 32 bits
        return False


def read_certificate(path: Path) -> tuple[bytes, bytes]:
    """Return the public and the secret key in the file `path`, in Z85; the secret one is empty in a public file.

    Raises `SettingError` if the file cannot be read, or is not a certificate.
    """
    try:
        path.stat()
        public, secret = zmq.auth.load_certificate(path)
    except OSError as error:
        if "\n" in str(path) or is_key(str(path)):  # it is not shown: it may be the secret one
            raise SettingError("expected the file of a key, not the key itself") from None
        raise SettingError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, LookupError):  # without a key, or with a line that has no "="; no possible name of a file
        raise SettingError(f"{path} is not a certificate file: it has no public-key") from None
    if not is_key(public) or not (secret is None or is_key(secret)):  # the key is not shown: it may be the secret one
        raise SettingError(f"{path} is damaged: a key has {KEY_LENGTH} characters of Z85")
    return public, secret or b""


def read_secret(path: Path) -> tuple[bytes, bytes]:
    """Return the public and the secret key in a secret file.

    Raises `SettingError` as `read_certificate` does, and if the file is a public one, or if users other than the owner
    have access to it.
    """
    public, secret = read_certificate(path)
    if not secret:
        secret_file = path.with_suffix(SECRET_SUFFIX)
        raise SettingError(f"{path} is a public certificate, which has no secret key: use {secret_file}")
    status = path.stat()
    if _others_have_access(status):
        mode = stat.S_IMODE(status.st_mode)
        raise SettingError(f"{path} is secret, but other users have access to it (mode {mode:04o}): chmod 600 {path}")
    return public, secret


def read_public(path: Path) -> bytes:
    """Return the key in a public file.

    Raises `SettingError` as `read_certificate` does, and if the file is a secret one.
    """
    public, secret = read_certificate(path)
    if secret:
        public_file = path.with_suffix(PUBLIC_SUFFIX)
        raise SettingError(f"{path} contains a secret key: use the public certificate, {public_file}")
    return public


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


def _others_have_access(status: os.stat_result) -> bool:
    if not hasattr(os, "geteuid"):  # on Windows, where the mode does not tell
        return False
    # Containers mount the secrets of a process that is not root as files of root, which the process's group may read.
    mounted = status.st_uid == ROOT and os.geteuid() != ROOT
    return bool(status.st_mode & (OTHERS & ~stat.S_IRGRP if mounted else OTHERS))
