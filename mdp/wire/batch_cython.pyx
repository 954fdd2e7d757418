# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""X1's messages, compiled; see `batch` for what each function does.

Records are packed into one growing buffer and parsed in place: the only objects created per record are the command and
its body.  `wire` decides what is valid, as for `batch_python`.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_SIZE
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy, memmove

from .. import wire
from . import batch_python as _limits
from . import x1

cdef Py_ssize_t MAX_RECORDS = _limits.MAX_RECORDS
cdef size_t MAX_RECORDS_BYTES = _limits.MAX_RECORDS_BYTES
cdef Py_ssize_t MAX_ATTACHMENTS = _limits.MAX_ATTACHMENTS
cdef size_t MAX_ATTACHED_BYTES = _limits.MAX_ATTACHED_BYTES
cdef Py_ssize_t SHARED = wire.SHARED
cdef Py_ssize_t MAX_NAME = wire.MAX_NAME
cdef size_t FIRST_BUFFER = 512
cdef size_t KEPT_BUFFER = 4096
"""A larger buffer is freed once its records are taken, since there is a `Batch` for every peer."""

cdef enum:
    ATTACHED = 0xFFFFFFFF
    HEAD = 13  # a record's size, command and id
    # from and to a client
    CLIENT_REQUEST = 1
    CLIENT_PARTIAL = 2
    CLIENT_FINAL = 3
    CLIENT_ERROR = 4
    CLIENT_CANCEL = 5
    CLIENT_LIMITS = 6
    CLIENT_DISCONNECT = 7
    # from and to a worker
    WORKER_READY = 1
    WORKER_REQUEST = 2
    WORKER_PARTIAL = 3
    WORKER_FINAL = 4
    WORKER_DISCONNECT = 6
    WORKER_ERROR = 7
    WORKER_CANCEL = 8
    WORKER_CREDIT = 10
    WORKER_RELEASE = 11

cdef object _Cancel = wire.Cancel, _Credit = wire.Credit, _Error = wire.Error, _Invalid = wire.Invalid
cdef object _Limits = wire.Limits
cdef object _Oversized = wire.Oversized, _disconnected = x1.disconnected, _Release = wire.Release, _Reply = wire.Reply
cdef object _Request = wire.Request
cdef object _valid_service = wire.valid_service, _parse_options = wire.parse_options, _ready_with = x1.ready_with
cdef object _without_shared = wire.without_shared
cdef bytes CX1 = wire.CX1, WX1 = wire.WX1, BATCH = wire.BATCH, EMPTY = wire.EMPTY, MMI = wire.MMI
cdef tuple NO_ROUTE = ()
cdef object NO_OPTIONS = wire.NO_OPTIONS, NO_LIMIT = wire.NO_LIMIT
cdef object KIND_PARTIAL = wire.PARTIAL, KIND_FINAL = wire.FINAL, KIND_ERROR = wire.ERROR
cdef object BAD_RECORD = wire.Reason.BAD_RECORD, UNKNOWN_COMMAND = wire.Reason.UNKNOWN_COMMAND
cdef object BAD_SERVICE = wire.Reason.BAD_SERVICE, BAD_OPTIONS = wire.Reason.BAD_OPTIONS
cdef object BAD_CODE = wire.Reason.BAD_CODE, NO_BODY = wire.Reason.NO_BODY
cdef object TOO_MANY_FRAMES = wire.Reason.TOO_MANY_FRAMES, TOO_LARGE = wire.Reason.TOO_LARGE


# ── integers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


cdef inline void put16(uint8_t *p, uint16_t value) noexcept nogil:
    p[0] = <uint8_t> (value >> 8)
    p[1] = <uint8_t> value


cdef inline void put32(uint8_t *p, uint32_t value) noexcept nogil:
    put16(p, <uint16_t> (value >> 16))
    put16(p + 2, <uint16_t> value)


cdef inline void put64(uint8_t *p, uint64_t value) noexcept nogil:
    put32(p, <uint32_t> (value >> 32))
    put32(p + 4, <uint32_t> value)


cdef inline uint16_t get16(const uint8_t *p) noexcept nogil:
    return <uint16_t> ((p[0] << 8) | p[1])


