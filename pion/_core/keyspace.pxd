"""C declarations of keyspace.h for other core modules (the plane). They may change in a minor release."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t


cdef extern from "keyspace.h" nogil:
    enum:
        KS_DATABASES_MAX
        KS_NONE, KS_STRING, KS_HASH, KS_ZSET
        KS_KEEPTTL, KS_NOLOG
        KS_WRONGTYPE, KS_NOT_INTEGER, KS_OVERFLOW
        KS_SYNC_NO, KS_SYNC_EVERYSEC, KS_SYNC_ALWAYS
        KS_LOG_SET, KS_LOG_BLOB, KS_LOG_DEL, KS_LOG_EXPIRE, KS_LOG_FLUSHDB, KS_LOG_FLUSHALL, KS_LOG_WRITE
        KS_LOG_SYNC, KS_LOG_GROUP, KS_LOG_END, KS_LOG_HSET, KS_LOG_HDEL, KS_LOG_ZADD, KS_LOG_ZREM
        KV_BIG, KV_GHOST, KV_DIRTY, KV_DAMAGED
    const size_t KS_BLOB_MIN

    struct kpool:
        size_t cached

    struct kval:
        uint32_t refs
        uint32_t flags
        size_t len
        size_t cap
        char *data

    struct kbig:
        uint64_t blob
        uint32_t crc

    struct kent:
        kent *next
        uint64_t hash
        uint64_t expire
        uint64_t bytes
        kval *v
        void *value
        uint32_t klen
        uint32_t clock
        uint8_t type
        uint8_t db
        char *key

    struct kdb:
        uint64_t count
        uint64_t expires
        uint64_t bytes

    struct klog_drop:
        uint64_t blob
        uint64_t position

    struct klog:
        int fd
        int blob_fd
        int policy
        int error
        int sync_error
        int lost
        int in_group
        uint32_t seed
        uint64_t size
        uint64_t base
        uint64_t synced
        uint64_t marked
        uint64_t records
        uint8_t *buf
        size_t len
        klog_drop *drops
        size_t ndrops
        size_t drops_written
        size_t nfresh

    struct ks:
        kdb *db
        int databases
        uint64_t now_ms
        uint64_t fixed_now
        uint64_t uses
        uint64_t hits
        uint64_t misses
        uint64_t expired
        uint64_t used_bytes
        uint64_t dirty
        uint64_t maxmemory
        uint64_t evicted
        int policy
        size_t ncandidates
        size_t nheap
        void **dead
        size_t ndead
        size_t ngraves
        kpool *pool
        klog log

    kval *kval_new(kpool *pool, size_t len)
    kval *kval_ghost(kpool *pool, size_t len, uint64_t blob, uint32_t crc)
    void kval_ref(kval *v)
    void kval_unref(kval *v)
    bint kval_shared(const kval *v)
    uint64_t kval_blob(const kval *v)
    size_t kval_bytes(const kval *v)
    void kpool_trim(kpool *p, size_t keep)

    size_t klog_pending(const klog *g)
    uint64_t klog_position(const klog *g)
    uint64_t klog_written(const klog *g)
    void klog_clear(klog *g)
    int ks_fsync(int fd)
    void klog_init(klog *g)
    void klog_append(klog *g, uint8_t kind, uint8_t db, const void *key, size_t klen, const void *value, size_t vlen,
                     kval *v, uint64_t expire)
    void klog_group_begin(klog *g)
    void klog_group_end(klog *g)
    int klog_flush(klog *g)
    int klog_retry(klog *g)
    void klog_free(klog *g)
    void klog_drop_blob(klog *g, uint64_t blob)
    int klog_fresh_blob(klog *g, uint64_t blob)
    size_t klog_take_fresh(klog *g, uint64_t *out, size_t most)
    int ks_blob_sync(int dirfd, const uint64_t *blobs, size_t n)
    size_t klog_take_drops(klog *g, uint64_t *out, size_t most)
    int64_t klog_resync(int fd, uint64_t offset, uint64_t end, uint32_t seed, int *error)
    int ks_blob_write(int dirfd, uint64_t blob, const char *data, size_t n, uint32_t *crc, bint durable)
    void ks_blob_attach(kval *v, uint64_t blob, uint32_t crc)
    int ks_blob_read(int dirfd, kval *v)

    ks *ks_new(int databases, uint64_t seed0, uint64_t seed1)
    void ks_clear(ks *k)
    uint64_t ks_tick(ks *k)
    uint32_t ks_clock(uint64_t now_ms)
    uint64_t ks_hash(const ks *k, const void *key, size_t n)
    bint kent_due(const kent *e, uint64_t now_ms)
    bint ks_logs(const ks *k)
    int ks_refuses(const ks *k)
    kent *ks_entry(const ks *k, int db, uint64_t hash, const void *key, size_t klen)
    kent *ks_find(ks *k, int db, const void *key, size_t klen, uint64_t now_ms)
    kent *ks_read(ks *k, int db, const void *key, size_t klen, uint64_t now_ms)
    kent *ks_insert(ks *k, int db, uint64_t hash, const void *key, size_t klen)
    void ks_remove(ks *k, kent *e)
    int ks_schedule(ks *k, kent *e, uint64_t when)
    int ks_reserve_due(ks *k, uint64_t expire)
    void ks_replace(ks *k, kent *e, void *value, int type)
    void ks_account(ks *k, kent *e, uint64_t nbytes)
    size_t kent_own_bytes(size_t klen)
    int ks_blob_save(ks *k, kval *v)
    void ks_log_string(ks *k, const kent *e)
    int ks_set(ks *k, int db, const void *key, size_t klen, kval *v, uint64_t expire, int flags)
    int ks_set_bytes(ks *k, int db, const void *key, size_t klen, const void *data, size_t n, uint64_t expire,
                     int flags)
    int ks_set_object(ks *k, int db, const void *key, size_t klen, void *obj, int type, uint64_t nbytes)
    void ks_delete(ks *k, kent *e)
    bint ks_del(ks *k, int db, const void *key, size_t klen)
    int ks_expire(ks *k, kent *e, uint64_t when)
    int ks_incr(ks *k, int db, const void *key, size_t klen, int64_t by, int64_t *result)
    int ks_write(ks *k, int db, const void *key, size_t klen, uint64_t offset, const void *data, size_t n,
                 uint64_t *length)
    void ks_flush(ks *k, int db)
    void ks_empty(ks *k, int db)
    bint ks_dig(ks *k, uint64_t deadline)
    kent *ks_scan(const ks *k, int db, uint64_t *cursor)
    uint64_t ks_random_u64(ks *k)
    kent *ks_random(ks *k, int db)
    uint64_t ks_cycle(ks *k, uint64_t budget_us)
    uint64_t ks_table_bytes(const ks *k)
    uint64_t ks_next_use(ks *k)
    kval *ks_table_get(ks *k, const void *name, size_t n, uint64_t now_ms)
    uint64_t ks_table_used(ks *k, const void *name, size_t n)
    int ks_table_put(ks *k, const void *name, size_t n, const void *data, size_t len, uint64_t expire)
    bint ks_table_drop(ks *k, const void *name, size_t n)
    size_t ks_log_pending(const ks *k)
    uint64_t ks_log_position(const ks *k)
    int ks_log_flush(ks *k)


cdef extern from "kevict.h" nogil:
    enum:
        KS_NOEVICTION, KS_ALLKEYS_LRU, KS_VOLATILE_LRU, KS_VOLATILE_TTL
    bint ks_over(const ks *k)
    bint ks_make_room(ks *k)


cdef class Value:
    cdef kval *v


cdef class Keyspace:
    cdef ks *k
    cdef public object codec
    cdef uint64_t lost
    cdef inline void drain(self)
    cdef int check(self, int db) except -1
    cdef kent *find(self, int db, bytes key) except? NULL
    cdef kent *loaded(self, kent *e) except? NULL
