# cython: language_level=3, boundscheck=False, wraparound=False
"""`receive` and `send`, calling the libzmq that pyzmq has loaded (see `multipart`).

The sockets are pyzmq's, so they must be used through the libzmq that pyzmq has loaded, and at build time it is not known
which that will be: a wheel of pyzmq contains its own, in a file with a hash in its name, while other builds use the
system's.  So this module is not linked with libzmq.  `dlsym` finds libzmq's functions among the libraries that pyzmq's
extension module depends on.

Only the public interface of libzmq is used.  Its declarations are repeated from `zmq.h`, which wheels of pyzmq do not
contain.  `zmq_msg_t` is one of them: callers allocate it, so its size is part of the interface.  Nothing here reads what
is in it.

pyzmq has Cython declarations of its own (`zmq.backend.cython`).  They need `zmq.h`, and they declare how
pyzmq's classes lie in memory, which any version of pyzmq may change; this module is compiled once, and runs with all.
What it uses of pyzmq is a public property: `Socket.underlying`, the address of a socket.

The GIL is kept: nothing here blocks, and while it is held no other thread can close the socket.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from libc cimport errno as libc_errno
from libc.errno cimport EAGAIN, EHOSTUNREACH, EINTR, ENOTSOCK
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

import zmq
from zmq.backend import Socket as _Backend
from zmq.backend.cython import _zmq

from .multipart_python import COUNTED_BYTES as _COUNTED_BYTES
from .multipart_python import FRAME_COST as _FRAME_COST
from .multipart_python import MESSAGE_COST as _MESSAGE_COST
from .multipart_python import SETTLE_PEERS as _SETTLE_PEERS
from .multipart_python import ZERO_COPY_BYTES as _ZERO_COPY_BYTES
from ..wire import SHARED as _SHARED


cdef extern from "dlfcn.h" nogil:
    void *dlopen(const char *path, int mode)
    void *dlsym(void *library, const char *name)
    int RTLD_LAZY
    int RTLD_NOLOAD


cdef extern from *:
    """
    /* zmq_msg_t of zmq.h, since libzmq 4.1: 64 bytes, aligned as a pointer. */
    typedef union { unsigned char bytes[64]; void *aligned; } zmdp_msg_t;

    /* How many of the bytes sent to a peer libzmq has released; it outlives the peer. */
    typedef struct { long long bytes; long references; } zmdp_released_t;

    /* What libzmq passes to the function that releases a frame. */
    typedef struct { zmdp_released_t *released; long long bytes; zmdp_msg_t shared; } zmdp_report_t;

    #define zmdp_add(number, more) __atomic_add_fetch(number, more, __ATOMIC_ACQ_REL)
    #define zmdp_load(number) __atomic_load_n(number, __ATOMIC_ACQUIRE)
    """
    ctypedef struct zmdp_msg_t:
        pass

    ctypedef struct zmdp_released_t:
        long long bytes
        long references

    ctypedef struct zmdp_report_t:
        zmdp_released_t *released
        long long bytes
        zmdp_msg_t shared

    long long zmdp_add(void *number, long long more) noexcept nogil
    long long zmdp_load(void *number) noexcept nogil


ctypedef int (*_Unary)(zmdp_msg_t *) noexcept nogil
ctypedef int (*_Get)(const zmdp_msg_t *, int) noexcept nogil
ctypedef int (*_Binary)(zmdp_msg_t *, zmdp_msg_t *) noexcept nogil
ctypedef int (*_Transfer)(zmdp_msg_t *, void *, int) noexcept nogil
ctypedef int (*_Send)(void *, const void *, size_t, int) noexcept nogil
ctypedef void *(*_Data)(zmdp_msg_t *) noexcept nogil
ctypedef size_t (*_Size)(zmdp_msg_t *) noexcept nogil
ctypedef const char *(*_Property)(const zmdp_msg_t *, const char *) noexcept nogil
ctypedef void (*_Release)(void *, void *) noexcept nogil
ctypedef int (*_Wrap)(zmdp_msg_t *, void *, size_t, _Release, void *) noexcept nogil
ctypedef int (*_Errno)() noexcept nogil

cdef void *_library = dlopen(_zmq.__file__.encode(), RTLD_LAZY | RTLD_NOLOAD)


cdef void *_symbol(const char *name) except NULL:
    found = dlsym(_library, name) if _library != NULL else NULL
    if found == NULL:
        raise ImportError(f"cannot find {name.decode()} through {_zmq.__file__}")
    return found


cdef _Unary msg_init = <_Unary> _symbol(b"zmq_msg_init")
cdef _Unary msg_close = <_Unary> _symbol(b"zmq_msg_close")
cdef _Get msg_get = <_Get> _symbol(b"zmq_msg_get")
cdef _Unary msg_more = <_Unary> _symbol(b"zmq_msg_more")
cdef _Binary msg_copy = <_Binary> _symbol(b"zmq_msg_copy")
cdef _Binary msg_move = <_Binary> _symbol(b"zmq_msg_move")
cdef _Transfer msg_send = <_Transfer> _symbol(b"zmq_msg_send")
cdef _Transfer msg_recv = <_Transfer> _symbol(b"zmq_msg_recv")
cdef _Data msg_data = <_Data> _symbol(b"zmq_msg_data")
cdef _Size msg_size = <_Size> _symbol(b"zmq_msg_size")
cdef _Send buffer_send = <_Send> _symbol(b"zmq_send")
cdef _Property msg_gets = <_Property> _symbol(b"zmq_msg_gets")
cdef _Wrap msg_init_data = <_Wrap> _symbol(b"zmq_msg_init_data")
cdef _Errno zmq_errno = <_Errno> _symbol(b"zmq_errno")

cdef int DONTWAIT = zmq.DONTWAIT
cdef int SNDMORE = zmq.SNDMORE
cdef int SRCFD = zmq.SRCFD
cdef int ETERM = zmq.ETERM
cdef Py_ssize_t ZERO_COPY_BYTES = _ZERO_COPY_BYTES
cdef Py_ssize_t SHARED = _SHARED
cdef long long COUNTED_BYTES = _COUNTED_BYTES
cdef long long FRAME_COST = _FRAME_COST
cdef long long MESSAGE_COST = _MESSAGE_COST
cdef Py_ssize_t SETTLE_PEERS = _SETTLE_PEERS


cdef class _Frame:
    """The owner of a large frame's buffer, which libzmq counts references to."""

    cdef zmdp_msg_t msg

    def __cinit__(self):
        msg_init(&self.msg)

    def __dealloc__(self):
        msg_close(&self.msg)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, msg_data(&self.msg), msg_size(&self.msg), 1, flags)


