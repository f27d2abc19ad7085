# The C interface of the membership tables. It may change in a minor release.
from libc.stdint cimport uint8_t, uint64_t


cdef extern from "membership.h" nogil:
    enum:
        MT_MAX
    ctypedef struct mt_header:
        uint64_t slots
        uint64_t distinct
        uint64_t given
        uint64_t key
    ctypedef struct mt_view:
        mt_header head
        const char *table
        const char *sorted
    size_t mt_room(size_t n)
    size_t mt_build(const char *hashes, size_t n, uint64_t seed, char *out)
    int mt_open(const char *blob, size_t length, mt_view *view)
    int mt_probe(const char *blob, size_t length, const char *probes, size_t n, uint8_t *bitmap)
    int mt_probe_with(
        const char *blob, size_t length, const char *probes, size_t n, uint8_t *bitmap, int avx2
    )
    int mt_have_avx2()