cdef inline uint32_t get32(const uint8_t *p) noexcept nogil:
    return (<uint32_t> get16(p) << 16) | get16(p + 2)


cdef inline uint64_t get64(const uint8_t *p) noexcept nogil:
    return (<uint64_t> get32(p) << 32) | get32(p + 4)


# ── packing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


cdef class Batch:
    """Commands for one peer, packed as they are added."""

    cdef list _head
    cdef list _closed
    cdef list _attachments
    cdef size_t _attached
    cdef uint8_t *_data
    cdef size_t _capacity
    cdef size_t _size  # of the records that are complete
    cdef Py_ssize_t _records

    def __cinit__(self, route, bytes header not None):
        self._head = [*route, header, BATCH]
        self._closed = []
        self._attachments = []

    def __dealloc__(self):
        free(self._data)

    def __len__(self):
        return PyList_GET_SIZE(self._closed) + self._records

    def request_to_broker(self, uint64_t number, uint32_t ttl, bytes service not None, bytes options not None, body):
        cdef size_t named = PyBytes_GET_SIZE(service), told = PyBytes_GET_SIZE(options)
        if named > 0xFF or told > 0xFFFF:
            raise OverflowError("the service or the options are too long for a record")
        cdef uint8_t *p = self._begin(CLIENT_REQUEST, number, 5 + named + 2 + told)
        put32(p, ttl)
        p[4] = <uint8_t> named
        memcpy(p + 5, PyBytes_AS_STRING(service), named)
        put16(p + 5 + named, <uint16_t> told)
        memcpy(p + 7 + named, PyBytes_AS_STRING(options), told)
        self._add(self._size + HEAD + 7 + named + told, body)

    def request_to_worker(self, uint64_t address, uint32_t ttl, unsigned long attempt, bytes options not None, body):
        cdef size_t told = PyBytes_GET_SIZE(options)
        if told > 0xFFFF:
            raise OverflowError("the options are too long for a record")
        cdef uint8_t *p = self._begin(WORKER_REQUEST, address, 7 + told)
        put32(p, ttl)
        p[4] = <uint8_t> min(attempt, 0xFF)
        put16(p + 5, <uint16_t> told)
        memcpy(p + 7, PyBytes_AS_STRING(options), told)
        self._add(self._size + HEAD + 7 + told, body)

    def reply(self, uint8_t command, uint64_t id, body):
        self._begin(command, id, 0)
        self._add(self._size + HEAD, body)

    def error(self, uint8_t command, uint64_t id, uint16_t code, bytes text not None, detail):
        cdef size_t told = min(PyBytes_GET_SIZE(text), 0xFFFF)
        cdef uint8_t *p = self._begin(command, id, 4 + told)
        put16(p, code)
        put16(p + 2, <uint16_t> told)
        memcpy(p + 4, PyBytes_AS_STRING(text), told)
        self._add(self._size + HEAD + 4 + told, detail)

    def signal(self, uint8_t command, uint64_t id):
        self._begin(command, id, 0)
        self._complete(self._size + HEAD, None, 0)

    def ready(self, uint32_t credit, bytes service not None, bytes options not None):
        cdef size_t named = PyBytes_GET_SIZE(service), told = PyBytes_GET_SIZE(options)
        if named > 0xFF or told > 0xFFFF:
            raise OverflowError("the service or the options are too long for a record")
        cdef uint8_t *p = self._begin(WORKER_READY, 0, 5 + named + 2 + told)
        put32(p, credit)
        p[4] = <uint8_t> named
        memcpy(p + 5, PyBytes_AS_STRING(service), named)
        put16(p + 5 + named, <uint16_t> told)
        memcpy(p + 7 + named, PyBytes_AS_STRING(options), told)
        self._complete(self._size + HEAD + 7 + named + told, None, 0)

    def credit(self, uint32_t credit):
        put32(self._begin(WORKER_CREDIT, 0, 4), credit)
        self._complete(self._size + HEAD + 4, None, 0)

    def messages(self):
        if self._records:
            self._close()
        closed, self._closed = self._closed, []
        if self._capacity > KEPT_BUFFER:
            free(self._data)
            self._data = NULL
            self._capacity = 0
        return closed

    cdef uint8_t *_begin(self, uint8_t command, uint64_t id, size_t more) except NULL:
        """Write a record's head, without its size, after the complete records; return where its next `more` bytes go."""
        cdef uint8_t *p = self._room(self._size, HEAD + more)
        p[4] = command
        put64(p + 5, id)
        return p + HEAD

    cdef inline uint8_t *_room(self, size_t at, size_t more) except NULL:
        """Return the position `at` in the buffer, with room for `more` bytes from there."""
        if at + more > self._capacity:
            self._grow(at + more)
        return self._data + at

    cdef int _grow(self, size_t least) except -1:
        cdef size_t capacity = max(least, 2 * self._capacity, FIRST_BUFFER)
        cdef void *data = realloc(self._data, capacity)
        if data == NULL:
            raise MemoryError
        self._data = <uint8_t *> data
        self._capacity = capacity
        return 0

    cdef int _add(self, size_t at, body) except -1:
        """Write `body` at `at`, which completes the record."""
        cdef size_t counted = at
        cdef Py_ssize_t count = 0
        cdef list attachments = None
        cdef size_t attached = 0
        cdef Py_ssize_t size
        cdef uint8_t *p
        cdef bytes small
        self._room(at, 2)
        at += 2
        for frame in body:
            count += 1
            size = PyBytes_GET_SIZE(<bytes> frame) if type(frame) is bytes else len(frame)
            if size >= SHARED:
                put32(self._room(at, 4), ATTACHED)
                at += 4
                if attachments is None:
                    attachments = []
                attachments.append(frame)
                attached += size
                continue
            small = <bytes> frame if type(frame) is bytes else memoryview(frame).tobytes()
            size = PyBytes_GET_SIZE(small)
            p = self._room(at, 4 + size)
            put32(p, <uint32_t> size)
            memcpy(p + 4, PyBytes_AS_STRING(small), size)
            at += 4 + size
        if count > 0xFFFF:
            raise OverflowError("the body has too many frames for a record")
        put16(self._data + counted, <uint16_t> count)
        return self._complete(at, attachments, attached)

    cdef int _complete(self, size_t end, list attachments, size_t attached) except -1:
        """Complete the record that ends at `end`, in the current message or as the first of the next."""
        cdef size_t begin = self._size, size = end - begin
        if size - 4 > 0xFFFFFFFF:
            raise OverflowError("the record is too long")
        put32(self._data + begin, <uint32_t> (size - 4))
        if self._records and (
            self._records == MAX_RECORDS
            or end > MAX_RECORDS_BYTES
            or (
                attachments is not None
                and (
                    PyList_GET_SIZE(self._attachments) + PyList_GET_SIZE(attachments) > MAX_ATTACHMENTS
                    or self._attached + attached > MAX_ATTACHED_BYTES
                )
            )
        ):
            self._close()
            memmove(self._data, self._data + begin, size)
        self._records += 1
        self._size += size
        if attachments is not None:
            self._attachments += attachments
            self._attached += attached
        return 0

    cdef int _close(self) except -1:
        cdef bytes records = PyBytes_FromStringAndSize(<char *> self._data, self._size)
        self._closed.append([*self._head, records, *self._attachments])
        self._records = 0
        self._size = 0
        if self._attachments:
            self._attachments = []
            self._attached = 0
        return 0


