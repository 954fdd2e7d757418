# cython: annotation_typing=False, infer_types=True, boundscheck=False, wraparound=False
"""X1's messages, each of which carries many commands (docs/reference/x1.md).

A message is `MDPCX1|MDPWX1 09 records [attachment…]`, or a bare header, which is a HEARTBEAT.  All integers are
big-endian:

    record := u32 size, u8 command, u64 id, …      size: of what follows it; id: a client's number, a worker's address
    REQUEST of a client   u32 ttl_ms, u8+service, u16+options, body
    REQUEST to a worker   u32 ttl_ms, u8 attempt, u16+options, body
    PARTIAL, FINAL        body
    ERROR                 u16 code, u16 lost, u8+reason, u16+text, body (at most one frame: the detail)
    READY                 u32 credit, u8+service, u16+options (the id is 0)
    CREDIT                u32 credit (the id is 0)
    LIMITS to a client    u64 max_bytes, u32 max_frames (the id is 0)
    CANCEL, RELEASE       nothing, as in LIMITS of a client
    DISCONNECT            text, to the end of the record (the id is 0)
    body   := u16 n, n × (u32 length, bytes); length FFFFFFFF: the frame is the next attachment (`SHARED` bytes or more)

A ttl of 0 means that there is none.  `x1` has the numbers of the commands.  `wire.heartbeat`, `wire.disconnect` and
`wire.limits` encode HEARTBEAT, DISCONNECT and the broker's LIMITS, which are messages of their own.

The functions decode a message; `at` is the index of its header.  An invalid record does not affect the others, unless
it is unknown where the next one begins or which attachment is next (C43).

Cython compiles this file, with the C types in `batch.pxd`, to something about ten times as fast.  There, positions in
`bytes` and `bytearray` are positions in memory, and nothing checks them: check lengths before you read (`skip`) and
make room before you write (`_grow`).
"""

from collections.abc import Sequence
from typing import Any, Final

from . import buffers
from .commands import (
    BATCH,
    CX1,
    ERROR,
    FINAL,
    PARTIAL,
    WX1,
    Cancel,
    Credit,
    Disconnect,
    Error,
    Invalid,
    Limits,
    Message,
    Oversized,
    Reason,
    Release,
    Reply,
    Request,
    Route,
)
from .messages import NO_LIMIT, SHARED, without_shared
from .names import MMI, valid_service
from .options import NO_OPTIONS, Options, parse_options
from .x1 import (
    ATTACHED,
    CLIENT_CANCEL,
    CLIENT_DISCONNECT,
    CLIENT_ERROR,
    CLIENT_FINAL,
    CLIENT_LIMITS,
    CLIENT_PARTIAL,
    CLIENT_REQUEST,
    HEAD,
    MAX_ATTACHED_BYTES,
    MAX_ATTACHMENTS,
    MAX_BODY_FRAMES,
    MAX_RECORDS,
    MAX_RECORDS_BYTES,
    SIZE_BYTES,
    WORKER_CANCEL,
    WORKER_CREDIT,
    WORKER_DISCONNECT,
    WORKER_ERROR,
    WORKER_FINAL,
    WORKER_PARTIAL,
    WORKER_READY,
    WORKER_RELEASE,
    WORKER_REQUEST,
    disconnected,
    ready_with,
)

Frames = Sequence[Any]
"""Frames of a body: bytes, or memoryviews."""
HEAD_BYTES: Final = HEAD.size
FIRST_BUFFER_BYTES: Final = 1024
KEPT_BUFFER_BYTES: Final = 4096
"""A larger buffer is given up once its records are taken: they were more or larger than usual."""


