/* The keyspace: a hash table per database, owned by one thread (the plane's), usable without the GIL.
 *
 * Buckets are chains, chosen by the TOP bits of a keyed hash. Doubling the table splits bucket i into 2i and 2i+1, so
 * the order of buckets is the order of hashes whatever the size, and a SCAN cursor is simply the hash it has reached:
 * a key that is there during a whole scan is returned exactly once, through any number of resizes. Resizing moves a
 * few buckets with every write; buckets below `pos` (counted in the smaller of the two tables) live in the new one.
 *
 * Times to live are absolute milliseconds. Keys that have one also stand in a 4-ary heap, so that the expiry cycle
 * deletes exactly the due ones. A due key is gone for every reader from that millisecond on.
 *
 * Values: strings are kval*; other types are Python objects. C code that replaces an object without the GIL puts it on
 * a list which the owner of the GIL releases later.
 *
 * Every function that changes a key appends the effect to the log (kslog.h) if one is attached.
 */
#ifndef PION_KEYSPACE_H
#define PION_KEYSPACE_H

#include "ktable.h"

/* ---- change ---- */

/* A new entry without a value. NULL: no memory. */
static inline kent *ks_insert(ks *k, int db, uint64_t hash, const void *key, size_t klen) {
    kdb *d = &k->db[db];
    if (!d->now.buckets) {
        if (!(d->now.buckets = (kent **)calloc((size_t)1 << KS_MIN_BITS, sizeof(kent *)))) return NULL;
        d->now.bits = KS_MIN_BITS;
    }
    if (klen > UINT32_MAX) return NULL;
    kent *e = (kent *)malloc(sizeof *e + klen);
    if (!e) return NULL;
    kdb_balance(d);
    memset(e, 0, sizeof *e);
    e->hash = hash;
    e->klen = (uint32_t)klen;
    e->db = (uint8_t)db;
    memcpy(e->key, key, klen);
    kent **to = kdb_bucket(d, hash);
    e->next = *to;
    *to = e;
    d->count++;
    ks_account(k, e, kent_own_bytes(klen));
    return e;
}

/* Write a large value to its own file if it has none. A mover may have done it before: ks_blob_write there, then
 * klog_fresh_blob and ks_blob_attach on the owner's thread. */
static inline int ks_blob_save(ks *k, kval *v) {
    if (k->log.blob_fd < 0 || v->len < KS_BLOB_MIN) return 0;
    if (kval_blob(v) && !(v->flags & KV_DIRTY)) return 0;
    const uint64_t old = kval_blob(v);
    uint64_t blob;
    uint32_t crc = 0;
    int rc;
    do rc = ks_blob_write(k->log.blob_fd, blob = ks_random_u64(k), v->data, v->len, &crc,
                          k->log.policy == KS_SYNC_ALWAYS);
    while (rc == -EEXIST);
    if (rc) return rc;
    ks_blob_attach(v, blob, crc);
    if (old) klog_drop_blob(&k->log, old);
    return klog_fresh_blob(&k->log, blob);
}

static inline void ks_log_string(ks *k, const kent *e) {
    kval *v = (kval *)e->value;
    k->dirty++;
    if (!ks_logs(k)) return;
    const uint64_t blob = v->flags & KV_DIRTY ? 0 : kval_blob(v);
    if (blob && v->len >= KS_BLOB_MIN) {
        uint8_t where[20];
        fr_put64(where, blob);
        fr_put64(where + 8, v->len);
        fr_put32(where + 16, ((kbig *)v)->crc);
        klog_append(&k->log, KS_LOG_BLOB, e->db, e->key, e->klen, where, sizeof where, NULL, e->expire);
    } else {
        klog_append(&k->log, KS_LOG_SET, e->db, e->key, e->klen, v->data, v->len, v, e->expire);
    }
    if (klog_pending(&k->log) > KS_LOG_SPILL && !k->log.in_group) klog_flush(&k->log);
}

/* The live or new entry for a write. A due one dies here and is taken over without a value. */
static inline kent *ks_claim(ks *k, int db, const void *key, size_t klen, uint64_t hash) {
    kent *e = ks_entry(k, db, hash, key, klen);
    if (!e) return ks_insert(k, db, hash, key, klen);
    if (kent_due(e, k->now_ms)) {
        ks_log_key(k, KS_LOG_DEL, e, 0);
        k->expired++;
        ks_schedule(k, e, 0);
        ks_drop_value(k, e->type, e->value);
        e->value = NULL;
        e->type = KS_NONE;
    }
    return e;
}

