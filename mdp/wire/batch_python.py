"""The batched form of X1 in Python alone (see `batch`, which says what each function does)."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, Final

from .. import wire
from . import Message, Options, Reason, Route

MAX_RECORDS: Final = 256
"""Records of one message."""
MAX_RECORDS_BYTES: Final = 65536
"""Bytes of one message's records, unless it has only one."""
MAX_ATTACHMENTS: Final = 64
"""Attachments of one message, unless it has only one record."""
MAX_ATTACHED_BYTES: Final = 1 << 20
"""Bytes of one message's attachments, unless it has only one record."""
MAX_BODY_FRAMES: Final = 0xFFFF
"""Frames that a body can have in this form."""
MAX_TTL_MS: Final = 0xFFFFFFFF
"""The longest ttl that a record can tell, in milliseconds; a longer one is among the options."""
ATTACHED: Final = 0xFFFFFFFF
"""In place of a frame's length: the frame is the next attachment."""

_HEAD: Final = Struct(">IBQ")
"""A record's size (of what follows the size), its command and its id."""
_SHORT: Final = Struct(">H")
_LONG: Final = Struct(">I")
_LONG_AND_BYTE: Final = Struct(">IB")
"""A ttl or a credit, and the length of a service name."""
_WORK_HEAD: Final = Struct(">IBH")
"""A ttl, an attempt and the length of the options."""
_CODE_AND_SHORT: Final = Struct(">HH")
"""A code and the length of its text."""

_REQUEST, _PARTIAL, _FINAL, _ERROR_TO_CLIENT, _CANCEL = 1, 2, 3, 4, 5
_READY_FROM_WORKER, _WORK, _PARTIAL_FROM_WORKER, _FINAL_FROM_WORKER = 1, 2, 3, 4
_ERROR_FROM_WORKER, _CANCEL_TO_WORKER, _CREDIT_FROM_WORKER, _RELEASE = 7, 8, 10, 11

Frames = Sequence[Any]
"""Frames of a body: bytes, or memoryviews that are passed on."""


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

    def request(self, number: int, ttl: int, service: bytes, options: bytes, body: Frames) -> None:
        """Add a client's REQUEST."""
        head = _LONG_AND_BYTE.pack(ttl, len(service)) + service + _SHORT.pack(len(options)) + options
        self._add(_REQUEST, number, head, body)

    def work(self, address: int, ttl: int, attempt: int, options: bytes, body: Frames) -> None:
        """Add a REQUEST to a worker."""
        self._add(_WORK, address, _WORK_HEAD.pack(ttl, min(attempt, 0xFF), len(options)) + options, body)

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
        self._add_record(_READY_FROM_WORKER, 0, head, [])

    def credit(self, credit: int) -> None:
        """Add a CREDIT."""
        self._add_record(_CREDIT_FROM_WORKER, 0, _LONG.pack(credit), [])

    def _add(self, command: int, id: int, head: bytes, body: Frames) -> None:  # noqa: A002
        packed, attachments = _pack_body(body)
        self._add_record(command, id, head + packed, attachments)

    def _add_record(self, command: int, id: int, rest: bytes, attachments: list[Any]) -> None:  # noqa: A002
        record = _HEAD.pack(_HEAD.size - _LONG.size + len(rest), command, id) + rest
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
        """All that was added, as messages to send; begin anew."""
        if self._records:
            self._close()
        closed, self._closed = self._closed, []
        return closed


