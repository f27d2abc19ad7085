/* String values of the keyspace: counted, shareable between the table, queued replies, the log and mover threads.
 *
 * A value of less than 64 KiB stands in one malloc block. Larger ones own a buffer from a recycling pool, because a
 * fresh buffer costs three to four times the transfer that fills it (page faults). Buffers of 1 MiB and more are
 * mapped, those of 2 MiB and more aligned and advised for huge pages. There is always room for KV_SLACK bytes behind
 * a value's `cap`, so that the CRLF of a bulk string can be received with it.
 *
 * `data` may be changed in place only by the thread that owns the table, and only while kval_shared() is false.
 */
#ifndef PION_KVAL_H
#define PION_KVAL_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define KV_POOLED ((size_t)64 << 10)
#define KV_MAPPED ((size_t)1 << 20)
#define KV_HUGE ((size_t)2 << 20)
#define KV_SLACK 2u
#define KV_TAIL 4096u /* behind a mapped buffer, outside the advised range: two bytes of CRLF cost no huge page */
#define KV_CLASSES (8 * 40)
#define KV_CACHE_LIMIT ((size_t)256 << 20)

enum {
    KV_BIG = 1,
    KV_GHOST = 2,  /* not loaded from its file yet */
    KV_DIRTY = 4,  /* the file holds an older state, the log the changes since */
    KV_DAMAGED = 8 /* zeros in place of a file that could not be read */
};

typedef struct kval {
    uint32_t refs; /* atomic */
    uint32_t flags;
    size_t len, cap;
    char *data;
} kval;

struct kpool_free {
    struct kpool_free *next;
};

typedef struct kpool {
    pthread_mutex_t lock;
    uint32_t refs; /* atomic: the keyspace and every big value */
    size_t cached, low, limit;
    struct kpool_free *lists[KV_CLASSES];
} kpool;

/* KV_BIG: a value with a buffer of its own. */
typedef struct kbig {
    kval v;
    kpool *pool;
    size_t alloc;  /* size class, without the tail */
    uint64_t blob; /* file that holds the same bytes (0: none); with KV_DIRTY the log has later changes */
    uint32_t crc;  /* of the file's payload */
} kbig;

/* Eight sizes for every power of two: at most an eighth is lost. */
static inline size_t kpool_round(size_t n, unsigned *index) {
    if (n < KV_POOLED) n = KV_POOLED;
    const unsigned log2 = 63u - (unsigned)__builtin_clzll((unsigned long long)n - 1);
    const size_t step = (size_t)1 << (log2 - 3);
    const size_t size = (n + step - 1) & ~(step - 1);
    *index = (log2 - 15) * 8 + (unsigned)(((size - 1) >> (log2 - 3)) & 7);
    return size;
}

static inline kpool *kpool_new(void) {
    kpool *p = (kpool *)calloc(1, sizeof *p);
    if (!p) return NULL;
    pthread_mutex_init(&p->lock, NULL);
    p->refs = 1;
    p->limit = KV_CACHE_LIMIT;
    return p;
}

static inline void kpool_release(void *buffer, size_t size) {
    if (size >= KV_MAPPED) munmap(buffer, size + KV_TAIL);
    else free(buffer);
}

/* Give back cached buffers until at most `keep` bytes are cached. */
static inline void kpool_trim(kpool *p, size_t keep) {
    for (unsigned i = KV_CLASSES; i-- > 0;) {
        for (;;) {
            size_t size = 0;
            pthread_mutex_lock(&p->lock);
            struct kpool_free *f = p->cached > keep ? p->lists[i] : NULL;
            if (f) {
                size = ((size_t)1 << (i / 8 + 15)) + ((size_t)(i % 8) + 1) * ((size_t)1 << (i / 8 + 12));
                p->lists[i] = f->next;
                p->cached -= size;
                if (p->low > p->cached) p->low = p->cached;
            }
            pthread_mutex_unlock(&p->lock);
            if (!f) break;
            kpool_release(f, size);
        }
    }
}

/* Called now and then: gives back what nobody needed since the last call. */
static inline void kpool_age(kpool *p) {
    pthread_mutex_lock(&p->lock);
    const size_t unused = p->low, cached = p->cached;
    p->low = p->cached;
    pthread_mutex_unlock(&p->lock);
    if (unused) kpool_trim(p, cached - unused);
}

