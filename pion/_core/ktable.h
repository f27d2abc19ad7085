/* Entries, buckets, expiry heap and accounting of the keyspace, and finding a key. What it is all for stands in
 * keyspace.h, which changes them.
 */
#ifndef PION_KTABLE_H
#define PION_KTABLE_H

#include "kslog.h"

#include <limits.h>
#include <time.h>

#define KS_DATABASES_MAX 64
#define KS_MIN_BITS 4u
#define KS_STEP 8 /* buckets moved per write while resizing */
#define KS_CANDIDATES 16

enum { KS_NONE = 0, KS_STRING = 1, KS_HASH = 2, KS_ZSET = 3 };
enum { KS_KEEPTTL = 1, KS_NOLOG = 2 };
enum { KS_WRONGTYPE = 1, KS_NOT_INTEGER = 2, KS_OVERFLOW = 3 }; /* positive results of ks_incr and ks_write */

typedef struct kent {
    struct kent *next;
    uint64_t hash;
    uint64_t expire; /* ms since 1970, 0: never */
    uint64_t bytes;  /* memory of entry, key and value as counted in used_bytes */
    union {
        kval *v;     /* KS_STRING */
        void *value; /* any other type: a Python object */
    };
    uint32_t klen;
    uint32_t heap;  /* place in the heap + 1, 0: no expiry */
    uint32_t clock; /* ks_clock of the last use */
    uint8_t type, db, flags;
    char key[];
} kent;

typedef struct ktable {
    kent **buckets; /* NULL: no table */
    uint32_t bits;
} ktable;

typedef struct kdb {
    ktable now, next; /* next.buckets: resizing */
    uint64_t pos;
    uint64_t count, expires, bytes;
} kdb;

typedef struct kdue {
    uint64_t when;
    kent *entry;
} kdue;

/* A key that may be evicted next; see kevict.h. */
typedef struct kcandidate {
    uint64_t hash;
    uint32_t clock;
    uint8_t db;
} kcandidate;

/* A chain or table whose keys were flushed; freed in slices. */
typedef struct kgrave {
    kent **buckets;
    uint64_t at, count;
} kgrave;

typedef struct ks {
    kdb db[KS_DATABASES_MAX];
    int databases;
    uint64_t seed[2];
    uint64_t now_ms, fixed_now;
    uint64_t hits, misses, expired, used_bytes;
    uint64_t dirty; /* effects since the start */
    uint64_t maxmemory, evicted; /* bound of used_bytes, 0: none; keys that went for it */
    int policy;
    size_t ncandidates;
    kcandidate candidates[KS_CANDIDATES];
    kdue *heap;
    size_t nheap, cap_heap;
    void **dead; /* Python objects to release under the GIL */
    size_t ndead, cap_dead;
    kgrave *graves;
    size_t ngraves, cap_graves;
    uint64_t random; /* state of the generator behind ks_random */
    kpool *pool;
    klog log;
    struct ks *tables; /* see ks_table_get */
    uint64_t uses;     /* of entries of the store, the probes of tables among them; atomic */
    pthread_mutex_t tables_lock;
} ks;

/* ---- hash: SipHash-1-3 (Aumasson, Bernstein), as a stranger chooses the keys ---- */

#define KS_ROTL(x, b) (((x) << (b)) | ((x) >> (64 - (b))))
#define KS_SIPROUND(v0, v1, v2, v3)                                                   \
    do {                                                                              \
        v0 += v1; v1 = KS_ROTL(v1, 13); v1 ^= v0; v0 = KS_ROTL(v0, 32);               \
        v2 += v3; v3 = KS_ROTL(v3, 16); v3 ^= v2;                                     \
        v0 += v3; v3 = KS_ROTL(v3, 21); v3 ^= v0;                                     \
        v2 += v1; v1 = KS_ROTL(v1, 17); v1 ^= v2; v2 = KS_ROTL(v2, 32);               \
    } while (0)