/* Room for one more expiry, so that ks_schedule cannot fail half-way through a write. */
static inline int ks_reserve_due(ks *k, uint64_t expire) {
    return expire ? klog_reserve((void **)&k->heap, &k->cap_heap, k->nheap + 1, sizeof *k->heap) : 0;
}

static inline void ks_replace(ks *k, kent *e, void *value, int type) {
    void *old = e->value;
    const uint8_t old_type = e->type;
    e->value = value;
    e->type = (uint8_t)type;
    if (old != value) ks_drop_value(k, old_type, old);
}

static inline int ks_finish_set(ks *k, kent *e, uint64_t expire, int flags) {
    if (!(flags & KS_KEEPTTL)) ks_schedule(k, e, expire);
    e->clock = ks_clock(k->now_ms);
    ks_account(k, e, kent_own_bytes(e->klen) + kval_bytes((kval *)e->value));
    if (!(flags & KS_NOLOG)) ks_log_string(k, e);
    else k->dirty++;
    return 0;
}

/* Set a key to a string value whose reference is taken over, also on failure. `expire` is absolute ms (0: none), unused
 * with KS_KEEPTTL. 0, or -errno: no memory, or a large value could not be written to its file; then nothing changed. */
static inline int ks_set(ks *k, int db, const void *key, size_t klen, kval *v, uint64_t expire, int flags) {
    kent *e = NULL;
    int rc = ks_reserve_due(k, expire);
    if (!rc && ks_logs(k) && !(flags & KS_NOLOG)) rc = ks_blob_save(k, v);
    if (!rc && !(e = ks_claim(k, db, key, klen, ks_hash(k, key, klen)))) rc = -ENOMEM;
    if (rc) {
        ks_drop_value(k, KS_STRING, v);
        return rc;
    }
    ks_replace(k, e, v, KS_STRING);
    return ks_finish_set(k, e, expire, flags);
}

/* ks_set of a copy of n bytes; writes in place where that fits and nobody else holds the old value. */
static inline int ks_set_bytes(ks *k, int db, const void *key, size_t klen, const void *data, size_t n, uint64_t expire,
                               int flags) {
    if (n < KV_POOLED) {
        kent *e = ks_reserve_due(k, expire) ? NULL : ks_claim(k, db, key, klen, ks_hash(k, key, klen));
        if (!e) return -ENOMEM;
        kval *v = (kval *)e->value;
        if (e->type == KS_STRING && !(v->flags & KV_BIG) && v->cap >= n && v->cap <= 2 * n + 64 && !kval_shared(v)) {
            memcpy(v->data, data, n);
            v->len = n;
        } else {
            if (!(v = kval_new(k->pool, n))) {
                if (!e->value) ks_remove(k, e);
                return -ENOMEM;
            }
            memcpy(v->data, data, n);
            ks_replace(k, e, v, KS_STRING);
        }
        return ks_finish_set(k, e, expire, flags);
    }
    kval *v = kval_new(k->pool, n);
    if (!v) return -ENOMEM;
    memcpy(v->data, data, n);
    return ks_set(k, db, key, klen, v, expire, flags);
}

/* Put a Python object (its reference is taken over) at a key; `bytes` is the memory of the object. Not logged: the
 * effects on objects are logged by whoever makes them. Keeps the expiry of a live key. */
static inline int ks_set_object(ks *k, int db, const void *key, size_t klen, void *object, int type, uint64_t bytes) {
    kent *e = ks_claim(k, db, key, klen, ks_hash(k, key, klen));
    if (!e) return -ENOMEM;
    ks_replace(k, e, object, type);
    e->clock = ks_clock(k->now_ms);
    ks_account(k, e, kent_own_bytes(klen) + bytes);
    return 0;
}

/* Delete a live entry (logged). */
static inline void ks_delete(ks *k, kent *e) {
    ks_log_key(k, KS_LOG_DEL, e, 0);
    ks_remove(k, e);
}

/* 1: the key was there. */
static inline int ks_del(ks *k, int db, const void *key, size_t klen) {
    kent *e = ks_find(k, db, key, klen, k->now_ms);
    if (e) ks_delete(k, e);
    return e != NULL;
}

/* Set (absolute ms) or clear (0) the expiry of a live entry; a time that has come deletes it. */
static inline int ks_expire(ks *k, kent *e, uint64_t when) {
    if (when && when <= k->now_ms) {
        ks_delete(k, e);
        return 0;
    }
    if (ks_schedule(k, e, when)) return -ENOMEM;
    ks_log_key(k, KS_LOG_EXPIRE, e, when);
    return 0;
}

