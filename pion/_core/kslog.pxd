"""Snapshots of the keyspace."""

from libc.stdint cimport uint64_t

from pion._core.keyspace cimport Keyspace, kent, klog


cdef class Snapshot:
    cdef readonly Keyspace keyspace
    cdef object codec
    cdef klog out
    cdef int db
    cdef uint64_t cursor
    cdef uint64_t pointed
    cdef bint blobs
    cdef bint renew
    cdef list large
    cdef int record(self, kent *e) except -1