cdef void *_address(socket) except NULL:
    """Return the address of a socket that is open."""
    cdef size_t address = socket.underlying
    if address == 0:
        raise zmq.ZMQError(ENOTSOCK)
    return <void *> address


cdef int _failed(int errno) except -1:
    """Raise the exception for `errno`; after an interrupted call, run signal handlers and return, to try again."""
    if errno == EINTR:
        PyErr_CheckSignals()
        return 0
    raise zmq.ContextTerminated(errno) if errno == ETERM else zmq.ZMQError(errno)


cdef bytes _user(const zmdp_msg_t *msg):
    """Return the user id that ZAP gave the connection that `msg` arrived on; empty if there is none."""
    cdef const char *user = msg_gets(msg, b"User-Id")
    return b"" if user == NULL else <bytes> user


def receive(socket, bint share=False, sources=None):
    """Return the next message that has arrived on `socket`, or None."""
    cdef void *address = _address(socket)
    cdef zmdp_msg_t msg
    cdef list message = []
    cdef Py_ssize_t size, count = 0, max_frames = 0
    cdef int errno, more
    cdef _Frame frame
    cdef bint unknown = False
    msg_init(&msg)
    try:
        while True:
            if msg_recv(&msg, address, DONTWAIT) < 0:
                errno = zmq_errno()
                if errno == EAGAIN:
                    return None
                _failed(errno)
                address = _address(socket)  # a signal handler may have closed it
                continue
            more = msg_more(&msg)
            if count > max_frames and sources is not None:
                if count == max_frames + 1:
                    count += 1
                    sources.offender(msg_get(&msg, SRCFD))
                if more:
                    continue
                return message
            size = msg_size(&msg)
            if unknown:  # the second frame's: the ROUTER itself added the first
                sources.add(message[0], msg_get(&msg, SRCFD))
                unknown = False
            if share and size >= SHARED:
                frame = _Frame.__new__(_Frame)
                msg_move(&frame.msg, &msg)
                message.append(memoryview(frame))
            else:
                message.append(PyBytes_FromStringAndSize(<char *> msg_data(&msg), size))
            count += 1
            if sources is not None and count == 1:
                max_frames = sources.max_frames
                if sources.secured:
                    sources.user = _user(&msg)
                unknown = message[0] not in sources.known
            if not more:
                return message
    finally:
        msg_close(&msg)