/* Strict decimal int64, as Redis reads it: no spaces, no plus, no leading zeros. */
static inline int ks_parse_int(const char *p, size_t n, int64_t *out) {
    uint64_t value = 0;
    if (n == 0 || n > 20) return 0; /* also keeps off values that are not loaded */
    const int negative = *p == '-';
    if (negative) p++, n--;
    if (n == 0 || n > 19 || (*p == '0' && (n > 1 || negative))) return 0;
    for (size_t i = 0; i < n; i++) {
        if (p[i] < '0' || p[i] > '9') return 0;
        value = value * 10 + (uint64_t)(p[i] - '0');
    }
    if (value > (uint64_t)INT64_MAX + (uint64_t)negative) return 0;
    *out = negative ? (int64_t)(0 - value) : (int64_t)value;
    return 1;
}

/* Decimal digits of `value`; returns their number (at most 20). */
static inline int ks_format_int(char *out, int64_t value) {
    char digits[20];
    uint64_t left = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
    int n = 0, at = 0;
    do digits[n++] = (char)('0' + left % 10);
    while (left /= 10);
    if (value < 0) out[at++] = '-';
    while (n) out[at++] = digits[--n];
    return at;
}

/* INCRBY. 0, -errno, KS_WRONGTYPE, KS_NOT_INTEGER or KS_OVERFLOW. */
static inline int ks_incr(ks *k, int db, const void *key, size_t klen, int64_t by, int64_t *result) {
    const kent *e = ks_find(k, db, key, klen, k->now_ms);
    int64_t value = 0;
    char text[20];
    if (e) {
        const kval *v = (const kval *)e->value;
        if (e->type != KS_STRING) return KS_WRONGTYPE;
        if (!ks_parse_int(v->data, v->len, &value)) return KS_NOT_INTEGER;
    }
    if (__builtin_add_overflow(value, by, result)) return KS_OVERFLOW;
    return ks_set_bytes(k, db, key, klen, text, (size_t)ks_format_int(text, *result), 0, KS_KEEPTTL);
}

/* Put n bytes at `offset` of a string (created, padded with zeros as needed; a ghost must be loaded before); SETRANGE,
 * and APPEND at its length. *length gets the new length. 0, -errno or KS_WRONGTYPE. Lengths are the caller's to limit. */
static inline int ks_write(ks *k, int db, const void *key, size_t klen, uint64_t offset, const void *data, size_t n,
                           uint64_t *length) {
    kent *e = ks_find(k, db, key, klen, k->now_ms);
    kval *old = e ? (kval *)e->value : NULL;
    if (e && e->type != KS_STRING) return KS_WRONGTYPE;
    const uint64_t had = old ? old->len : 0;
    *length = offset + n > had ? offset + n : had;
    if (!n) {
        *length = had;
        return 0;
    }
    kval *v = old;
    if (!v || kval_shared(v) || v->cap < *length) {
        const int appends = had && *length > had; /* will be done again: leave room */
        const uint64_t room = !appends ? 0 : *length < KV_MAPPED ? *length : *length / 8;
        if (!(v = kval_new_cap(k->pool, had, *length + room))) return -ENOMEM;
        if (old) memcpy(v->data, old->data, had);
        if (!e && !(e = ks_claim(k, db, key, klen, ks_hash(k, key, klen)))) {
            kval_unref(v);
            return -ENOMEM;
        }
        if (old) v->flags |= old->flags & KV_DAMAGED;
        e->value = v;
        e->type = KS_STRING;
        if (old && kval_blob(old) && v->flags & KV_BIG) { /* the file stays the base of what the log adds to it */
            ((kbig *)v)->blob = kval_blob(old);
            ((kbig *)v)->crc = ((kbig *)old)->crc;
            kval_unref(old);
        } else {
            ks_drop_value(k, KS_STRING, old);
        }
    }
    if (offset > had) memset(v->data + had, 0, offset - had);
    memcpy(v->data + offset, data, n);
    v->len = *length;
    if (kval_blob(v)) v->flags |= KV_DIRTY;
    e->clock = ks_clock(k->now_ms);
    ks_account(k, e, kent_own_bytes(klen) + kval_bytes(v));
    k->dirty++;
    if (ks_logs(k)) {
        uint8_t *record = (uint8_t *)malloc(n + 8);
        if (record) {
            fr_put64(record, offset);
            memcpy(record + 8, data, n);
            klog_append(&k->log, KS_LOG_WRITE, e->db, key, klen, record, n + 8, NULL, 0);
            free(record);
        } else {
            k->log.error = ENOMEM;
            k->log.lost = 1;
        }
    }
    return 0;
}

