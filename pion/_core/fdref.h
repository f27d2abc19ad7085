/* What moves bytes between files and sockets shares these: a counted descriptor, and the buffers of one thread.
 *
 * fdref    the last reference closes the file on a background thread (the last close of an unlinked 4 GB file takes
 *          seconds). Its lock-free count is the only thing two threads touch at once.
 * room     of a removed file: held by all that has to end before its blocks are free, its unlink and its closes.
 * scratch  pieces are read, converted and written through buffers that stay in the L2/L3 cache.
 */
#ifndef PION_FDREF_H
#define PION_FDREF_H

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "jobs.h"

/* ---- fdref ---------------------------------------------------------------------------------------------------- */

typedef struct room {
    _Atomic int refs;
} room;

static inline room *room_new(void) {
    room *r = (room *)calloc(1, sizeof *r);
    if (r) atomic_store_explicit(&r->refs, 1, memory_order_relaxed);
    return r;
}

static inline room *room_ref(room *r) {
    if (r) atomic_fetch_add_explicit(&r->refs, 1, memory_order_relaxed);
    return r;
}

static inline void room_unref(room *r) {
    if (r && atomic_fetch_sub_explicit(&r->refs, 1, memory_order_acq_rel) == 1) free(r);
}

static inline int room_refs(room *r) { return atomic_load_explicit(&r->refs, memory_order_acquire); }

typedef struct fdref {
    job closing;     /* first member: the closer gets the fdref from its job */
    jobs *closer;    /* NULL: the last reference closes in its own thread */
    _Atomic int refs;
    _Atomic int failed; /* errno of a read that did not give what should be there */
    int fd;
    room *room;      /* of a removed file, held until it is closed; set by who has a reference, once */
} fdref;

static inline void fdref__close(job *item, void *state) {
    (void)state;
    fdref *ref = (fdref *)item;
    close(ref->fd);
    room_unref(ref->room);
    free(ref);
}

static inline fdref *fdref_new(int fd, jobs *closer) {
    fdref *ref = (fdref *)calloc(1, sizeof *ref);
    if (!ref) return NULL;
    ref->fd = fd;
    ref->closer = closer;
    ref->closing.run = fdref__close;
    atomic_store_explicit(&ref->refs, 1, memory_order_relaxed);
    return ref;
}

static inline fdref *fdref_ref(fdref *ref) {
    if (ref) atomic_fetch_add_explicit(&ref->refs, 1, memory_order_relaxed);
    return ref;
}

static inline void fdref_unref(fdref *ref) {
    if (!ref || atomic_fetch_sub_explicit(&ref->refs, 1, memory_order_acq_rel) != 1) return;
    if (ref->closer) jobs_submit(ref->closer, &ref->closing);
    else fdref__close(&ref->closing, NULL);
}

/* What became of a file that should be a regular one with at least `least` bytes and a name: 0, or FDREF_SHORT,
 * FDREF_UNLINKED, or the errno of a read that failed. */
enum { FDREF_SHORT = -1, FDREF_UNLINKED = -2 };

static inline int fdref_state(const fdref *ref, uint64_t least) {
    struct stat info;
    const int failed = atomic_load_explicit(&((fdref *)(uintptr_t)ref)->failed, memory_order_relaxed);
    if (failed) return failed;
    if (fstat(ref->fd, &info)) return errno;
    if (info.st_nlink == 0) return FDREF_UNLINKED;
    return (uint64_t)info.st_size < least ? FDREF_SHORT : 0;
}

static inline int fdref_refs(fdref *ref) { return atomic_load_explicit(&ref->refs, memory_order_acquire); }

/* ---- scratch: the buffers of one thread ------------------------------------------------------------------------- */

typedef struct scratch {
    char *in, *out;          /* stored bytes / decoded or converted bytes */
    size_t in_cap, out_cap;
    const void *key;         /* whose bytes `out` (or `in`) holds; NULL: nobody's */
    uint64_t from;           /* output position of window[0] */
    const char *window;
    size_t len;
} scratch;

static inline void scratch_free(scratch *s) {
    free(s->in);
    free(s->out);
    memset(s, 0, sizeof *s);
}

static inline int scratch_grow(char **buf, size_t *cap, size_t want) {
    if (*cap >= want) return 0;
    char *bigger = (char *)malloc(want);
    if (!bigger) return -ENOMEM;
    free(*buf);
    *buf = bigger;
    *cap = want;
    return 0;
}

#endif
