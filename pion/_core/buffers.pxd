# The C interface may change in a minor release.
from libc.stddef cimport size_t


cdef class PooledBuffer:
    cdef void *address
    cdef readonly Py_ssize_t size
    cdef size_t room
    cdef BufferPool pool


cdef class BufferPool:
    cdef void *addresses[16]
    cdef size_t rooms[16]
    cdef int count
    cdef size_t max_idle
    cdef void give(self, void *address, size_t room) noexcept
