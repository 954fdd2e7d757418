"""Names of services, and how they are shown to people."""

from typing import Final

from ..errors import SettingError

MMI: Final = b"mmi."
"""Services of this prefix the broker answers itself (C25)."""
MAX_NAME: Final = 255
"""Bytes a service name or an address may have (C23)."""
KNOWN_NAMES: Final = 4096
"""Service names that are known to be valid without a look at their characters."""


def valid_service(name: bytes) -> bool:
    """Whether `name` may name a service: 1 to 255 bytes of printable UTF-8 (C23)."""
    if name in _known_names:
        return True
    if not 1 <= len(name) <= MAX_NAME or not _printable(name):
        return False
    if len(_known_names) >= KNOWN_NAMES:
        _known_names.clear()
    _known_names.add(name)
    return True


def service_name(name: str | bytes | bytearray | memoryview) -> bytes:
    """`name` as it goes on the wire.  Raises `SettingError` if it names no service (C23)."""
    try:
        encoded = name.encode() if isinstance(name, str) else bytes(name)
    except UnicodeEncodeError:
        encoded = b""
    if not valid_service(encoded):
        raise SettingError(f"{name!r} is no service name: it takes 1 to {MAX_NAME} bytes of printable text")
    return encoded


_known_names: Final[set[bytes]] = set()
"""Service names that were found valid lately."""


def _printable(name: bytes) -> bool:
    try:
        return name.decode().isprintable()
    except UnicodeDecodeError:
        return False


def displayed(text: str) -> str:
    """`text` as it may stand in a log: at most 255 characters, all of them printable."""
    text = text[:MAX_NAME]
    return text if text.isprintable() else "".join([each if each.isprintable() else "?" for each in text])


def show(name: bytes) -> str:
    """A peer's bytes as something safe to print: text where it is printable, else hex."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return name.hex()
    return text if text.isprintable() and text else name.hex()