def _pack_body(body: Frames) -> tuple[bytes, list[Any]]:
    """The body as it stands in a record, and the frames of it that are attached."""
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
    """A record that is too short or too long, or has an unknown command: the number of its attachments is unknown."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class _Reader:
    """The records of one message, and the place reached in them."""

    def __init__(self, message: Message, at: int, route: Route, max_body: int, max_frames: int) -> None:
        frames: list[Any] = message
        self.data = bytes(frames[at + 2]) if len(frames) > at + 2 else b""
        self.attachments = frames[at + 3 :]
        self.attached = 0
        """Attachments that were taken."""
        self.aligned = True
        """It is known which attachment is next."""
        self.route = route
        self.at = 0
        self.end = 0
        """Where the present record ends."""
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
        """Take the body, with which a record ends, to `body`; one over the limits is only passed over."""
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
    """What `read` makes of each record, and `invalid` of one that cannot be read but has an id."""
    data = reader.data
    commands: list[Any] = []
    begin, length = 0, len(data)
    while begin < length:
        if begin + _HEAD.size > length:
            commands.append(wire.Invalid(Reason.BAD_RECORD))
            return commands
        size, reader.command, reader.id = _HEAD.unpack_from(data, begin)
        reader.at = begin + _HEAD.size
        begin += _LONG.size + size
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
    """What a client sent to the broker."""
    return _decode(_Reader(message, at, route, max_body, max_frames), _from_client, wire.Invalid)


def _from_client(reader: _Reader) -> wire.Request | wire.Cancel | wire.Invalid:
    route, number = reader.route, reader.id
    if reader.command == _CANCEL:
        reader.read_end()
        return wire.Cancel(route, wire.CX1, None, number)
    if reader.command != _REQUEST:
        raise _UnreadableError(Reason.UNKNOWN_COMMAND)
    ttl, named = reader.numbers(_LONG_AND_BYTE)
    service = reader.take(named)
    raw = reader.take(*reader.numbers(_SHORT))
    reader.read_body()
    if not wire.valid_service(service):
        return wire.Invalid(Reason.BAD_SERVICE, route, number)
    if reader.over_limit is not None:
        return wire.Invalid(reader.over_limit, route, number, service, over_limit=True)
    if not reader.body:
        return wire.Invalid(Reason.NO_BODY, route, number, service)
    options = _request_options(raw, ttl)
    if options is None:
        return wire.Invalid(Reason.BAD_OPTIONS, route, number, service)
    if service.startswith(wire.MMI):  # the broker reads such a body itself
        reader.body = wire.without_shared(reader.body)
    return wire.Request(route, wire.CX1, service, reader.body, options, number)


def _request_options(raw: bytes, ttl: int) -> Options | None:
    """The options of a record, with its ttl in milliseconds unless that is 0; None if they are malformed."""
    if ttl == 0:
        return wire.parse_options(raw)
    return _cached_options_with(raw, ttl) if len(raw) <= wire.MAX_NAME else _options_with(raw, ttl)


def _options_with(raw: bytes, ttl: int) -> Options | None:
    options = wire.parse_options(raw)
    if options is None:
        return None
    return Options(raw, ttl / 1000, options.wait, options.only_ttl or not raw, ttl_apart=options.ttl is None)


@lru_cache(maxsize=1024)
def _cached_options_with(raw: bytes, ttl: int) -> Options | None:
    return _options_with(raw, ttl)


def from_worker(message: Message, at: int, route: Route, max_body: int, max_frames: int) -> list[Any]:
    """What a worker sent to the broker."""
    return _decode(_Reader(message, at, route, max_body, max_frames), _from_worker, _unanswerable)


def _from_worker(reader: _Reader) -> Any:
    route, command, address = reader.route, reader.command, reader.id
    if command in {_PARTIAL_FROM_WORKER, _FINAL_FROM_WORKER}:
        reader.read_body()
        final = command == _FINAL_FROM_WORKER
        if reader.over_limit is not None:
            return wire.Oversized(route, wire.WX1, reader.over_limit, wire.FINAL if final else wire.PARTIAL, address)
        if not reader.body:
            return wire.Invalid(Reason.NO_BODY)
        return wire.Reply(route, wire.WX1, final, address, reader.body)
    if command == _ERROR_FROM_WORKER:
        return _failure(reader)
    if command == _READY_FROM_WORKER:
        credit, named = reader.numbers(_LONG_AND_BYTE)
        service = reader.take(named)
        raw = reader.take(*reader.numbers(_SHORT))
        reader.read_end()
        return wire.ready_with(route, service, raw, credit)
    if command == _CREDIT_FROM_WORKER:
        (credit,) = reader.numbers(_LONG)
        reader.read_end()
        return wire.Credit(route, wire.WX1, credit)
    if command == _RELEASE:
        reader.read_end()
        return wire.Release(route, wire.WX1, address)
    raise _UnreadableError(Reason.UNKNOWN_COMMAND)


def _failure(reader: _Reader) -> wire.Failure | wire.Oversized | wire.Invalid:
    code, told = reader.numbers(_CODE_AND_SHORT)
    text = reader.take(told)
    reader.read_body()
    if reader.over_limit is not None:
        return wire.Oversized(reader.route, wire.WX1, reader.over_limit, wire.ERROR, reader.id)
    wrong = _wrong_error(code, reader.body)
    return wrong or wire.Failure(reader.route, wire.WX1, reader.id, code, text, reader.body)


def _wrong_error(code: int, detail: Frames) -> wire.Invalid | None:
    if code > 999:
        return wire.Invalid(Reason.BAD_CODE)
    return wire.Invalid(Reason.TOO_MANY_FRAMES) if len(detail) > 1 else None


def to_client(message: Message, at: int) -> list[Any]:
    """What the broker sent to a client."""
    return _decode(_Reader(message, at, (), wire.NO_LIMIT, wire.NO_LIMIT), _to_client, _unanswerable)


def _to_client(reader: _Reader) -> wire.Answer | wire.Error | wire.Invalid:
    command, number = reader.command, reader.id
    if command in {_FINAL, _PARTIAL}:
        reader.read_body()
        if not reader.body:
            return wire.Invalid(Reason.NO_BODY)
        return wire.Answer((), wire.CX1, command == _FINAL, b"", reader.body, number)
    if command != _ERROR_TO_CLIENT:
        raise _UnreadableError(Reason.UNKNOWN_COMMAND)
    code, told = reader.numbers(_CODE_AND_SHORT)
    text = reader.take(told)
    reader.read_body()
    wrong = _wrong_error(code, reader.body)
    return wrong or wire.Error((), wire.CX1, b"", code, text.decode(errors="replace"), reader.body, number)


def to_worker(message: Message, at: int) -> list[Any]:
    """What the broker sent to a worker."""
    return _decode(_Reader(message, at, (), wire.NO_LIMIT, wire.NO_LIMIT), _to_worker, _unanswerable)


def _to_worker(reader: _Reader) -> wire.Work | wire.Withdraw | wire.Invalid:
    address = reader.id
    if reader.command == _CANCEL_TO_WORKER:
        reader.read_end()
        return wire.Withdraw((), wire.WX1, address)
    if reader.command != _WORK:
        raise _UnreadableError(Reason.UNKNOWN_COMMAND)
    ttl, attempt, told = reader.numbers(_WORK_HEAD)
    raw = reader.take(told)
    reader.read_body()
    options = wire.parse_options(raw)
    if options is None:
        return wire.Invalid(Reason.BAD_OPTIONS)
    if not reader.body:
        return wire.Invalid(Reason.NO_BODY)
    return wire.Work((), wire.WX1, address, reader.body, options, ttl / 1000 if ttl else None, attempt)