static inline void kpool_unref(kpool *p) {
    if (__atomic_sub_fetch(&p->refs, 1, __ATOMIC_ACQ_REL)) return;
    kpool_trim(p, 0);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

static inline void *kpool_take(kpool *p, size_t n, size_t *alloc) {
    unsigned index;
    const size_t size = *alloc = kpool_round(n, &index);
    if (index >= KV_CLASSES) return NULL;
    pthread_mutex_lock(&p->lock);
    struct kpool_free *f = p->lists[index];
    if (f) {
        p->lists[index] = f->next;
        p->cached -= size;
        if (p->low > p->cached) p->low = p->cached;
    }
    pthread_mutex_unlock(&p->lock);
    if (f) return f;
    if (size < KV_MAPPED) return malloc(size + KV_SLACK);
    const size_t room = size >= KV_HUGE ? KV_HUGE : 0;
    char *at = (char *)mmap(NULL, size + KV_TAIL + room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (at == MAP_FAILED) return NULL;
    if (room) {
        const size_t lead = (KV_HUGE - ((uintptr_t)at & (KV_HUGE - 1))) & (KV_HUGE - 1);
        if (lead) munmap(at, lead);
        if (room - lead) munmap(at + lead + size + KV_TAIL, room - lead);
        at += lead;
#ifdef MADV_HUGEPAGE
        madvise(at, size, MADV_HUGEPAGE);
#endif
    }
    return at;
}

static inline void kpool_give(kpool *p, void *buffer, size_t size) {
    unsigned index;
    kpool_round(size, &index);
    pthread_mutex_lock(&p->lock);
    const int keep = p->cached + size <= p->limit;
    if (keep) {
        struct kpool_free *f = (struct kpool_free *)buffer;
        f->next = p->lists[index];
        p->lists[index] = f;
        p->cached += size;
    }
    pthread_mutex_unlock(&p->lock);
    if (!keep) kpool_release(buffer, size);
}

/* A value with one reference, `len` set and room for at least `cap` bytes; the bytes are not initialised. */
static inline kval *kval_new_cap(kpool *pool, size_t len, size_t cap) {
    if (cap < KV_POOLED) {
        kval *v = (kval *)malloc(sizeof *v + cap + KV_SLACK);
        if (!v) return NULL;
        v->refs = 1;
        v->flags = 0;
        v->len = len;
        v->cap = cap;
        v->data = (char *)(v + 1);
        return v;
    }
    kbig *b = (kbig *)malloc(sizeof *b);
    if (!b) return NULL;
    b->v.data = (char *)kpool_take(pool, cap, &b->alloc);
    if (!b->v.data) {
        free(b);
        return NULL;
    }
    __atomic_add_fetch(&pool->refs, 1, __ATOMIC_RELAXED);
    b->pool = pool;
    b->blob = 0;
    b->crc = 0;
    b->v.refs = 1;
    b->v.flags = KV_BIG;
    b->v.len = len;
    b->v.cap = b->alloc;
    return &b->v;
}

static inline kval *kval_new(kpool *pool, size_t len) { return kval_new_cap(pool, len, len); }

/* Stands for `len` bytes that lie in a file and are not loaded yet: data is NULL. */
static inline kval *kval_ghost(kpool *pool, size_t len, uint64_t blob, uint32_t crc) {
    kbig *b = (kbig *)calloc(1, sizeof *b);
    if (!b) return NULL;
    __atomic_add_fetch(&pool->refs, 1, __ATOMIC_RELAXED);
    b->pool = pool;
    b->blob = blob;
    b->crc = crc;
    b->v.refs = 1;
    b->v.flags = KV_BIG | KV_GHOST;
    b->v.len = len;
    return &b->v;
}

static inline void kval_ref(kval *v) { __atomic_add_fetch(&v->refs, 1, __ATOMIC_RELAXED); }

/* Any thread may give a reference back. */
static inline void kval_unref(kval *v) {
    if (__atomic_sub_fetch(&v->refs, 1, __ATOMIC_ACQ_REL)) return;
    if (v->flags & KV_BIG) {
        kbig *b = (kbig *)v;
        if (v->data) kpool_give(b->pool, v->data, b->alloc);
        kpool_unref(b->pool);
    }
    free(v);
}

static inline int kval_shared(const kval *v) { return __atomic_load_n(&v->refs, __ATOMIC_ACQUIRE) != 1; }
static inline uint64_t kval_blob(const kval *v) { return v->flags & KV_BIG ? ((const kbig *)v)->blob : 0; }

/* What one malloc block of n bytes takes from the system. */
static inline size_t kval_block(size_t n) { return (n + 8 + 15) & ~(size_t)15; }

/* Memory a value takes. */
static inline size_t kval_bytes(const kval *v) {
    if (v->flags & KV_BIG) return kval_block(sizeof(kbig)) + (v->data ? ((const kbig *)v)->alloc : v->len);
    return kval_block(sizeof(kval) + v->cap + KV_SLACK);
}

#endif
