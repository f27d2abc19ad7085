"""Replay of the keyspace log."""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from pion._core.framing cimport fr_log
from pion._core.keyspace cimport Keyspace, kent


cdef class _Window:
    cdef uint8_t *data
    cdef size_t room
    cdef size_t n
    cdef uint64_t offset
    cdef uint64_t end
    cdef int fd
    cdef const uint8_t *at(self, uint64_t offset, size_t *n, size_t want) except NULL
    cdef int decode(self, uint64_t offset, uint32_t seed, fr_log *r) except -1


cdef class Loader:
    cdef readonly Keyspace keyspace
    cdef object codec
    cdef int blob_fd
    cdef readonly set ghosts
    cdef set objects
    cdef readonly dict damaged
    cdef readonly dict lost_files
    cdef kent *entry(self, int db, const char *key, uint32_t klen)
    cdef bint whole(self, _Window window, uint64_t offset, uint64_t nbytes, uint32_t seed) except -1
    cdef int apply_one(self, fr_log *r) except -1
    cdef int materialize(self, int db, bytes key, kent *e) except -1
    cdef int write(self, int db, const char *key, uint32_t klen, const char *value, uint32_t vlen) except -1
    cdef int items(self, int kind, int db, bytes key, bytes payload) except -1