static inline uint64_t ks_hash(const ks *k, const void *key, size_t n) {
    const uint8_t *p = (const uint8_t *)key;
    uint64_t v0 = k->seed[0] ^ 0x736f6d6570736575ull, v1 = k->seed[1] ^ 0x646f72616e646f6dull;
    uint64_t v2 = k->seed[0] ^ 0x6c7967656e657261ull, v3 = k->seed[1] ^ 0x7465646279746573ull;
    uint64_t last = (uint64_t)n << 56, word;
    for (; n >= 8; n -= 8, p += 8) {
        memcpy(&word, p, 8);
        v3 ^= word;
        KS_SIPROUND(v0, v1, v2, v3);
        v0 ^= word;
    }
    for (size_t i = 0; i < n; i++) last |= (uint64_t)p[i] << (8 * i);
    v3 ^= last;
    KS_SIPROUND(v0, v1, v2, v3);
    v0 ^= last;
    v2 ^= 0xff;
    KS_SIPROUND(v0, v1, v2, v3);
    KS_SIPROUND(v0, v1, v2, v3);
    KS_SIPROUND(v0, v1, v2, v3);
    return v0 ^ v1 ^ v2 ^ v3;
}

/* ---- time ---- */

/* Read the clock; once per batch is enough. */
static inline uint64_t ks_tick(ks *k) {
    if (k->fixed_now) return k->now_ms = k->fixed_now;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return k->now_ms = (uint64_t)t.tv_sec * 1000u + (uint64_t)t.tv_nsec / 1000000u;
}

static inline uint64_t ks_monotonic_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

/* Time of a use in steps of 64 ms. Differences hold over a wrap, which comes every eight years. */
static inline uint32_t ks_clock(uint64_t now_ms) { return (uint32_t)(now_ms >> 6); }

static inline int kent_due(const kent *e, uint64_t now_ms) { return e->expire && e->expire <= now_ms; }

/* ---- life ---- */

static inline ks *ks_new_bare(int databases, uint64_t seed0, uint64_t seed1) {
    ks *k = (ks *)calloc(1, sizeof *k);
    if (!k) return NULL;
    k->databases = databases;
    k->seed[0] = seed0;
    k->seed[1] = seed1;
    k->random = seed0 ^ KS_ROTL(seed1, 17) ^ 0x9e3779b97f4a7c15ull;
    k->pool = kpool_new();
    klog_init(&k->log);
    pthread_mutex_init(&k->tables_lock, NULL);
    if (!k->pool) {
        free(k);
        return NULL;
    }
    ks_tick(k);
    return k;
}

static inline ks *ks_new(int databases, uint64_t seed0, uint64_t seed1) {
    ks *k = ks_new_bare(databases, seed0, seed1);
    if (k && !(k->tables = ks_new_bare(1, seed1, seed0))) {
        kpool_unref(k->pool);
        free(k);
        return NULL;
    }
    return k;
}

/* ---- buckets ---- */

static inline kent **kdb_bucket(const kdb *d, uint64_t hash) {
    if (__builtin_expect(d->next.buckets != NULL, 0)) {
        const uint32_t bits = d->now.bits < d->next.bits ? d->now.bits : d->next.bits;
        if ((hash >> (64 - bits)) < d->pos) return &d->next.buckets[hash >> (64 - d->next.bits)];
    }
    return &d->now.buckets[hash >> (64 - d->now.bits)];
}

static inline void kdb_move_chain(kdb *d, kent **from) {
    kent *e = *from;
    *from = NULL; /* a flush half-way frees both tables */
    while (e) {
        kent *next = e->next, **to = &d->next.buckets[e->hash >> (64 - d->next.bits)];
        e->next = *to;
        *to = e;
        e = next;
    }
}

/* Move `n` more units of the table being resized; a unit is a bucket of the smaller of the two tables. */
static inline void kdb_step(kdb *d, uint64_t n) {
    if (!d->next.buckets) return;
    const int grow = d->next.bits > d->now.bits;
    const uint64_t units = (uint64_t)1 << (grow ? d->now.bits : d->next.bits);
    const uint64_t stop = units - d->pos < n ? units : d->pos + n;
    for (; d->pos < stop; d->pos++) {
        if (grow) {
            kdb_move_chain(d, &d->now.buckets[d->pos]);
        } else {
            kdb_move_chain(d, &d->now.buckets[2 * d->pos]);
            kdb_move_chain(d, &d->now.buckets[2 * d->pos + 1]);
        }
    }
    if (d->pos < units) return;
    free(d->now.buckets);
    d->now = d->next;
    memset(&d->next, 0, sizeof d->next);
    d->pos = 0;
}

