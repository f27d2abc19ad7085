# cython: language_level=3, freethreading_compatible=False
"""Reused memory for large replies.

A fresh 64 MiB buffer costs three to four times its transfer in page faults. Buffers taken here are backed by huge
pages where the system has them and come back to the pool by themselves when the last view of them is gone.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stddef cimport size_t

__all__ = ["BufferPool", "PooledBuffer"]


cdef extern from *:
    """
    #include <stddef.h>
    #include <sys/mman.h>

    static void *pion_map(size_t n) {
        void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
        if (p == MAP_FAILED) return NULL;
    #ifdef MADV_HUGEPAGE
        madvise(p, n, MADV_HUGEPAGE);
    #endif
        return p;
    }
    static void pion_unmap(void *p, size_t n) { munmap(p, n); }
    """
    void *pion_map(size_t n) nogil
    void pion_unmap(void *p, size_t n) nogil

cdef size_t GRAIN = 2 << 20     # a huge page
cdef enum:
    SLOTS = 16


@cython.no_gc
cdef class PooledBuffer:
    """Writable memory of ``len()`` bytes; returns to its pool when it is collected."""

    def __dealloc__(self):
        if self.address != NULL:
            self.pool.give(self.address, self.room)

    def __len__(self):
        return self.size

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.address, self.size, False, flags)


@cython.no_gc
cdef class BufferPool:
    """Memory for large replies, reused.

    Args:
        max_idle: bytes kept while nobody uses them.
    """

    def __cinit__(self, size_t max_idle=512 << 20):
        self.max_idle = max_idle

    def __dealloc__(self):
        for i in range(self.count):
            pion_unmap(self.addresses[i], self.rooms[i])

    @property
    def idle(self):
        """Bytes kept and not in use."""
        cdef size_t total = 0
        for i in range(self.count):
            total += self.rooms[i]
        return total

    def take(self, Py_ssize_t size):
        """A buffer of exactly `size` bytes; its content is whatever was there before.

        Raises:
            MemoryError: the system has none.
        """
        cdef PooledBuffer out = PooledBuffer.__new__(PooledBuffer)
        cdef size_t room
        cdef int i, best = -1
        if size < 0:
            raise ValueError("a buffer cannot have a negative size")
        room = max(<size_t>1, (<size_t>size + GRAIN - 1) // GRAIN) * GRAIN
        for i in range(self.count):
            if room <= self.rooms[i] <= 2 * room and (best < 0 or self.rooms[i] < self.rooms[best]):
                best = i
        out.pool = self
        out.size = size
        if best >= 0:
            out.address = self.addresses[best]
            out.room = self.rooms[best]
            self.count -= 1
            self.addresses[best] = self.addresses[self.count]
            self.rooms[best] = self.rooms[self.count]
            return out
        out.address = pion_map(room)
        if out.address == NULL:
            raise MemoryError(f"no memory for {size} bytes")
        out.room = room
        return out

    cdef void give(self, void *address, size_t room) noexcept:
        cdef size_t total = room
        cdef int i
        for i in range(self.count):
            total += self.rooms[i]
        if self.count == SLOTS or total > self.max_idle:
            with nogil:
                pion_unmap(address, room)
            return
        self.addresses[self.count] = address
        self.rooms[self.count] = room
        self.count += 1
