/* Stored rows, (rows, heads, values), to the arrays of models, (heads, capacity, values), in fresh memory and by several
 * threads.
 *
 * What costs time is the memory: its first touch, page by page, takes two to four times as long as the copy. Arrays of a
 * cache lie side by side, so the huge pages that they cover together are asked for (Linux 6.1: MADV_COLLAPSE, which also
 * works where the allocator has touched a page in between) right before their rows are copied: one thread asks while
 * another one copies. Where that is refused, small pages appear as they are touched.
 */
#ifndef PION_HEADROWS_H
#define PION_HEADROWS_H

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HEADROWS_THREADS 16
#define HEADROWS_HUGE ((size_t)2 << 20)
#define HEADROWS_BATCH ((size_t)4 << 20)  /* of arrays that a thread takes at a time */
#define HEADROWS_TILE ((size_t)128 << 10) /* of rows, read once for each head: they stay in the cache */
#define HEADROWS_GAP ((size_t)64 << 10)   /* between arrays that lie side by side: an allocator's header */

typedef struct headrows_piece {
    const uint8_t *rows;
    size_t first, count; /* where they belong, in rows */
} headrows_piece;

typedef struct headrows_array {
    uint8_t *out;
    size_t capacity;              /* rows of each head */
    const headrows_piece *pieces; /* in order, without overlap */
    size_t count;
} headrows_array;

/* `bytes` of one head of one row; the sizes that models have are compiled in. */
static inline void headrows__strip(uint8_t *dst, const uint8_t *src, size_t rows, size_t stride, size_t bytes) {
    switch (bytes) {
    case 128:
        for (size_t i = 0; i < rows; i++) memcpy(dst + i * 128, src + i * stride, 128);
        break;
    case 256:
        for (size_t i = 0; i < rows; i++) memcpy(dst + i * 256, src + i * stride, 256);
        break;
    case 512:
        for (size_t i = 0; i < rows; i++) memcpy(dst + i * 512, src + i * stride, 512);
        break;
    default:
        for (size_t i = 0; i < rows; i++) memcpy(dst + i * bytes, src + i * stride, bytes);
    }
}

static inline void headrows_put(const headrows_array *to, const headrows_piece *from, size_t heads, size_t bytes) {
    const size_t stride = heads * bytes, tile = HEADROWS_TILE / stride ? HEADROWS_TILE / stride : 1;
    for (size_t row = 0; row < from->count; row += tile) {
        const size_t rows = from->count - row < tile ? from->count - row : tile;
        for (size_t head = 0; head < heads; head++)
            headrows__strip(to->out + (head * to->capacity + from->first + row) * bytes,
                            from->rows + row * stride + head * bytes, rows, stride, bytes);
    }
}

/* Zeros in rows [first, end) of each head. */
static inline void headrows_clear(const headrows_array *to, size_t first, size_t end, size_t heads, size_t bytes) {
    for (size_t head = 0; head < heads && end > first; head++)
        memset(to->out + (head * to->capacity + first) * bytes, 0, (end - first) * bytes);
}

/* All pieces of an array, zeros elsewhere. */
static inline void headrows_array_fill(const headrows_array *to, size_t heads, size_t bytes) {
    size_t reached = 0;
    for (size_t i = 0; i < to->count; i++) {
        headrows_clear(to, reached, to->pieces[i].first, heads, bytes);
        headrows_put(to, &to->pieces[i], heads, bytes);
        reached = to->pieces[i].first + to->pieces[i].count;
    }
    headrows_clear(to, reached, to->capacity, heads, bytes);
}

#if defined(__linux__)
/* Whether next to nothing of a huge page is there. Memory that was used before would be copied into one for nothing. */
static inline int headrows__untouched(uintptr_t at) {
    unsigned char there[HEADROWS_HUGE / 4096];
    size_t count = 0;
    const size_t pages = HEADROWS_HUGE / (size_t)sysconf(_SC_PAGESIZE);
    if (pages > sizeof there || mincore((void *)at, HEADROWS_HUGE, there)) return 0;
    for (size_t i = 0; i < pages; i++) count += there[i] & 1;
    return count <= pages / 16;
}
#endif