static inline void kdb_resize(kdb *d, uint32_t bits) {
    if (d->next.buckets) return;
    kent **buckets = (kent **)calloc((size_t)1 << bits, sizeof *buckets);
    if (!buckets) return; /* chains grow longer until there is memory */
    d->next.buckets = buckets;
    d->next.bits = bits;
    d->pos = 0;
}

/* Before a write: keep the table in proportion. */
static inline void kdb_balance(kdb *d) {
    if (d->next.buckets) {
        kdb_step(d, KS_STEP);
    } else if (d->now.buckets) {
        const uint64_t buckets = (uint64_t)1 << d->now.bits;
        if (d->count > buckets && d->now.bits < 40) kdb_resize(d, d->now.bits + 1);
        else if (d->count < buckets / 8 && d->now.bits > KS_MIN_BITS) kdb_resize(d, d->now.bits - 1);
    }
}

static inline uint64_t kdb_table_bytes(const kdb *d) {
    return (d->now.buckets ? sizeof(kent *) << d->now.bits : 0) + (d->next.buckets ? sizeof(kent *) << d->next.bits : 0);
}

/* ---- expiry heap ---- */

static inline void kheap_place(ks *k, size_t at, kdue due) {
    k->heap[at] = due;
    due.entry->heap = (uint32_t)at + 1;
}

static inline void kheap_up(ks *k, size_t at, kdue due) {
    while (at) {
        const size_t parent = (at - 1) / 4;
        if (k->heap[parent].when <= due.when) break;
        kheap_place(k, at, k->heap[parent]);
        at = parent;
    }
    kheap_place(k, at, due);
}

static inline void kheap_down(ks *k, size_t at, kdue due) {
    for (;;) {
        size_t child = 4 * at + 1, best = child;
        if (child >= k->nheap) break;
        const size_t stop = child + 4 < k->nheap ? child + 4 : k->nheap;
        for (; child < stop; child++)
            if (k->heap[child].when < k->heap[best].when) best = child;
        if (k->heap[best].when >= due.when) break;
        kheap_place(k, at, k->heap[best]);
        at = best;
    }
    kheap_place(k, at, due);
}

static inline void kheap_fix(ks *k, size_t at, kdue due) {
    if (at && k->heap[(at - 1) / 4].when > due.when) kheap_up(k, at, due);
    else kheap_down(k, at, due);
}

static inline void kheap_remove(ks *k, kent *e) {
    const size_t at = e->heap - 1;
    e->heap = 0;
    const kdue last = k->heap[--k->nheap];
    if (at < k->nheap) kheap_fix(k, at, last);
}

/* Set or clear (0) the expiry of an entry; not logged. -ENOMEM leaves it as it was. */
static inline int ks_schedule(ks *k, kent *e, uint64_t when) {
    if (e->expire == when) return 0;
    kdb *d = &k->db[e->db];
    if (!when) {
        kheap_remove(k, e);
        d->expires--;
    } else {
        const kdue due = {when, e};
        if (e->heap) {
            kheap_fix(k, e->heap - 1, due);
        } else {
            if (k->nheap >= UINT32_MAX ||
                klog_reserve((void **)&k->heap, &k->cap_heap, k->nheap + 1, sizeof *k->heap))
                return -ENOMEM;
            kheap_up(k, k->nheap++, due);
            d->expires++;
        }
    }
    e->expire = when;
    return 0;
}

/* ---- accounting and values ---- */

static inline size_t kent_own_bytes(size_t klen) { return kval_block(sizeof(kent) + klen) + sizeof(kent *); }

static inline void ks_account(ks *k, kent *e, uint64_t bytes) {
    const uint64_t change = bytes - e->bytes; /* wraps when it shrinks */
    e->bytes = bytes;
    k->db[e->db].bytes += change;
    k->used_bytes += change;
}