# ── unpacking ────────────────────────────────────────────────────────────────────────────────────────────────────────

# The last valid service name and the last parsed options.  Requests that arrive together mostly have the same ones,
# and share the objects.
cdef bytes _last_name = EMPTY
cdef bytes _last_raw = EMPTY
cdef object _last_options = NO_OPTIONS


cdef bytes _service(const uint8_t *p, Py_ssize_t size):
    """Return the service name at `p`; None if it is not valid."""
    global _last_name
    if size == 0:
        return None
    if size == PyBytes_GET_SIZE(_last_name) and memcmp(p, PyBytes_AS_STRING(_last_name), size) == 0:
        return _last_name
    cdef bytes name = PyBytes_FromStringAndSize(<const char *> p, size)
    if not _valid_service(name):
        return None
    _last_name = name
    return name


cdef object _options(const uint8_t *p, Py_ssize_t size):
    """Return the options at `p`; None if they are malformed."""
    global _last_raw, _last_options
    if size == PyBytes_GET_SIZE(_last_raw) and memcmp(p, PyBytes_AS_STRING(_last_raw), size) == 0:
        return _last_options
    cdef bytes raw = PyBytes_FromStringAndSize(<const char *> p, size)
    options = _parse_options(raw)
    if options is not None and size <= MAX_NAME:  # keep small objects only
        _last_raw, _last_options = raw, options
    return options