static inline void headrows_huge(uintptr_t from, uintptr_t to) {
#if defined(__linux__)
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
    for (uintptr_t at = (from + HEADROWS_HUGE - 1) & ~(HEADROWS_HUGE - 1); at + HEADROWS_HUGE <= to; at += HEADROWS_HUGE)
        if (headrows__untouched(at)) madvise((void *)at, HEADROWS_HUGE, MADV_COLLAPSE);
#else
    (void)from;
    (void)to;
#endif
}

typedef struct headrows_work {
    const headrows_array *arrays; /* by address when `fresh` */
    size_t count, heads, bytes;
    int fresh;
    _Atomic size_t next; /* array that the next thread begins with */
} headrows_work;

static inline uintptr_t headrows__end(const headrows_work *work, size_t i) {
    return (uintptr_t)work->arrays[i].out + work->arrays[i].capacity * work->heads * work->bytes;
}

/* Ask for the huge pages that begin in arrays [first, last) and end in them or in what lies right behind them. */
static inline void headrows__ask(const headrows_work *work, size_t first, size_t last) {
    uintptr_t from = (uintptr_t)work->arrays[first].out, to = headrows__end(work, first);
    for (size_t i = first + 1; i < work->count; i++) {
        const uintptr_t start = (uintptr_t)work->arrays[i].out;
        const int beside = start >= to && start - to <= HEADROWS_GAP;
        if (i < last && !beside) {
            headrows_huge(from, to);
            from = start;
        }
        if (i >= last && (!beside || start - (uintptr_t)work->arrays[last - 1].out > 2 * HEADROWS_BATCH)) break;
        to = headrows__end(work, i);
        if (i >= last) {
            const uintptr_t most = (headrows__end(work, last - 1) + HEADROWS_HUGE - 1) & ~(HEADROWS_HUGE - 1);
            if (to >= most) {
                to = most;
                break;
            }
        }
    }
    headrows_huge(from, to);
}

static inline void *headrows__thread(void *arg) {
    headrows_work *work = (headrows_work *)arg;
    size_t each = work->count ? (headrows__end(work, 0) - (uintptr_t)work->arrays[0].out) : 1;
    const size_t step = work->fresh && each < HEADROWS_BATCH ? HEADROWS_BATCH / (each ? each : 1) : 1;
    for (;;) {
        const size_t first = atomic_fetch_add_explicit(&work->next, step, memory_order_relaxed);
        if (first >= work->count) return NULL;
        const size_t last = first + step < work->count ? first + step : work->count;
        if (work->fresh) headrows__ask(work, first, last);
        for (size_t i = first; i < last; i++) headrows_array_fill(&work->arrays[i], work->heads, work->bytes);
    }
}

/* Ask for the huge pages of all arrays. */
static inline void headrows_reserve(headrows_work *work) {
    if (work->count) headrows__ask(work, 0, work->count);
}

/* Fill all arrays. Threads that cannot be started are done without. */
static inline void headrows_fill(headrows_work *work, int threads) {
    pthread_t others[HEADROWS_THREADS];
    sigset_t all, old;
    int started = 0;
    atomic_store_explicit(&work->next, 0, memory_order_relaxed);
    if (threads > 1) {
        sigfillset(&all); /* signals belong to the caller's threads */
        pthread_sigmask(SIG_SETMASK, &all, &old);
        while (started < threads - 1 && started < HEADROWS_THREADS
               && pthread_create(&others[started], NULL, headrows__thread, work) == 0)
            started++;
        pthread_sigmask(SIG_SETMASK, &old, NULL);
    }
    headrows__thread(work);
    while (started) pthread_join(others[--started], NULL);
}

#endif