cdef int _send_bytes(void *address, bytes frame, int flags) noexcept:
    return buffer_send(address, PyBytes_AS_STRING(frame), PyBytes_GET_SIZE(frame), flags)


cdef int _send_shared(void *address, _Frame frame, int flags) noexcept:
    cdef zmdp_msg_t msg
    msg_init(&msg)
    msg_copy(&msg, &frame.msg)
    cdef int sent = msg_send(&msg, address, flags)
    if sent < 0:
        msg_close(&msg)
    return sent


cdef class _Peer:
    """What libzmq holds for one peer."""

    cdef zmdp_released_t *released
    cdef long long counted, uncounted, largest, waiting

    def __cinit__(self):
        self.released = <zmdp_released_t *> malloc(sizeof(zmdp_released_t))
        if self.released == NULL:
            raise MemoryError
        self.released.bytes = 0
        self.released.references = 1

    def __dealloc__(self):
        if self.released != NULL:
            _unreference(self.released)

    cdef long long held(self) noexcept:
        return self.counted - zmdp_load(&self.released.bytes)

    cdef long long settle(self) noexcept:
        """Subtract what has been sent; return the change of `waiting`."""
        cdef long long before = self.waiting
        self.waiting = max(0, self.held() - self.largest)
        return self.waiting - before


cdef void _unreference(zmdp_released_t *released) noexcept nogil:
    if zmdp_add(&released.references, -1) == 0:
        free(released)


cdef void _release(void *data, void *hint) noexcept nogil:
    """Note that libzmq has released a frame, and thereby those before it.  Called in libzmq's thread."""
    cdef zmdp_report_t *report = <zmdp_report_t *> hint
    msg_close(&report.shared)
    zmdp_add(&report.released.bytes, report.bytes)
    _unreference(report.released)
    free(report)


cdef class Unsent:
    """What libzmq holds of the messages that `send` gave it, per peer of a ROUTER (see `multipart_python`)."""

    cdef readonly long long bytes
    cdef dict _peers
    cdef Py_ssize_t _settle_at

    def __init__(self):
        self._peers = {}
        self._settle_at = SETTLE_PEERS

    def settle(self):
        cdef _Peer peer
        for identity, peer in list(self._peers.items()):
            self.bytes += peer.settle()
            if peer.held() == 0:
                del self._peers[identity]
        self._settle_at = 2 * len(self._peers) + SETTLE_PEERS

    def waiting(self):
        cdef _Peer peer
        return {identity: peer.waiting for identity, peer in self._peers.items() if peer.waiting}

    def forget(self, identity):
        cdef _Peer peer = self._peers.pop(identity, None)
        if peer is not None:
            self.bytes -= peer.waiting

    cdef _Peer peer(self, identity):
        cdef _Peer peer = self._peers.get(identity)
        if peer is None:
            if len(self._peers) >= self._settle_at:
                self.settle()
            peer = self._peers[identity] = _Peer.__new__(_Peer)
        return peer


cdef inline Py_ssize_t _size(frame) except -1:
    return PyBytes_GET_SIZE(<bytes> frame) if type(frame) is bytes else len(frame)