@cython.final
cdef class _Reader:
    """The records of one message, and the current position in them."""

    cdef list message
    cdef Py_ssize_t attachment  # the next one's place in the message
    cdef bint aligned  # it is known which attachment is next
    cdef Py_buffer view
    cdef const uint8_t *at
    cdef const uint8_t *end  # of the present record
    cdef uint8_t command
    cdef uint64_t id
    cdef tuple route
    cdef bint answerable  # the sender can be told what is wrong with a record, by its id
    cdef list body
    cdef object over_limit  # why the body was not built
    cdef Py_ssize_t max_body
    cdef Py_ssize_t max_frames

    def __dealloc__(self):
        PyBuffer_Release(&self.view)

    cdef inline bint has(self, Py_ssize_t count) noexcept:
        """Return whether at least `count` bytes of the record are left."""
        return self.end - self.at >= count

    cdef inline const uint8_t *take(self, Py_ssize_t count) noexcept:
        """Return the next `count` bytes, which the caller knows to be there."""
        self.at += count
        return self.at - count

    cdef bint read_body(self) except -1:
        """Read the body, which is the end of the record, into `body`; skip a body over the limits.

        Returns False if it is malformed.
        """
        cdef Py_ssize_t count, size = 0
        cdef uint32_t length
        cdef bint many
        cdef list body = []
        self.body = body
        self.over_limit = None
        if not self.has(2):
            return False
        count = get16(self.take(2))
        many = count > self.max_frames
        while count > 0:
            count -= 1
            if not self.has(4):
                return False
            length = get32(self.take(4))
            if length == ATTACHED:
                if not self.aligned or self.attachment >= PyList_GET_SIZE(self.message):
                    return False
                frame = self.message[self.attachment]
                self.attachment += 1
                size += len(frame)
                if not many and size <= self.max_body:
                    body.append(frame)
            else:
                if not self.has(length):
                    return False
                size += length
                if not many and size <= self.max_body:
                    body.append(PyBytes_FromStringAndSize(<const char *> self.at, length))
                self.at += length
        if many:
            self.over_limit = TOO_MANY_FRAMES
        elif size > self.max_body:
            self.over_limit = TOO_LARGE
        return self.at == self.end

    cdef object disconnect(self, bytes header):
        text = PyBytes_FromStringAndSize(<const char *> self.at, self.end - self.at)
        return _disconnected(self.route or NO_ROUTE, header, text)

    cdef object invalid(self, reason, bint numbered):
        return _Invalid(reason, self.route, self.id) if numbered and self.answerable else _Invalid(reason)


ctypedef object (*_Read)(_Reader)
"""Return the command of a record, or BAD_RECORD or UNKNOWN_COMMAND if the record cannot be read."""


cdef list _decode(list message, Py_ssize_t at, _Read read, _Reader reader, max_body, max_frames):
    """Return the result of `read` for each record."""
    cdef list commands = []
    cdef const uint8_t *p
    cdef const uint8_t *last
    cdef uint32_t size
    reader.message = message
    reader.attachment = at + 3
    reader.aligned = True
    reader.max_body = max_body
    reader.max_frames = max_frames
    if at + 2 >= PyList_GET_SIZE(message):
        return commands
    PyObject_GetBuffer(message[at + 2], &reader.view, PyBUF_SIMPLE)
    p = <const uint8_t *> reader.view.buf
    last = p + reader.view.len
    while p < last:
        if last - p < HEAD:
            commands.append(reader.invalid(BAD_RECORD, False))
            return commands
        size = get32(p)
        reader.command = p[4]
        reader.id = get64(p + 5)
        if size < HEAD - 4 or size > last - p - 4 or PyList_GET_SIZE(commands) == MAX_RECORDS:
            commands.append(reader.invalid(BAD_RECORD, True))
            return commands
        reader.at = p + HEAD
        p += 4 + size
        reader.end = p
        command = read(reader)
        if command is BAD_RECORD or command is UNKNOWN_COMMAND:
            reader.aligned = False  # the number of its attachments is unknown
            command = reader.invalid(command, True)
        commands.append(command)
    if reader.aligned and reader.attachment < PyList_GET_SIZE(message):
        commands.append(reader.invalid(TOO_MANY_FRAMES, False))
    return commands