# ── packing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Batch:
    """Commands for one peer, packed as they are added.

    A method raises, and adds nothing, if a record cannot hold what is given: options of more than `MAX_OPTIONS` bytes,
    a body of more than `MAX_BODY_FRAMES` frames, or a ttl above `MAX_TTL_MS`.
    """

    def __init__(self, route: Route, header: bytes) -> None:
        self._head = [*route, header, BATCH]
        self._closed: list[Message] = []
        self._buffer = bytearray(FIRST_BUFFER_BYTES)
        self._data = self._buffer
        """`_buffer`, as a pointer if this is compiled."""
        self._size = 0
        """Bytes in `_data` of the records that are complete."""
        self._records = 0
        self._attachments: list[Any] = []
        self._attached = 0
        """Bytes of the attachments."""

    def __len__(self) -> int:
        """Return 0 if nothing was added since `messages` was called."""
        return len(self._closed) + self._records

    def request_to_broker(self, number: int, ttl: int, service: bytes, options: bytes, body: Frames) -> None:
        """Add a client's REQUEST.  `ttl` is in milliseconds, 0 for none."""
        at = self._begin(CLIENT_REQUEST, number, 7 + len(service) + len(options))
        self._add_body(self._put_service(at, ttl, service, options), body)

    def request_to_worker(self, address: int, ttl: int, attempt: int, options: bytes, body: Frames) -> None:
        """Add a REQUEST to a worker.  An attempt above 255 is sent as 255."""
        at = self._begin(WORKER_REQUEST, address, 7 + len(options))
        data = self._data
        buffers.put32(data, at, ttl)
        data[at + 4] = min(attempt, 0xFF)
        self._add_body(self._put_text(at + 5, options), body)

    def reply(self, command: int, id: int, body: Frames) -> None:  # noqa: A002 - the wire's word
        """Add a PARTIAL or a FINAL, by its number in that direction."""
        self._add_body(self._begin(command, id, 0), body)

    def error(
        self,
        command: int,
        id: int,  # noqa: A002 - the wire's word
        code: int,
        text: bytes,
        detail: Frames,
        reason: bytes = b"",
        lost: int = 0,
    ) -> None:
        """Add an ERROR.  The reason is cut at 255 bytes, the text at 65,535, and `lost` above that is sent as that."""
        reason, text = reason[:0xFF], text[:0xFFFF]
        at = self._begin(command, id, 7 + len(reason) + len(text))
        data = self._data
        buffers.put16(data, at, code)
        buffers.put16(data, at + 2, min(lost, 0xFFFF))
        data[at + 4] = len(reason)
        buffers.put_bytes(data, at + 5, reason)
        self._add_body(self._put_text(at + 5 + len(reason), text), detail)

    def signal(self, command: int, id: int) -> None:  # noqa: A002
        """Add a CANCEL or a RELEASE."""
        self._complete(self._begin(command, id, 0), None, 0)

    def ready(self, credit: int, service: bytes, options: bytes) -> None:
        """Add a READY."""
        at = self._begin(WORKER_READY, 0, 7 + len(service) + len(options))
        self._complete(self._put_service(at, credit, service, options), None, 0)

    def credit(self, credit: int) -> None:
        """Add a CREDIT."""
        at = self._begin(WORKER_CREDIT, 0, 4)
        buffers.put32(self._data, at, credit)
        self._complete(at + 4, None, 0)

    def messages(self) -> list[Message]:
        """Return everything that was added, as messages to send, and start again empty."""
        if self._records:
            self._close()
        closed = self._closed
        self._closed = []
        if len(self._buffer) > KEPT_BUFFER_BYTES:
            self._data = self._buffer = bytearray(FIRST_BUFFER_BYTES)
        return closed

    def _begin(self, command: int, id: int, more: int) -> int:  # noqa: A002
        """Write a record's command and id after the complete records.

        Returns the position behind, where there is room for `more` bytes and the number of frames of a body.
        """
        at = self._size
        end = at + HEAD_BYTES + more + 2
        if end > len(self._buffer):
            self._grow(end)
        data = self._data
        data[at + 4] = command
        buffers.put64(data, at + 5, id)
        return at + HEAD_BYTES

    def _grow(self, end: int) -> None:
        """Let the buffer have at least `end` bytes."""
        length = len(self._buffer)
        self._buffer.extend(bytes(max(end, 4 * length) - length))
        self._data = self._buffer

    def _put_service(self, at: int, number: int, service: bytes, options: bytes) -> int:
        """Write a ttl or a credit, a service and its options; return the position behind."""
        if len(service) > 0xFF:
            raise OverflowError("the service is too long for a record")
        data = self._data
        buffers.put32(data, at, number)
        data[at + 4] = len(service)
        buffers.put_bytes(data, at + 5, service)
        return self._put_text(at + 5 + len(service), options)

    def _put_text(self, at: int, text: bytes) -> int:
        """Write `text` behind its length; return the position behind."""
        if len(text) > 0xFFFF:
            raise OverflowError("the options are too long for a record")
        data = self._data
        buffers.put16(data, at, len(text))
        buffers.put_bytes(data, at + 2, text)
        return at + 2 + len(text)

    def _add_body(self, at: int, body: Frames) -> None:
        """Write `body` at `at`, where there is room for the number of its frames, which completes the record."""
        if len(body) > MAX_BODY_FRAMES:
            raise OverflowError("the body has too many frames for a record")
        attachments: list[Any] | None = None
        attached = 0
        buffers.put16(self._data, at, len(body))
        at += 2
        for frame in body:
            size = len(frame)
            if size < SHARED:
                small = frame if type(frame) is bytes else memoryview(frame).tobytes()
                size = len(small)
                end = at + 4 + size
                if end > len(self._buffer):
                    self._grow(end)
                buffers.put32(self._data, at, size)
                buffers.put_bytes(self._data, at + 4, small)
            else:
                end = at + 4
                if end > len(self._buffer):
                    self._grow(end)
                buffers.put32(self._data, at, ATTACHED)
                if attachments is None:
                    attachments = []
                attachments.append(frame)
                attached += size
            at = end
        self._complete(at, attachments, attached)

    def _complete(self, end: int, attachments: list[Any] | None, attached: int) -> None:
        """Complete the record that ends at `end`, in the current message or as the first of the next."""
        begin = self._size
        size = end - begin
        buffers.put32(self._data, begin, size - SIZE_BYTES)
        if self._records and (
            self._records == MAX_RECORDS
            or end > MAX_RECORDS_BYTES
            or (
                attachments is not None
                and (
                    len(self._attachments) + len(attachments) > MAX_ATTACHMENTS
                    or self._attached + attached > MAX_ATTACHED_BYTES
                )
            )
        ):
            record = buffers.get_bytes(self._data, begin, end)
            self._close()
            buffers.put_bytes(self._data, 0, record)
        self._records += 1
        self._size += size
        if attachments is not None:
            self._attachments += attachments
            self._attached += attached

    def _close(self) -> None:
        self._closed.append([*self._head, buffers.get_bytes(self._data, 0, self._size), *self._attachments])
        self._records = self._size = 0
        if self._attachments:
            self._attachments, self._attached = [], 0