/* ---- flush, scan, cycle ---- */

static inline void ks_bury_table(ks *k, kent **buckets, uint32_t bits) {
    if (!buckets) return;
    kgrave grave = {buckets, 0, (uint64_t)1 << bits};
    if (!klog_reserve((void **)&k->graves, &k->cap_graves, k->ngraves + 1, sizeof *k->graves)) {
        k->graves[k->ngraves++] = grave;
        return;
    }
    for (; grave.at < grave.count; grave.at++)
        for (kent *e = buckets[grave.at], *next; e; e = next) {
            next = e->next;
            ks_free_entry(k, e);
        }
    free(buckets);
}

static inline void ks_empty(ks *k, int db) {
    kdb *d = &k->db[db];
    if (d->expires) {
        size_t kept = 0;
        for (size_t i = 0; i < k->nheap; i++)
            if (k->heap[i].entry->db != db) k->heap[kept++] = k->heap[i];
        k->nheap = kept;
        for (size_t i = kept; i-- > 0;) kheap_down(k, i, k->heap[i]);
    }
    k->used_bytes -= d->bytes;
    ks_bury_table(k, d->now.buckets, d->now.bits);
    ks_bury_table(k, d->next.buckets, d->next.bits);
    memset(d, 0, sizeof *d);
}

/* Empty one database, or with -1 all databases. The keys are gone at once, their memory goes in slices. */
static inline void ks_flush(ks *k, int db) {
    k->dirty++;
    if (ks_logs(k))
        klog_append(&k->log, db < 0 ? KS_LOG_FLUSHALL : KS_LOG_FLUSHDB, (uint8_t)(db < 0 ? 0 : db), "", 0, "", 0, NULL, 0);
    for (int i = db < 0 ? 0 : db; i <= (db < 0 ? k->databases - 1 : db); i++) ks_empty(k, i);
}

/* Free buried tables until the deadline (ks_monotonic_us; 0: all of them). 1: there is more. */
static inline int ks_dig(ks *k, uint64_t deadline) {
    unsigned steps = 0;
    while (k->ngraves) {
        kgrave *g = &k->graves[k->ngraves - 1];
        for (; g->at < g->count; g->at++) {
            if (deadline && (++steps & 63) == 0 && ks_monotonic_us() >= deadline) return 1;
            for (kent *e = g->buckets[g->at], *next; e; e = next) {
                next = e->next;
                ks_free_entry(k, e);
            }
        }
        free(g->buckets);
        k->ngraves--;
    }
    return 0;
}

/* The chain that holds the keys from hash *cursor on; *cursor moves to the next chain, 0 after the last. The caller
 * skips entries whose hash is below the cursor it came with. */
static inline kent *ks_scan(const ks *k, int db, uint64_t *cursor) {
    const kdb *d = &k->db[db];
    if (!d->now.buckets) {
        *cursor = 0;
        return NULL;
    }
    kent **bucket = kdb_bucket(d, *cursor);
    const int in_now = bucket >= d->now.buckets && bucket < d->now.buckets + ((size_t)1 << d->now.bits);
    const uint32_t bits = in_now ? d->now.bits : d->next.bits;
    *cursor = ((*cursor >> (64 - bits)) + 1) << (64 - bits);
    return *bucket;
}

/* A random live entry, or NULL when there is none (or only due ones were met). */
static inline kent *ks_random(ks *k, int db) {
    const kdb *d = &k->db[db];
    for (int tries = 0; d->count && tries < 100; tries++) {
        uint64_t cursor = ks_random_u64(k);
        kent *chain, *e;
        do chain = ks_scan(k, db, &cursor);
        while (!chain && cursor);
        unsigned n = 0;
        for (e = chain; e; e = e->next) n++;
        if (!n) continue;
        for (e = chain, n = (unsigned)(ks_random_u64(k) % n); n; n--) e = e->next;
        if (!kent_due(e, k->now_ms)) return e;
    }
    return NULL;
}