def from_client(list message not None, Py_ssize_t at, tuple route not None, max_body, max_frames):
    cdef _Reader reader = _Reader.__new__(_Reader)
    reader.route = route
    reader.answerable = True
    return _decode(message, at, _from_client, reader, max_body, max_frames)


cdef object _from_client(_Reader reader):
    cdef uint32_t ttl
    cdef Py_ssize_t named, told
    cdef const uint8_t *name
    cdef const uint8_t *raw
    cdef bytes service
    if reader.command == CLIENT_CANCEL:
        return _Cancel(reader.route, CX1, reader.id) if reader.at == reader.end else BAD_RECORD
    if reader.command == CLIENT_LIMITS:
        return _Limits(reader.route, CX1) if reader.at == reader.end else BAD_RECORD
    if reader.command != CLIENT_REQUEST:
        return UNKNOWN_COMMAND
    if not reader.has(5):
        return BAD_RECORD
    ttl = get32(reader.take(4))
    named = reader.take(1)[0]
    if not reader.has(named + 2):
        return BAD_RECORD
    name = reader.take(named)
    told = get16(reader.take(2))
    if not reader.has(told):
        return BAD_RECORD
    raw = reader.take(told)
    if not reader.read_body():
        return BAD_RECORD
    service = _service(name, named)
    if service is None:
        return _Invalid(BAD_SERVICE, reader.route, reader.id)
    if reader.over_limit is not None:
        return _Invalid(reader.over_limit, reader.route, reader.id, True)
    if not reader.body:
        return _Invalid(NO_BODY, reader.route, reader.id)
    options = _options(raw, told)
    if options is None:
        return _Invalid(BAD_OPTIONS, reader.route, reader.id)
    if named >= 4 and service.startswith(MMI):  # the broker itself reads this body
        reader.body = _without_shared(reader.body)
    return _Request(reader.route, CX1, service, reader.body, options, reader.id, ttl / 1000.0 if ttl else None)


def from_worker(list message not None, Py_ssize_t at, tuple route not None, max_body, max_frames):
    cdef _Reader reader = _Reader.__new__(_Reader)
    reader.route = route
    return _decode(message, at, _from_worker, reader, max_body, max_frames)


cdef object _from_worker(_Reader reader):
    cdef uint8_t command = reader.command
    cdef uint16_t code
    cdef Py_ssize_t size
    cdef const uint8_t *p
    cdef uint32_t credit
    cdef bytes text
    cdef bint final
    if command == WORKER_FINAL or command == WORKER_PARTIAL:
        final = command == WORKER_FINAL
        if not reader.read_body():
            return BAD_RECORD
        if reader.over_limit is not None:
            kind = KIND_FINAL if final else KIND_PARTIAL
            return _Oversized(reader.route, WX1, reader.over_limit, kind, reader.id)
        if not reader.body:
            return _Invalid(NO_BODY)
        return _Reply(reader.route, WX1, final, reader.id, reader.body)
    if command == WORKER_ERROR:
        if not reader.has(4):
            return BAD_RECORD
        code = get16(reader.take(2))
        size = get16(reader.take(2))
        if not reader.has(size):
            return BAD_RECORD
        p = reader.take(size)
        if not reader.read_body():
            return BAD_RECORD
        if reader.over_limit is not None:
            return _Oversized(reader.route, WX1, reader.over_limit, KIND_ERROR, reader.id)
        if code > 999:
            return _Invalid(BAD_CODE)
        if PyList_GET_SIZE(reader.body) > 1:
            return _Invalid(TOO_MANY_FRAMES)
        text = PyBytes_FromStringAndSize(<const char *> p, size)
        return _Error(reader.route, WX1, reader.id, code, text, reader.body)
    if command == WORKER_READY:
        if not reader.has(5):
            return BAD_RECORD
        credit = get32(reader.take(4))
        size = reader.take(1)[0]
        if not reader.has(size + 2):
            return BAD_RECORD
        p = reader.take(size)
        service = PyBytes_FromStringAndSize(<const char *> p, size)
        size = get16(reader.take(2))
        if not reader.has(size):
            return BAD_RECORD
        p = reader.take(size)
        if reader.at != reader.end:
            return BAD_RECORD
        return _ready_with(reader.route, service, PyBytes_FromStringAndSize(<const char *> p, size), credit)
    if command == WORKER_CREDIT:
        if reader.end - reader.at != 4:
            return BAD_RECORD
        return _Credit(reader.route, WX1, get32(reader.at))
    if command == WORKER_RELEASE:
        return _Release(reader.route, WX1, reader.id) if reader.at == reader.end else BAD_RECORD
    if command == WORKER_DISCONNECT:
        return reader.disconnect(WX1)
    return UNKNOWN_COMMAND


