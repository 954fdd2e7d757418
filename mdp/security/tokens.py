"""Bearer tokens, by which programs that speak HTTP show their role.

An access file has only their digests.  A token has 256 random bits, so a digest needs no salt and no slow function.
"""

import hashlib
import re
import secrets
from typing import Final

from ..errors import SettingError

PREFIX: Final = "zmdp_"
"""Makes tokens recognisable, for example by programs that look for secrets in source code."""
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")


def new_token() -> tuple[str, str]:
    """Return a new token, and what access files say instead of it."""
    token = PREFIX + secrets.token_urlsafe(32)
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
