"""X1's messages in pure Python; see `batch` for what each function does."""

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, Final

from .. import wire
from . import Message, Reason, Route, x1
from .x1 import HEAD, SIZE_BYTES

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
ATTACHED: Final = 0xFFFFFFFF
"""Stands in place of a frame's length if the frame is the next attachment."""

_SHORT: Final = Struct(">H")
_LONG: Final = Struct(">I")
_LONG_AND_BYTE: Final = Struct(">IB")
"""A ttl or a credit, and the length of a service name."""
_REQUEST_TO_WORKER_HEAD: Final = Struct(">IBH")
"""A ttl, an attempt and the length of the options."""
_CODE_AND_SHORT: Final = Struct(">HH")
"""A code and the length of its text."""

Frames = Sequence[Any]
"""Frames of a body: bytes, or memoryviews."""


# ── packing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Batch:
    """Commands for one peer, packed as they are added."""

    def __init__(self, route: Route, header: bytes) -> None:
        self._head = [*route, header, wire.BATCH]
        self._closed: list[Message] = []
        self._records: list[bytes] = []
        self._size = 0
        self._attachments: list[Any] = []
        self._attached = 0

    def __len__(self) -> int:
        return len(self._closed) + len(self._records)

    def request_to_broker(self, number: int, ttl: int, service: bytes, options: bytes, body: Frames) -> None:
        """Add a client's REQUEST."""
        head = _LONG_AND_BYTE.pack(ttl, len(service)) + service + _SHORT.pack(len(options)) + options
        self._add(x1.CLIENT_REQUEST, number, head, body)

    def request_to_worker(self, address: int, ttl: int, attempt: int, options: bytes, body: Frames) -> None:
        """Add a REQUEST to a worker."""
        head = _REQUEST_TO_WORKER_HEAD.pack(ttl, min(attempt, 0xFF), len(options)) + options
        self._add(x1.WORKER_REQUEST, address, head, body)

    def reply(self, command: int, id: int, body: Frames) -> None:  # noqa: A002 - the wire's word
        """Add a PARTIAL or a FINAL."""
        self._add(command, id, b"", body)

    def error(self, command: int, id: int, code: int, text: bytes, detail: Frames) -> None:  # noqa: A002
        """Add an ERROR."""
        text = text[:0xFFFF]
        self._add(command, id, _CODE_AND_SHORT.pack(code, len(text)) + text, detail)

    def signal(self, command: int, id: int) -> None:  # noqa: A002
        """Add a CANCEL or a RELEASE."""
        self._add_record(command, id, b"", [])

    def ready(self, credit: int, service: bytes, options: bytes) -> None:
        """Add a READY."""
        head = _LONG_AND_BYTE.pack(credit, len(service)) + service + _SHORT.pack(len(options)) + options
        self._add_record(x1.WORKER_READY, 0, head, [])

    def credit(self, credit: int) -> None:
        """Add a CREDIT."""
        self._add_record(x1.WORKER_CREDIT, 0, _LONG.pack(credit), [])

    def _add(self, command: int, id: int, head: bytes, body: Frames) -> None:  # noqa: A002
        packed, attachments = _pack_body(body)
        self._add_record(command, id, head + packed, attachments)

    def _add_record(self, command: int, id: int, rest: bytes, attachments: list[Any]) -> None:  # noqa: A002
        record = HEAD.pack(HEAD.size - SIZE_BYTES + len(rest), command, id) + rest
        attached = sum(map(len, attachments))
        if self._records and (
            len(self._records) == MAX_RECORDS
            or self._size + len(record) > MAX_RECORDS_BYTES
            or (
                attachments
                and (
                    len(self._attachments) + len(attachments) > MAX_ATTACHMENTS
                    or self._attached + attached > MAX_ATTACHED_BYTES
                )
            )
        ):
            self._close()
        self._records.append(record)
        self._size += len(record)
        self._attachments += attachments
        self._attached += attached

    def _close(self) -> None:
        self._closed.append([*self._head, b"".join(self._records), *self._attachments])
        self._records, self._size = [], 0
        self._attachments, self._attached = [], 0

    def messages(self) -> list[Message]:
        """Return everything that was added, as messages to send, and start again empty."""
        if self._records:
            self._close()
        closed, self._closed = self._closed, []
        return closed


def _pack_body(body: Frames) -> tuple[bytes, list[Any]]:
    """Return the body as it stands in a record, and those of its frames that are attached."""
    if len(body) == 1 and len(body[0]) < wire.SHARED:
        return b"\0\1" + _LONG.pack(len(body[0])) + body[0], []
    parts, attachments = [_SHORT.pack(len(body))], []
    for frame in body:
        if len(frame) < wire.SHARED:
            parts.append(_LONG.pack(len(frame)))
            parts.append(frame)
        else:
            parts.append(_LONG.pack(ATTACHED))
            attachments.append(frame)
    return b"".join(parts), attachments