static inline int ks_logs(const ks *k) { return k->log.fd >= 0; }

/* errno of why writers are refused, 0: they are welcome. */
static inline int ks_refuses(const ks *k) {
    if (k->log.error) return k->log.error;
    return k->log.policy != KS_SYNC_NO ? k->log.sync_error : 0;
}

static inline void ks_bury(ks *k, void *object) {
    /* Without memory for the list the object leaks, which is better than releasing it without the GIL. */
    if (!klog_reserve((void **)&k->dead, &k->cap_dead, k->ndead + 1, sizeof *k->dead)) k->dead[k->ndead++] = object;
}

static inline void ks_drop_value(ks *k, uint8_t type, void *value) {
    if (!value) return;
    if (type != KS_STRING) {
        ks_bury(k, value);
        return;
    }
    const uint64_t blob = kval_blob((kval *)value);
    if (blob) klog_drop_blob(&k->log, blob);
    kval_unref((kval *)value);
}

static inline void ks_free_entry(ks *k, kent *e) {
    ks_drop_value(k, e->type, e->value);
    free(e);
}

/* Take an entry out of the table and free it; not logged. */
static inline void ks_remove(ks *k, kent *e) {
    kdb *d = &k->db[e->db];
    kent **at = kdb_bucket(d, e->hash);
    while (*at != e) at = &(*at)->next;
    *at = e->next;
    if (e->expire) ks_schedule(k, e, 0);
    ks_account(k, e, 0);
    d->count--;
    ks_free_entry(k, e);
    kdb_balance(d);
}

static inline void ks_log_key(ks *k, uint8_t kind, const kent *e, uint64_t expire) {
    k->dirty++;
    if (ks_logs(k)) klog_append(&k->log, kind, e->db, e->key, e->klen, "", 0, NULL, expire);
}

/* Delete a due entry. Its end is logged, so that a clock set back does not bring it back after a restart; while the log
 * cannot be written it stays in the table, dead to every reader. 1: deleted. */
static inline int ks_reap(ks *k, kent *e) {
    if (ks_logs(k) && ks_refuses(k)) return 0;
    ks_log_key(k, KS_LOG_DEL, e, 0);
    k->expired++;
    ks_remove(k, e);
    return 1;
}

/* ---- find ---- */

/* The entry, due or not. */
static inline kent *ks_entry(const ks *k, int db, uint64_t hash, const void *key, size_t klen) {
    const kdb *d = &k->db[db];
    if (!d->now.buckets) return NULL;
    for (kent *e = *kdb_bucket(d, hash); e; e = e->next) {
        __builtin_prefetch(e->key + 8); /* the key ends in the next cache line */
        if (e->hash != hash || e->klen != klen) continue;
        __builtin_prefetch(e->value);
        if (!memcmp(e->key, key, klen)) return e;
    }
    return NULL;
}

/* The live entry, or NULL. The pointer is good until the next call that changes the table. */
static inline kent *ks_find(ks *k, int db, const void *key, size_t klen, uint64_t now_ms) {
    kent *e = ks_entry(k, db, ks_hash(k, key, klen), key, klen);
    if (__builtin_expect(e && kent_due(e, now_ms), 0)) {
        ks_reap(k, e);
        return NULL;
    }
    return e;
}

/* ks_find for commands that read: counts hit or miss and notes the use. */
static inline kent *ks_read(ks *k, int db, const void *key, size_t klen, uint64_t now_ms) {
    kent *e = ks_find(k, db, key, klen, now_ms);
    if (e) {
        e->clock = ks_clock(now_ms);
        k->hits++;
    } else {
        k->misses++;
    }
    return e;
}

/* Bring the bucket of a key that is about to be used into the cache. */
static inline void ks_prefetch(const ks *k, int db, uint64_t hash) {
    const kdb *d = &k->db[db];
    if (d->now.buckets) __builtin_prefetch(kdb_bucket(d, hash));
}

static inline uint64_t ks_random_u64(ks *k) {
    k->random ^= k->random << 13;
    k->random ^= k->random >> 7;
    k->random ^= k->random << 17;
    return k->random;
}

#endif
