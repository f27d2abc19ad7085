# cython: language_level=3, freethreading_compatible=False, binding=True, embedsignature=True
"""Which stored prefix shares most blocks of tokens with what is asked for?

The structure is described in prefixtree.h; the readable twin is `pion.ref.prefixtree`.
"""

import os

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t
from libc.stdlib cimport free, malloc

__all__ = ["MAX_FOUND", "PrefixTree"]

MAX_FOUND = 4096

cdef enum:
    _STEPS = 65536    # nodes looked at for one answer: about a millisecond


cdef class PrefixTree:
    """Prefixes by their chained block hashes, 8 bytes each, little-endian. Not locked."""

    def __cinit__(self):
        if pt_init(&self.tree, int.from_bytes(os.urandom(8), "little")):
            raise MemoryError

    def __dealloc__(self):
        pt_free(&self.tree)

    def add(self, uint32_t prefix, hashes) -> None:
        """Put a prefix in, in the place of what had its number. One without blocks is never found.

        Args:
            prefix: a small number of the caller's choice.
            hashes: buffer of whole u64.

        Raises:
            ValueError: not whole hashes, or a number beyond 2**31.
            MemoryError: it is not there.
        """
        cdef Py_buffer view
        cdef int rc
        if prefix >> 31:
            raise ValueError("the number of a prefix is below 2**31")
        PyObject_GetBuffer(hashes, &view, PyBUF_SIMPLE)
        try:
            if view.len % 8:
                raise ValueError(f"{view.len} bytes are not whole hashes of 8")
            rc = pt_add(&self.tree, prefix, <const char *>view.buf, <size_t>view.len // 8)
        finally:
            PyBuffer_Release(&view)
        if rc:
            raise MemoryError

    def remove(self, uint32_t prefix) -> None:
        """Take a prefix out, if it is there."""
        pt_remove(&self.tree, prefix)

    def match(self, hashes, size_t most=16) -> list[tuple[int, int]]:
        """(prefix, blocks shared) of at most `most` prefixes that share blocks with these, those that share most first.

        Raises:
            ValueError: not whole hashes, or more than MAX_FOUND asked for.
        """
        cdef Py_buffer view
        cdef pt_found *found
        cdef size_t n, i
        if most > <size_t>MAX_FOUND:
            raise ValueError(f"at most {MAX_FOUND} prefixes at a time")
        PyObject_GetBuffer(hashes, &view, PyBUF_SIMPLE)
        try:
            if view.len % 8:
                raise ValueError(f"{view.len} bytes are not whole hashes of 8")
            found = <pt_found *>malloc((most or 1) * sizeof(pt_found))
            if found == NULL:
                raise MemoryError
            try:
                n = pt_match(&self.tree, <const char *>view.buf, <size_t>view.len // 8, found, most, _STEPS)
                return [(found[i].prefix, found[i].matched) for i in range(n)]
            finally:
                free(found)
        finally:
            PyBuffer_Release(&view)

    def __len__(self) -> int:
        """Different blocks held."""
        return self.tree.count

    @property
    def nbytes(self) -> int:
        """Memory of the tree."""
        return 32 * <size_t>self.tree.room + (<size_t>4 << self.tree.bits) + 12 * <size_t>self.tree.prefix_room
