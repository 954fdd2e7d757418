"""The functions of `buffers.py` in C, without checks of bounds and ranges."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy


cdef inline uint16_t get16(const uint8_t *data, Py_ssize_t at) noexcept:
    return <uint16_t> ((data[at] << 8) | data[at + 1])


cdef inline uint32_t get32(const uint8_t *data, Py_ssize_t at) noexcept:
    return (<uint32_t> get16(data, at) << 16) | get16(data, at + 2)


cdef inline uint64_t get64(const uint8_t *data, Py_ssize_t at) noexcept:
    return (<uint64_t> get32(data, at) << 32) | get32(data, at + 4)


cdef inline bytes get_bytes(const uint8_t *data, Py_ssize_t begin, Py_ssize_t end):
    return PyBytes_FromStringAndSize(<const char *> data + begin, end - begin)


cdef inline void put16(uint8_t *data, Py_ssize_t at, uint16_t value) noexcept:
    data[at] = <uint8_t> (value >> 8)
    data[at + 1] = <uint8_t> value


cdef inline void put32(uint8_t *data, Py_ssize_t at, uint32_t value) noexcept:
    put16(data, at, <uint16_t> (value >> 16))
    put16(data, at + 2, <uint16_t> value)


cdef inline void put64(uint8_t *data, Py_ssize_t at, uint64_t value) noexcept:
    put32(data, at, <uint32_t> (value >> 32))
    put32(data, at + 4, <uint32_t> value)


cdef inline void put_bytes(uint8_t *data, Py_ssize_t at, bytes value) noexcept:
    memcpy(data + at, PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))