def to_client(list message not None, Py_ssize_t at):
    return _decode(message, at, _to_client, _Reader.__new__(_Reader), NO_LIMIT, NO_LIMIT)


cdef object _to_client(_Reader reader):
    cdef uint16_t code
    cdef Py_ssize_t size
    cdef const uint8_t *p
    cdef bint final = reader.command == CLIENT_FINAL
    if final or reader.command == CLIENT_PARTIAL:
        if not reader.read_body():
            return BAD_RECORD
        if not reader.body:
            return _Invalid(NO_BODY)
        return _Reply(NO_ROUTE, CX1, final, reader.id, reader.body)
    if reader.command == CLIENT_DISCONNECT:
        return reader.disconnect(CX1)
    if reader.command == CLIENT_LIMITS:
        if reader.end - reader.at != 12:
            return BAD_RECORD
        return _Limits(NO_ROUTE, CX1, get64(reader.at), get32(reader.at + 8))
    if reader.command != CLIENT_ERROR:
        return UNKNOWN_COMMAND
    if not reader.has(4):
        return BAD_RECORD
    code = get16(reader.take(2))
    size = get16(reader.take(2))
    if not reader.has(size):
        return BAD_RECORD
    p = reader.take(size)
    if not reader.read_body():
        return BAD_RECORD
    if code > 999:
        return _Invalid(BAD_CODE)
    if PyList_GET_SIZE(reader.body) > 1:
        return _Invalid(TOO_MANY_FRAMES)
    text = PyBytes_FromStringAndSize(<const char *> p, size)
    return _Error(NO_ROUTE, CX1, reader.id, code, text, reader.body)


def to_worker(list message not None, Py_ssize_t at):
    return _decode(message, at, _to_worker, _Reader.__new__(_Reader), NO_LIMIT, NO_LIMIT)


cdef object _to_worker(_Reader reader):
    cdef uint32_t ttl
    cdef uint8_t attempt
    cdef Py_ssize_t told
    cdef const uint8_t *raw
    if reader.command == WORKER_CANCEL:
        return _Cancel(NO_ROUTE, WX1, reader.id) if reader.at == reader.end else BAD_RECORD
    if reader.command == WORKER_DISCONNECT:
        return reader.disconnect(WX1)
    if reader.command != WORKER_REQUEST:
        return UNKNOWN_COMMAND
    if not reader.has(7):
        return BAD_RECORD
    ttl = get32(reader.take(4))
    attempt = reader.take(1)[0]
    told = get16(reader.take(2))
    if not reader.has(told):
        return BAD_RECORD
    raw = reader.take(told)
    if not reader.read_body():
        return BAD_RECORD
    options = _options(raw, told)
    if options is None:
        return _Invalid(BAD_OPTIONS)
    if not reader.body:
        return _Invalid(NO_BODY)
    seconds = ttl / 1000.0 if ttl else None
    return _Request(NO_ROUTE, WX1, EMPTY, reader.body, options, reader.id, seconds, attempt)