cdef long long _cost(list message) except -1:
    cdef long long cost = MESSAGE_COST + FRAME_COST * len(message)
    for frame in message:
        cost += _size(frame)
    return cost


def cost_of(list message not None):
    """Return the memory in bytes that `message` takes while it waits, in libzmq or here."""
    return _cost(message)


cdef int _send_counted(void *address, frame, int flags, Unsent unsent, _Peer peer) except -2:
    """Send the last frame of a message, which reports when libzmq has sent it."""
    cdef zmdp_msg_t msg
    cdef zmdp_report_t *report = _report(frame)
    cdef void *data = <void *> (report + 1)
    cdef long long held = peer.held()
    if msg_size(&report.shared):
        data = msg_data(&report.shared)
    report.released = peer.released
    zmdp_add(&peer.released.references, 1)
    report.bytes = peer.uncounted
    peer.uncounted = 0
    peer.counted += report.bytes
    peer.largest = max(peer.largest, report.bytes) if held else report.bytes
    unsent.bytes += peer.settle()
    msg_init_data(&msg, data, _size(frame), _release, report)
    cdef int sent = msg_send(&msg, address, flags), errno
    if sent < 0:
        errno = zmq_errno()
        msg_close(&msg)
        libc_errno.errno = errno
    return sent


cdef zmdp_report_t *_report(frame) except NULL:
    """Return a report that holds the content of `frame`: a reference if it was shared by `receive`, otherwise a copy
    that follows it."""
    cdef bint shared = _is_shared(frame)
    cdef Py_buffer view
    PyObject_GetBuffer(frame, &view, PyBUF_SIMPLE)
    cdef zmdp_report_t *report = <zmdp_report_t *> malloc(sizeof(zmdp_report_t) + (0 if shared else view.len))
    if report != NULL:
        msg_init(&report.shared)
        if shared:
            msg_copy(&report.shared, &(<_Frame> frame.obj).msg)
        else:
            memcpy(report + 1, view.buf, view.len)
    PyBuffer_Release(&view)
    if report == NULL:
        raise MemoryError
    return report


cdef bint _is_shared(frame) except -1:
    return type(frame) is memoryview and type(frame.obj) is _Frame and len(frame) == len(memoryview(frame.obj))


def send(socket, list message, Unsent unsent=None):
    """Send all of `message` or nothing.  Return 0, EAGAIN or EHOSTUNREACH."""
    cdef void *address = _address(socket)
    cdef Py_ssize_t at = 0, last = len(message) - 1
    cdef int flags, sent, errno
    cdef _Peer peer = None
    cdef long long cost = 0
    if unsent is not None:
        peer = unsent.peer(message[0])
        cost = _cost(message)
        peer.uncounted += cost
    while at <= last:
        frame = message[at]
        flags = DONTWAIT | SNDMORE if at < last else DONTWAIT
        if at == last and peer is not None and peer.uncounted >= COUNTED_BYTES:
            sent = _send_counted(address, frame, flags, unsent, peer)
        elif type(frame) is bytes and PyBytes_GET_SIZE(<bytes> frame) < ZERO_COPY_BYTES:
            sent = _send_bytes(address, <bytes> frame, flags)
        elif _is_shared(frame):
            sent = _send_shared(address, <_Frame> frame.obj, flags)
        else:
            # pyzmq keeps the Python object alive until an I/O thread has sent it.
            try:
                _Backend.send(socket, frame, flags, len(frame) < ZERO_COPY_BYTES)
                sent = 0
            except zmq.ZMQError as error:
                if error.errno == EAGAIN or error.errno == EHOSTUNREACH:
                    return _not_sent(error.errno, peer, cost)
                raise
        if sent < 0:
            errno = zmq_errno()
            if errno == EAGAIN or errno == EHOSTUNREACH:
                return _not_sent(errno, peer, cost)
            _failed(errno)
            address = _address(socket)
            continue
        at += 1
    return 0


cdef int _not_sent(int errno, _Peer peer, long long cost):
    """Return `errno` for a message that was not sent and so does not count."""
    if peer is not None:
        peer.uncounted = max(0, peer.uncounted - cost)
    return errno
