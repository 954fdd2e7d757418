"""The numbers and limits of X1, and the records that are messages of their own (docs/reference/x1.md)."""

from struct import Struct
from typing import Any, Final

from ..errors import SettingError
from ..service_limits import ServiceLimits
from .commands import CX1, WX1, Disconnect, Invalid, Ready, Reason, Route
from .names import displayed, valid_service
from .options import MAX_ABOUT, encode_about, parse_options

# The commands of records, from and to a client …
CLIENT_REQUEST: Final = 1
CLIENT_PARTIAL: Final = 2
CLIENT_FINAL: Final = 3
CLIENT_ERROR: Final = 4
CLIENT_CANCEL: Final = 5
CLIENT_LIMITS: Final = 6
CLIENT_DISCONNECT: Final = 7
# … and from and to a worker.
WORKER_READY: Final = 1
WORKER_REQUEST: Final = 2
WORKER_PARTIAL: Final = 3
WORKER_FINAL: Final = 4
WORKER_DISCONNECT: Final = 6
WORKER_ERROR: Final = 7
WORKER_CANCEL: Final = 8
WORKER_CREDIT: Final = 10
WORKER_RELEASE: Final = 11

MAX_RECORDS: Final = 256
"""Maximum number of records in a message."""
MAX_RECORDS_BYTES: Final = 65536
"""Maximum size in bytes of a message's records, unless there is only one."""
MAX_ATTACHMENTS: Final = 64
"""Maximum number of attachments of a message, unless it has only one record."""
MAX_ATTACHED_BYTES: Final = 1 << 20
"""Maximum size in bytes of a message's attachments, unless it has only one record."""
MAX_BODY_FRAMES: Final = 0xFFFF
"""Maximum number of frames of a body."""
MAX_TTL_MS: Final = 0xFFFFFFFF
"""The longest ttl that a record can hold, in milliseconds: 49 days."""
MAX_CREDIT: Final = 0xFFFFFFFF
"""The largest credit that a record can hold."""
ATTACHED: Final = 0xFFFFFFFF
"""Stands in place of a frame's length if the frame is the next attachment."""
MAX_TEXT: Final = 1000
"""Bytes of the text of a DISCONNECT that are read."""

HEAD: Final = Struct(">IBQ")
"""The beginning of a record: its size (of what follows the size), its command and its id."""
SIZE_BYTES: Final = 4
"""Bytes of the size."""


LIMITS: Final = Struct(">QI")
"""The fields of the broker's LIMITS."""


def limits_record(max_bytes: int, max_frames: int) -> bytes:
    """Return the record of the broker's LIMITS."""
    return HEAD.pack(HEAD.size - SIZE_BYTES + LIMITS.size, CLIENT_LIMITS, 0) + LIMITS.pack(max_bytes, max_frames)


def disconnect_record(header: bytes, text: bytes) -> bytes:
    """Return the record of a DISCONNECT."""
    command = CLIENT_DISCONNECT if header == CX1 else WORKER_DISCONNECT
    return HEAD.pack(HEAD.size - SIZE_BYTES + len(text), command, 0) + text


def disconnected(route: Route, header: bytes, text: bytes) -> Disconnect:
    """Return a DISCONNECT that has this text."""
    return Disconnect(route, header, text[:MAX_TEXT])


def ready_with(route: Route, service: bytes, raw: bytes, credit: int) -> Ready | Invalid:
    """Return a worker's READY.

    `raw` are its options: name, host, pid, version, dialect, about and limits, all optional; and over a link, hops and
    free.
    """
    if not valid_service(service):
        return Invalid(Reason.BAD_SERVICE)
    values: dict[str, Any] = {}
    if raw:
        options = parse_options(raw)
        if options is None:
            return Invalid(Reason.BAD_OPTIONS)
        values = options.values()
    name, host, version = values.get("name", ""), values.get("host", ""), values.get("version", "")
    pid, dialect = values.get("pid", 0), values.get("dialect", False)
    hops, free = values.get("hops", 0), values.get("free", 0)
    if not (isinstance(name, str) and isinstance(host, str) and isinstance(version, str)):
        return Invalid(Reason.BAD_OPTIONS)
    if not (_is_count(pid) and _is_count(hops) and _is_count(free) and isinstance(dialect, bool)):
        return Invalid(Reason.BAD_OPTIONS)
    about = values.get("about", {})
    if not isinstance(about, dict):
        return Invalid(Reason.BAD_OPTIONS)
    try:
        limits = ServiceLimits.read(values.get("limits", {}))
    except SettingError:
        return Invalid(Reason.BAD_OPTIONS)
    said = encode_about(about) if about else b""
    return Ready(
        route, WX1, service, credit, displayed(name), displayed(host), pid, displayed(version), dialect, hops, free,
        said if len(said) <= MAX_ABOUT else b"", limits,
    )  # fmt: skip


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32
