/* Disk blocks asked for before they are written. */
#ifndef PION_RESERVE_H
#define PION_RESERVE_H

#include <fcntl.h>
#include <stdint.h>

/* Reserve the blocks of [offset, offset + n) without changing the file's length: fewer allocations while a large body
 * streams in. It may wait for the file system's journal, so threads that serve nobody else call it. A file system that
 * cannot is fine; a full disk is found by the write itself, which truncates back. */
static inline void reserve_blocks(int fd, uint64_t offset, uint64_t n) {
#if defined(__linux__)
    (void)!fallocate(fd, FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)n);
#elif defined(__APPLE__)
    fstore_t want = {F_ALLOCATECONTIG | F_ALLOCATEALL, F_PEOFPOSMODE, 0, (off_t)n, 0};
    (void)offset;
    if (fcntl(fd, F_PREALLOCATE, &want) < 0) {
        want.fst_flags = F_ALLOCATEALL;
        (void)fcntl(fd, F_PREALLOCATE, &want);
    }
#else
    (void)fd, (void)offset, (void)n;
#endif
}

#endif
