# The C interface of the tree of prefixes. It may change in a minor release.
from libc.stdint cimport uint32_t, uint64_t


cdef extern from "prefixtree.h" nogil:
    ctypedef struct pt_tree:
        uint32_t used
        uint32_t room
        uint32_t bits
        uint32_t count
        uint32_t prefix_room
    ctypedef struct pt_found:
        uint32_t prefix
        uint32_t matched
    int pt_init(pt_tree *t, uint64_t key)
    void pt_free(pt_tree *t)
    int pt_add(pt_tree *t, uint32_t prefix, const char *hashes, size_t n)
    void pt_remove(pt_tree *t, uint32_t prefix)
    size_t pt_match(const pt_tree *t, const char *hashes, size_t n, pt_found *out, size_t most, size_t steps)


cdef class PrefixTree:
    cdef pt_tree tree
