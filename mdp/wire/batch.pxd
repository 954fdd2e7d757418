"""The C types with which Cython compiles `batch.py`: of its constants, attributes and methods, and of local variables
for which it would choose others."""

cimport cython
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from . cimport buffers

# What `batch.py` imports or assigns.
cdef uint32_t ATTACHED
cdef Py_ssize_t MAX_ATTACHED_BYTES, MAX_ATTACHMENTS, MAX_BODY_FRAMES, MAX_RECORDS, MAX_RECORDS_BYTES, SHARED
cdef Py_ssize_t FIRST_BUFFER_BYTES, HEAD_BYTES, KEPT_BUFFER_BYTES, NO_LIMIT, SIZE_BYTES
cdef uint8_t CLIENT_CANCEL, CLIENT_DISCONNECT, CLIENT_ERROR, CLIENT_FINAL, CLIENT_PARTIAL, CLIENT_REQUEST
cdef uint8_t CLIENT_LIMITS
cdef uint8_t WORKER_CANCEL, WORKER_CREDIT, WORKER_DISCONNECT, WORKER_ERROR, WORKER_FINAL, WORKER_PARTIAL
cdef uint8_t WORKER_READY, WORKER_RELEASE, WORKER_REQUEST
cdef object NO_OPTIONS, Reply, Request  # of the classes, those that are created for every request
cdef bytes CX1, WX1, MMI


@cython.final
cdef class Batch:
    cdef list _head, _closed, _attachments
    cdef bytearray _buffer
    cdef uint8_t *_data
    cdef Py_ssize_t _size, _records, _attached

    cpdef request_to_broker(self, uint64_t number, uint32_t ttl, bytes service, bytes options, body)
    cpdef request_to_worker(self, uint64_t address, uint32_t ttl, unsigned long attempt, bytes options, body)
    cpdef reply(self, uint8_t command, uint64_t id, body)
    cpdef error(
        self, uint8_t command, uint64_t id, uint16_t code, bytes text, detail, bytes reason=*, unsigned long lost=*
    )
    cpdef signal(self, uint8_t command, uint64_t id)
    cpdef ready(self, uint32_t credit, bytes service, bytes options)
    cpdef credit(self, uint32_t credit)
    cdef Py_ssize_t _begin(self, uint8_t command, uint64_t id, Py_ssize_t more) except -1
    @cython.locals(length=Py_ssize_t)
    cdef int _grow(self, Py_ssize_t end) except -1
    cdef Py_ssize_t _put_service(self, Py_ssize_t at, uint32_t number, bytes service, bytes options) except -1
    cdef Py_ssize_t _put_text(self, Py_ssize_t at, bytes text) except -1
    @cython.locals(end=Py_ssize_t, size=Py_ssize_t, attached=Py_ssize_t, small=bytes)
    cdef int _add_body(self, Py_ssize_t at, body) except -1
    cdef int _complete(self, Py_ssize_t end, list attachments, Py_ssize_t attached) except -1
    cdef int _close(self) except -1


cdef class _Records:
    cdef bytes records
    cdef const uint8_t *data
    cdef list message, body
    cdef Py_ssize_t attachment, at, end, max_body, max_frames
    cdef bint aligned
    cdef uint8_t command
    cdef uint64_t id
    cdef tuple route
    cdef object over_limit, options
    cdef bytes service, raw

    cdef object read(self)
    cdef object invalid(self, reason)
    @cython.final
    @cython.locals(begin=Py_ssize_t, length=Py_ssize_t)
    cdef list decode(self)
    @cython.final
    cdef inline Py_ssize_t skip(self, Py_ssize_t count) except -1
    @cython.final
    cdef inline bytes take(self, Py_ssize_t count)
    @cython.final
    cdef bytes text(self)
    @cython.final
    cdef inline int read_end(self) except -1
    @cython.final
    @cython.locals(total=Py_ssize_t, count=Py_ssize_t)
    cdef int read_body(self) except -1
    @cython.final
    cdef object read_options(self, bytes raw)
    @cython.final
    cdef object read_error(self, tuple route, bytes header)
    @cython.final
    cdef object read_disconnect(self, bytes header)


@cython.final
cdef class _FromClient(_Records):
    pass


@cython.final
cdef class _FromWorker(_Records):
    pass


@cython.final
cdef class _ToClient(_Records):
    pass


@cython.final
cdef class _ToWorker(_Records):
    pass


cpdef list from_client(list message, Py_ssize_t at, tuple route, Py_ssize_t max_body, Py_ssize_t max_frames)
cpdef list from_worker(list message, Py_ssize_t at, tuple route, Py_ssize_t max_body, Py_ssize_t max_frames)
cpdef list to_client(list message, Py_ssize_t at)
cpdef list to_worker(list message, Py_ssize_t at)