# ── unpacking ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _UnreadableError(Exception):
    """A record has the wrong length or an unknown command, so the number of its attachments is unknown."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class _Records:
    """The records of one message, and the current position in them."""

    body: list[Any]
    """What `read_body` read."""

    def __init__(self, route: Route, message: list[Any], at: int) -> None:
        self.route = route
        self.message = message
        self.records = b""
        self.data = b""
        """`records`, as a pointer if this is compiled."""
        self.attachment = at + 3
        """Index of the next attachment in the message."""
        self.aligned = True
        """Whether it is known which attachment is next."""
        self.at = 0
        self.end = 0
        """Where the current record ends."""
        self.command = 0
        self.id = 0
        self.over_limit: Reason | None = None
        """Why the body was not built."""
        self.max_body = NO_LIMIT
        self.max_frames = NO_LIMIT
        # Requests that arrive together mostly have the same service and the same options, and share the objects.
        self.service: bytes | None = None
        self.raw = b""
        self.options = NO_OPTIONS

    def read(self) -> Any:
        """Return the command of the current record.  Raises `_UnreadableError`."""

    def invalid(self, reason: Reason) -> Invalid:
        """Return what stands for a record that has an id but cannot be read."""
        return Invalid(reason)

    def decode(self) -> list[Any]:
        """Return the commands of the message."""
        commands: list[Any] = []
        if len(self.message) < self.attachment:
            return commands
        records = self.message[self.attachment - 1]
        self.records = records if type(records) is bytes else bytes(records)
        self.data = self.records
        data = self.data
        begin, length = 0, len(self.records)
        while begin < length:
            if begin + HEAD_BYTES > length:
                commands.append(Invalid(Reason.BAD_RECORD))
                return commands
            size = buffers.get32(data, begin)
            self.command = data[begin + 4]
            self.id = buffers.get64(data, begin + 5)
            self.at = begin + HEAD_BYTES
            begin += SIZE_BYTES + size
            if begin < self.at or begin > length or len(commands) == MAX_RECORDS:
                commands.append(self.invalid(Reason.BAD_RECORD))
                return commands
            self.end = begin
            try:
                commands.append(self.read())
            except _UnreadableError as error:
                self.aligned = False
                commands.append(self.invalid(error.reason))
        if self.aligned and self.attachment < len(self.message):
            commands.append(Invalid(Reason.TOO_MANY_FRAMES))
        return commands

    def skip(self, count: int) -> int:
        """Move behind the next `count` bytes; return where they begin."""
        at = self.at
        if count > self.end - at:
            raise _UnreadableError(Reason.BAD_RECORD)
        self.at = at + count
        return at

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        at = self.skip(count)
        return self.data[at : at + count]

    def text(self) -> bytes:
        """Return the next bytes, which stand behind their length."""
        at = self.skip(2)
        return self.take(buffers.get16(self.data, at))

    def read_end(self) -> None:
        """Check that nothing is left."""
        if self.at != self.end:
            raise _UnreadableError(Reason.BAD_RECORD)

    def read_body(self) -> None:
        """Read the body, which is the end of the record, into `body`; skip a body over the limits."""
        data = self.data
        count = buffers.get16(data, self.skip(2))
        many = count > self.max_frames
        body: list[Any] = []
        total = 0
        for _ in range(count):
            length = buffers.get32(data, self.skip(4))
            if length == ATTACHED:
                if not self.aligned or self.attachment == len(self.message):
                    raise _UnreadableError(Reason.BAD_RECORD)
                frame = self.message[self.attachment]
                self.attachment += 1
                total += len(frame)
                if not many and total <= self.max_body:
                    body.append(frame)
            else:
                at = self.skip(length)
                total += length
                if not many and total <= self.max_body:
                    body.append(data[at : at + length])
        self.read_end()
        self.body = body
        self.over_limit = Reason.TOO_MANY_FRAMES if many else Reason.TOO_LARGE if total > self.max_body else None

    def read_options(self, raw: bytes) -> Options | None:
        """Return the options in `raw`; None if they are malformed."""
        if raw != self.raw:
            options = parse_options(raw)
            if options is None:
                return None
            self.raw, self.options = raw, options
        return self.options

    def read_error(self, route: Route, header: bytes) -> Error | Oversized | Invalid:
        """Return an ERROR."""
        at = self.skip(5)
        code = buffers.get16(self.data, at)
        lost = buffers.get16(self.data, at + 2)
        reason = self.take(self.data[at + 4])
        text = self.text()
        self.read_body()
        if self.over_limit is not None:
            return Oversized(route, header, self.over_limit, ERROR, self.id)
        if code > 999:
            return Invalid(Reason.BAD_CODE)
        if len(self.body) > 1:
            return Invalid(Reason.TOO_MANY_FRAMES)
        return Error(route, header, self.id, code, text, self.body, reason, lost)

    def read_disconnect(self, header: bytes) -> Disconnect:
        """Return a DISCONNECT."""
        return disconnected(self.route, header, self.take(self.end - self.at))


class _FromClient(_Records):
    """What a client sent to the broker."""

    def invalid(self, reason: Reason) -> Invalid:
        return Invalid(reason, self.route, self.id)

    def read(self) -> Request | Cancel | Limits | Invalid:
        route, number = self.route, self.id
        if self.command == CLIENT_CANCEL:
            self.read_end()
            return Cancel(route, CX1, number)
        if self.command == CLIENT_LIMITS:
            self.read_end()
            return Limits(route, CX1)
        if self.command != CLIENT_REQUEST:
            raise _UnreadableError(Reason.UNKNOWN_COMMAND)
        at = self.skip(5)
        ttl = buffers.get32(self.data, at)
        service = self.take(self.data[at + 4])
        raw = self.text()
        self.read_body()
        if service != self.service:
            if not valid_service(service):
                return Invalid(Reason.BAD_SERVICE, route, number)
            self.service = service
        if self.over_limit is not None:
            return Invalid(self.over_limit, route, number, over_limit=True)
        if not self.body:
            return Invalid(Reason.NO_BODY, route, number)
        options = self.read_options(raw)
        if options is None:
            return Invalid(Reason.BAD_OPTIONS, route, number)
        if service.startswith(MMI):  # the broker itself reads this body
            self.body = without_shared(self.body)
        return Request(route, CX1, self.service, self.body, options, number, ttl / 1000 if ttl else None)


class _FromWorker(_Records):
    """What a worker sent to the broker."""

    def read(self) -> Any:
        route, command = self.route, self.command
        if command in {WORKER_PARTIAL, WORKER_FINAL}:
            self.read_body()
            final = command == WORKER_FINAL
            if self.over_limit is not None:
                return Oversized(route, WX1, self.over_limit, FINAL if final else PARTIAL, self.id)
            if not self.body:
                return Invalid(Reason.NO_BODY)
            return Reply(route, WX1, final, self.id, self.body)
        if command == WORKER_ERROR:
            return self.read_error(route, WX1)
        if command == WORKER_READY:
            at = self.skip(5)
            service = self.take(self.data[at + 4])
            raw = self.text()
            self.read_end()
            return ready_with(route, service, raw, buffers.get32(self.data, at))
        if command == WORKER_CREDIT:
            at = self.skip(4)
            self.read_end()
            return Credit(route, WX1, buffers.get32(self.data, at))
        if command == WORKER_RELEASE:
            self.read_end()
            return Release(route, WX1, self.id)
        if command == WORKER_DISCONNECT:
            return self.read_disconnect(WX1)
        raise _UnreadableError(Reason.UNKNOWN_COMMAND)


class _ToClient(_Records):
    """What the broker sent to a client."""

    def read(self) -> Reply | Error | Oversized | Disconnect | Limits | Invalid:
        command = self.command
        if command in {CLIENT_PARTIAL, CLIENT_FINAL}:
            self.read_body()
            if not self.body:
                return Invalid(Reason.NO_BODY)
            final = command == CLIENT_FINAL
            return Reply((), CX1, final, self.id, self.body)
        if command == CLIENT_DISCONNECT:
            return self.read_disconnect(CX1)
        if command == CLIENT_ERROR:
            return self.read_error((), CX1)
        if command == CLIENT_LIMITS:
            at = self.skip(12)
            self.read_end()
            return Limits((), CX1, buffers.get64(self.data, at), buffers.get32(self.data, at + 8))
        raise _UnreadableError(Reason.UNKNOWN_COMMAND)


class _ToWorker(_Records):
    """What the broker sent to a worker."""

    def read(self) -> Request | Cancel | Disconnect | Invalid:
        if self.command == WORKER_CANCEL:
            self.read_end()
            return Cancel((), WX1, self.id)
        if self.command == WORKER_DISCONNECT:
            return self.read_disconnect(WX1)
        if self.command != WORKER_REQUEST:
            raise _UnreadableError(Reason.UNKNOWN_COMMAND)
        at = self.skip(5)
        ttl = buffers.get32(self.data, at)
        raw = self.text()
        self.read_body()
        options = self.read_options(raw)
        if options is None:
            return Invalid(Reason.BAD_OPTIONS)
        if not self.body:
            return Invalid(Reason.NO_BODY)
        return Request((), WX1, b"", self.body, options, self.id, ttl / 1000 if ttl else None, self.data[at + 4])


def from_client(message: list[Any], at: int, route: Route, max_body: int, max_frames: int) -> list[Any]:
    """Decode what a client sent to the broker."""
    records = _FromClient(route, message, at)
    records.max_body = max_body
    records.max_frames = max_frames
    return records.decode()


def from_worker(message: list[Any], at: int, route: Route, max_body: int, max_frames: int) -> list[Any]:
    """Decode what a worker sent to the broker."""
    records = _FromWorker(route, message, at)
    records.max_body = max_body
    records.max_frames = max_frames
    return records.decode()


def to_client(message: list[Any], at: int) -> list[Any]:
    """Decode what the broker sent to a client."""
    return _ToClient((), message, at).decode()


def to_worker(message: list[Any], at: int) -> list[Any]:
    """Decode what the broker sent to a worker."""
    return _ToWorker((), message, at).decode()
