"""Validate service names, and make names printable."""

from typing import Final

from ..errors import SettingError

MMI: Final = b"mmi."
DESCRIBE: Final = MMI + b"describe"
"""The broker itself answers services with this prefix (C25)."""
BROKER: Final = MMI + b"broker."
"""The prefix with which links name a broker to which requests are addressed (C44)."""
HELLO: Final = MMI + b"link"
"""The service through which a broker asks another one for a link (C44)."""
MAX_NAME: Final = 255
"""Maximum size in bytes of a service name or an address (C23)."""
MAX_KNOWN_NAMES: Final = 4096
"""Number of names that `service_name` remembers: for clients, checking them again is 4 % of a request."""


def valid_service(name: bytes) -> bool:
    """Return whether `name` is a valid service name: 1 to 255 bytes of printable UTF-8 (C23)."""
    return 1 <= len(name) <= MAX_NAME and _printable(name)


def service_name(name: str | bytes | bytearray | memoryview) -> bytes:
    """Return `name` as sent on the wire.  Raises `SettingError` if it is not a valid service name (C23)."""
    if type(name) is str and (known := _encoded.get(name)) is not None:
        return known
    given: object = name
    if not isinstance(given, str | bytes | bytearray | memoryview):
        called = getattr(given, "__name__", None) if callable(given) else None
        hint = f": put the name first, as in Worker('{called}', {called})" if called else ""
        raise SettingError(f"a service is {given!r:.100}: it must be named by a text, such as 'echo'{hint}")
    try:
        encoded = name.encode() if isinstance(name, str) else bytes(name)
    except UnicodeEncodeError:
        encoded = b""
    if not valid_service(encoded):
        raise SettingError(
            f"{name!r} is not a valid service name: it must have 1 to {MAX_NAME} bytes of printable text"
        )
    if type(name) is str:
        if len(_encoded) >= MAX_KNOWN_NAMES:
            _encoded.clear()
        _encoded[name] = encoded
    return encoded


_encoded: Final[dict[str, bytes]] = {}


def _printable(name: bytes) -> bool:
    try:
        return name.decode().isprintable()
    except UnicodeDecodeError:
        return False


def displayed(text: str) -> str:
    """Return `text` made safe for a log: at most 255 characters, with "?" for each unprintable one."""
    text = text[:MAX_NAME]
    return text if text.isprintable() else "".join([each if each.isprintable() else "?" for each in text])


def show(name: bytes) -> str:
    """Return a peer's bytes as printable text: decoded if that is printable, else in hex."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return name.hex()
    return text if text.isprintable() and text else name.hex()
