# cython: language_level=3, boundscheck=False, wraparound=False
"""`receive` and `send`, calling the libzmq that pyzmq has loaded (see `multipart`).

This module is not linked with libzmq.  `dlsym` finds its functions through pyzmq's extension module, so both use the
same library, whether it came with pyzmq's wheel or with the system.  The GIL is kept: nothing here blocks, and while it
is held no other thread can close the socket.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport Py_TYPE, descrgetfunc
from libc.errno cimport EAGAIN, EHOSTUNREACH, EINTR, ENOTSOCK

import zmq
from zmq.backend import Socket as _Backend
from zmq.backend.cython import _zmq

from .multipart_python import ZERO_COPY_BYTES as _ZERO_COPY_BYTES
from ..wire import SHARED as _SHARED


cdef extern from "dlfcn.h" nogil:
    void *dlopen(const char *path, int mode)
    void *dlsym(void *library, const char *name)
    int RTLD_LAZY
    int RTLD_NOLOAD


cdef extern from *:
    """
    /* zmq_msg_t of zmq.h: 64 bytes, aligned as a pointer.  Its size has been part of the ABI since libzmq 4.1. */
    typedef union { unsigned char bytes[64]; void *aligned; } zmdp_msg_t;
    """
    ctypedef struct zmdp_msg_t:
        pass


ctypedef int (*_Unary)(zmdp_msg_t *) noexcept nogil
ctypedef int (*_Get)(const zmdp_msg_t *, int) noexcept nogil
ctypedef int (*_Binary)(zmdp_msg_t *, zmdp_msg_t *) noexcept nogil
ctypedef int (*_Transfer)(zmdp_msg_t *, void *, int) noexcept nogil
ctypedef int (*_Send)(void *, const void *, size_t, int) noexcept nogil
ctypedef void *(*_Data)(zmdp_msg_t *) noexcept nogil
ctypedef size_t (*_Size)(zmdp_msg_t *) noexcept nogil
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
cdef _Errno zmq_errno = <_Errno> _symbol(b"zmq_errno")

cdef int DONTWAIT = zmq.DONTWAIT
cdef int SNDMORE = zmq.SNDMORE
cdef int SRCFD = zmq.SRCFD
cdef int ETERM = zmq.ETERM
cdef Py_ssize_t ZERO_COPY_BYTES = _ZERO_COPY_BYTES
cdef Py_ssize_t SHARED = _SHARED


cdef class _Frame:
    """The owner of a large frame's buffer, which libzmq counts references to."""

    cdef zmdp_msg_t msg

    def __cinit__(self):
        msg_init(&self.msg)

    def __dealloc__(self):
        msg_close(&self.msg)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, msg_data(&self.msg), msg_size(&self.msg), 1, flags)


cdef object _underlying = _Backend.underlying
cdef descrgetfunc _get = Py_TYPE(_underlying).tp_descr_get
if _get == NULL:
    raise ImportError("this version of pyzmq does not expose the address of its sockets in the known way")


cdef void *_address(socket) except NULL:
    """Return `socket.underlying` without an attribute lookup, which takes longer than sending a frame."""
    cdef size_t address = _get(_underlying, socket, _Backend)
    if address == 0:
        raise zmq.ZMQError(ENOTSOCK)
    return <void *> address


cdef int _failed(int errno) except -1:
    """Raise the exception for `errno`; after an interrupted call, run signal handlers and return, to try again."""
    if errno == EINTR:
        PyErr_CheckSignals()
        return 0
    raise zmq.ContextTerminated(errno) if errno == ETERM else zmq.ZMQError(errno)


def receive(socket, bint share=False, sources=None):
    """Return the next message that has arrived on `socket`, or None."""
    cdef void *address = _address(socket)
    cdef zmdp_msg_t msg
    cdef list message = []
    cdef Py_ssize_t size
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
            if sources is not None and len(message) == 1:
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


def send(socket, list message):
    """Send all of `message` or nothing.  Return 0, EAGAIN or EHOSTUNREACH."""
    cdef void *address = _address(socket)
    cdef Py_ssize_t at = 0, last = len(message) - 1
    cdef int flags, sent, errno
    while at <= last:
        frame = message[at]
        flags = DONTWAIT | SNDMORE if at < last else DONTWAIT
        if type(frame) is bytes and PyBytes_GET_SIZE(<bytes> frame) < ZERO_COPY_BYTES:
            sent = _send_bytes(address, <bytes> frame, flags)
        elif type(frame) is memoryview and type(frame.obj) is _Frame and len(frame) == len(memoryview(frame.obj)):
            sent = _send_shared(address, <_Frame> frame.obj, flags)
        else:
            # pyzmq keeps the Python object alive until an I/O thread has sent it.
            try:
                _Backend.send(socket, frame, flags, len(frame) < ZERO_COPY_BYTES)
                sent = 0
            except zmq.ZMQError as error:
                if error.errno == EAGAIN or error.errno == EHOSTUNREACH:
                    return error.errno
                raise
        if sent < 0:
            errno = zmq_errno()
            if errno == EAGAIN or errno == EHOSTUNREACH:
                return errno
            _failed(errno)
            address = _address(socket)
            continue
        at += 1
    return 0