# ── unpacking ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _UnreadableError(Exception):
    """A record has the wrong length or an unknown command, so the number of its attachments is unknown."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class _Reader:
    """The records of one message, and the current position in them."""

    def __init__(self, message: Message, at: int, route: Route, max_body: int, max_frames: int) -> None:
        frames: list[Any] = message
        self.data = bytes(frames[at + 2]) if len(frames) > at + 2 else b""
        self.attachments = frames[at + 3 :]
        self.attached = 0
        """Number of attachments already read."""
        self.aligned = True
        """Whether it is known which attachment is next."""
        self.route = route
        self.at = 0
        self.end = 0
        """Where the current record ends."""
        self.command = 0
        self.id = 0
        self.body: list[Any] = []
        self.over_limit: Reason | None = None
        """Why the body was not built."""
        self._max_body = max_body
        self._max_frames = max_frames

    def take(self, count: int) -> bytes:
        at, self.at = self.at, self.at + count
        if self.at > self.end:
            raise _UnreadableError(Reason.BAD_RECORD)
        return self.data[at : self.at]

    def numbers(self, layout: Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def read_end(self) -> None:
        if self.at != self.end:
            raise _UnreadableError(Reason.BAD_RECORD)

    def read_body(self) -> None:
        """Read the body, which is the end of the record, into `body`; skip a body over the limits."""
        (count,) = self.numbers(_SHORT)
        many = count > self._max_frames
        body: list[Any] = []
        size = 0
        for _ in range(count):
            (length,) = self.numbers(_LONG)
            if length == ATTACHED:
                if not self.aligned or self.attached == len(self.attachments):
                    raise _UnreadableError(Reason.BAD_RECORD)
                frame = self.attachments[self.attached]
                self.attached += 1
                size += len(frame)
            else:
                size += length
                frame = self.take(length)
            if not many and size <= self._max_body:
                body.append(frame)
        self.read_end()
        self.body = body
        self.over_limit = Reason.TOO_MANY_FRAMES if many else Reason.TOO_LARGE if size > self._max_body else None


def _decode(reader: _Reader, read: Callable[[_Reader], Any], invalid: Callable[[Reason, Route, int], Any]) -> list[Any]:
    """Return the result of `read` for each record, and of `invalid` for a record that has an id but cannot be read."""
    data = reader.data
    commands: list[Any] = []
    begin, length = 0, len(data)
    while begin < length:
        if begin + HEAD.size > length:
            commands.append(wire.Invalid(Reason.BAD_RECORD))
            return commands
        size, reader.command, reader.id = HEAD.unpack_from(data, begin)
        reader.at = begin + HEAD.size
        begin += SIZE_BYTES + size
        if begin < reader.at or begin > length or len(commands) == MAX_RECORDS:
            commands.append(invalid(Reason.BAD_RECORD, reader.route, reader.id))
            return commands
        reader.end = begin
        try:
            commands.append(read(reader))
        except _UnreadableError as error:
            reader.aligned = False
            commands.append(invalid(error.reason, reader.route, reader.id))
    if reader.aligned and reader.attached < len(reader.attachments):
        commands.append(wire.Invalid(Reason.TOO_MANY_FRAMES))
    return commands


def _unanswerable(reason: Reason, route: Route, id: int) -> wire.Invalid:  # noqa: A002
    del route, id
    return wire.Invalid(reason)


def from_client(message: Message, at: int, route: Route, max_body: int, max_frames: int) -> list[Any]:
    """Decode what a client sent to the broker."""
    return _decode(_Reader(message, at, route, max_body, max_frames), _from_client, wire.Invalid)


def _from_client(reader: _Reader) -> wire.Request | wire.Cancel | wire.Limits | wire.Invalid:
    route, number = reader.route, reader.id
    if reader.command == x1.CLIENT_CANCEL:
        reader.read_end()
        return wire.Cancel(route, wire.CX1, number)
    if reader.command == x1.CLIENT_LIMITS:
        reader.read_end()
        return wire.Limits(route, wire.CX1)
    if reader.command != x1.CLIENT_REQUEST:
        raise _UnreadableError(Reason.UNKNOWN_COMMAND)
    ttl, named = reader.numbers(_LONG_AND_BYTE)
    service = reader.take(named)
    raw = reader.take(*reader.numbers(_SHORT))
    reader.read_body()
    if not wire.valid_service(service):
        return wire.Invalid(Reason.BAD_SERVICE, route, number)
    if reader.over_limit is not None:
        return wire.Invalid(reader.over_limit, route, number, over_limit=True)
    if not reader.body:
        return wire.Invalid(Reason.NO_BODY, route, number)
    options = wire.parse_options(raw)
    if options is None:
        return wire.Invalid(Reason.BAD_OPTIONS, route, number)
    if service.startswith(wire.MMI):  # the broker itself reads this body
        reader.body = wire.without_shared(reader.body)
    return wire.Request(route, wire.CX1, service, reader.body, options, number, ttl / 1000 if ttl else None)


def from_worker(message: Message, at: int, route: Route, max_body: int, max_frames: int) -> list[Any]:
    """Decode what a worker sent to the broker."""
    return _decode(_Reader(message, at, route, max_body, max_frames), _from_worker, _unanswerable)


def _from_worker(reader: _Reader) -> Any:
    route, command, address = reader.route, reader.command, reader.id
    if command in {x1.WORKER_PARTIAL, x1.WORKER_FINAL}:
        reader.read_body()
        final = command == x1.WORKER_FINAL
        if reader.over_limit is not None:
            return wire.Oversized(route, wire.WX1, reader.over_limit, wire.FINAL if final else wire.PARTIAL, address)
        if not reader.body:
            return wire.Invalid(Reason.NO_BODY)
        return wire.Reply(route, wire.WX1, final, address, reader.body)
    if command == x1.WORKER_ERROR:
        return _error_from_worker(reader)
    if command == x1.WORKER_READY:
        credit, named = reader.numbers(_LONG_AND_BYTE)
        service = reader.take(named)
        raw = reader.take(*reader.numbers(_SHORT))
        reader.read_end()
        return x1.ready_with(route, service, raw, credit)
    if command == x1.WORKER_CREDIT:
        (credit,) = reader.numbers(_LONG)
        reader.read_end()
        return wire.Credit(route, wire.WX1, credit)
    if command == x1.WORKER_RELEASE:
        reader.read_end()
        return wire.Release(route, wire.WX1, address)
    if command == x1.WORKER_DISCONNECT:
        return x1.disconnected(route, wire.WX1, reader.take(reader.end - reader.at))
    raise _UnreadableError(Reason.UNKNOWN_COMMAND)


def _error_from_worker(reader: _Reader) -> wire.Error | wire.Oversized | wire.Invalid:
    code, length = reader.numbers(_CODE_AND_SHORT)
    text = reader.take(length)
    reader.read_body()
    if reader.over_limit is not None:
        return wire.Oversized(reader.route, wire.WX1, reader.over_limit, wire.ERROR, reader.id)
    wrong = _wrong_error(code, reader.body)
    return wrong or wire.Error(reader.route, wire.WX1, reader.id, code, text, reader.body)


def _wrong_error(code: int, detail: Frames) -> wire.Invalid | None:
    if code > 999:
        return wire.Invalid(Reason.BAD_CODE)
    return wire.Invalid(Reason.TOO_MANY_FRAMES) if len(detail) > 1 else None


def to_client(message: Message, at: int) -> list[Any]:
    """Decode what the broker sent to a client."""
    return _decode(_Reader(message, at, (), wire.NO_LIMIT, wire.NO_LIMIT), _to_client, _unanswerable)


def _to_client(reader: _Reader) -> wire.Reply | wire.Error | wire.Disconnect | wire.Limits | wire.Invalid:
    command, number = reader.command, reader.id
    if command in {x1.CLIENT_FINAL, x1.CLIENT_PARTIAL}:
        reader.read_body()
        if not reader.body:
            return wire.Invalid(Reason.NO_BODY)
        return wire.Reply((), wire.CX1, command == x1.CLIENT_FINAL, number, reader.body)
    if command == x1.CLIENT_DISCONNECT:
        return x1.disconnected((), wire.CX1, reader.take(reader.end - reader.at))
    if command == x1.CLIENT_LIMITS:
        max_bytes, max_frames = reader.numbers(x1.LIMITS)
        reader.read_end()
        return wire.Limits((), wire.CX1, max_bytes, max_frames)
    if command != x1.CLIENT_ERROR:
        raise _UnreadableError(Reason.UNKNOWN_COMMAND)
    code, length = reader.numbers(_CODE_AND_SHORT)
    text = reader.take(length)
    reader.read_body()
    wrong = _wrong_error(code, reader.body)
    return wrong or wire.Error((), wire.CX1, number, code, text, reader.body)


def to_worker(message: Message, at: int) -> list[Any]:
    """Decode what the broker sent to a worker."""
    return _decode(_Reader(message, at, (), wire.NO_LIMIT, wire.NO_LIMIT), _to_worker, _unanswerable)


def _to_worker(reader: _Reader) -> wire.Request | wire.Cancel | wire.Disconnect | wire.Invalid:
    address = reader.id
    if reader.command == x1.WORKER_CANCEL:
        reader.read_end()
        return wire.Cancel((), wire.WX1, address)
    if reader.command == x1.WORKER_DISCONNECT:
        return x1.disconnected((), wire.WX1, reader.take(reader.end - reader.at))
    if reader.command != x1.WORKER_REQUEST:
        raise _UnreadableError(Reason.UNKNOWN_COMMAND)
    ttl, attempt, length = reader.numbers(_REQUEST_TO_WORKER_HEAD)
    raw = reader.take(length)
    reader.read_body()
    options = wire.parse_options(raw)
    if options is None:
        return wire.Invalid(Reason.BAD_OPTIONS)
    if not reader.body:
        return wire.Invalid(Reason.NO_BODY)
    seconds = ttl / 1000 if ttl else None
    return wire.Request((), wire.WX1, b"", reader.body, options, address, seconds, attempt)