/* Delete due keys, free flushed memory and go on resizing for about `budget_us`. Returns the keys deleted. */
static inline uint64_t ks_cycle(ks *k, uint64_t budget_us) {
    const uint64_t deadline = ks_monotonic_us() + budget_us;
    uint64_t n = 0;
    while (k->nheap && k->heap[0].when <= k->now_ms) {
        if (!ks_reap(k, k->heap[0].entry)) break;
        if ((++n & 15) == 0 && ks_monotonic_us() >= deadline) return n;
    }
    ks_dig(k, deadline);
    for (int db = 0; db < k->databases; db++) {
        kdb_balance(&k->db[db]);
        while (k->db[db].next.buckets && ks_monotonic_us() < deadline) kdb_step(&k->db[db], 64);
    }
    kpool_age(k->pool);
    klog_settle(&k->log);
    return n;
}

/* Memory of the tables themselves, beside used_bytes. */
static inline uint64_t ks_table_bytes(const ks *k) {
    uint64_t bytes = k->cap_heap * sizeof *k->heap;
    for (int db = 0; db < k->databases; db++) bytes += kdb_table_bytes(&k->db[db]);
    return bytes;
}

/* ---- the log, as the plane calls it ---- */

static inline size_t ks_log_pending(const ks *k) { return klog_pending(&k->log); }
static inline uint64_t ks_log_position(const ks *k) { return klog_position(&k->log); }
static inline int ks_log_flush(ks *k) { return klog_flush(&k->log); }

/* ---- tables ----
 *
 * Packed tables that C code looks up by name (block hashes of a prefix). Unlike the keys they may be asked for and
 * changed by any thread, so they stand apart, behind a lock; they are never logged, and no client can see them.
 *
 * A probe is a use of the prefix. It takes a number from the counter that numbers the uses of entries, so that whoever
 * looks for the least recently used entry can tell when its table was probed.
 */

static inline uint64_t ks_next_use(ks *k) { return __atomic_add_fetch(&k->uses, 1, __ATOMIC_RELAXED); }

/* The table as a reference the caller gives back with kval_unref, or NULL. With a time (ms since 1970) it is a use, and
 * a table that is due is none. */
static inline kval *ks_table_get(ks *k, const void *name, size_t n, uint64_t now_ms) {
    pthread_mutex_lock(&k->tables_lock);
    kent *e = ks_find(k->tables, 0, name, n, now_ms);
    kval *v = e ? e->v : NULL;
    if (v) kval_ref(v);
    if (v && now_ms) e->clock = (uint32_t)ks_next_use(k);
    pthread_mutex_unlock(&k->tables_lock);
    return v;
}

/* The number of a table's last use (or of when it was put); 0: there is none of that name. One that was not used for
 * four billion uses seems to have been used lately. */
static inline uint64_t ks_table_used(ks *k, const void *name, size_t n) {
    pthread_mutex_lock(&k->tables_lock);
    const kent *e = ks_find(k->tables, 0, name, n, 0);
    const uint64_t now = __atomic_load_n(&k->uses, __ATOMIC_RELAXED);
    const uint64_t used = e ? now - (uint32_t)((uint32_t)now - e->clock) : 0;
    pthread_mutex_unlock(&k->tables_lock);
    return used;
}

/* `expire`: ms since 1970, 0: never. */
static inline int ks_table_put(ks *k, const void *name, size_t n, const void *data, size_t len, uint64_t expire) {
    pthread_mutex_lock(&k->tables_lock);
    const int rc = ks_set_bytes(k->tables, 0, name, n, data, len, expire, 0);
    kent *e = rc ? NULL : ks_find(k->tables, 0, name, n, 0);
    if (e) e->clock = (uint32_t)__atomic_load_n(&k->uses, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&k->tables_lock);
    return rc;
}

static inline int ks_table_drop(ks *k, const void *name, size_t n) {
    pthread_mutex_lock(&k->tables_lock);
    const int there = ks_del(k->tables, 0, name, n);
    pthread_mutex_unlock(&k->tables_lock);
    return there;
}

/* Free everything but the Python objects, which are left in k->dead for the caller, and `k` itself. */
static inline void ks_clear(ks *k) {
    k->log.fd = -1; /* the end of the process is not the end of the keys */
    k->log.blob_fd = -1;
    for (int db = 0; db < k->databases; db++) ks_empty(k, db);
    ks_dig(k, 0);
    klog_free(&k->log);
    free(k->heap);
    free(k->graves);
    kpool_unref(k->pool);
    pthread_mutex_destroy(&k->tables_lock);
    if (k->tables) {
        ks_clear(k->tables);
        free(k->tables);
    }
}

#endif
