/* The log of the keyspace: effects are appended to a buffer by the functions that change the table, and one call per
 * batch writes them before the replies of that batch leave.
 *
 * Effects are absolute (this key has this value, this field is gone), so replaying a log over a snapshot that was
 * taken while the log was written gives the right state, whatever the order in which the snapshot saw the keys.
 *
 * A write that fails leaves the file at its last good size and the records in the buffer; `error` stays set, and
 * writers are to be refused, until ks_log_retry succeeds. A sync that fails is never retried on the same file, whose
 * pages the kernel may have dropped: only a new generation of the log clears `sync_error`.
 *
 * Values of KS_BLOB_MIN and more stand in a file of their own, written before the record that points at it and
 * unlinked after the record that drops it is on disk.
 */
#ifndef PION_KSLOG_H
#define PION_KSLOG_H

#include "framing.h"
#include "kval.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/uio.h>

/* Kinds of log and snapshot records. The object kinds carry the payloads of pion.store.keyspace.objects. */
enum {
    KS_LOG_SET = 1,    /* key, value, expire */
    KS_LOG_BLOB = 2,   /* key, value = id u64 | len u64 | crc u32, expire */
    KS_LOG_DEL = 3,    /* key */
    KS_LOG_EXPIRE = 4, /* key, expire (0: none) */
    KS_LOG_FLUSHDB = 5,
    KS_LOG_FLUSHALL = 6,
    KS_LOG_WRITE = 7, /* key, value = offset u64 | bytes: the string holds these bytes there */
    KS_LOG_SYNC = 8,  /* value = size u64: the file is on disk up to there */
    KS_LOG_GROUP = 9, /* value = bytes u64: as many bytes of records follow, all or none of which count */
    KS_LOG_END = 10,  /* value = records u64: the snapshot is complete */
    KS_LOG_HSET = 16,
    KS_LOG_HDEL = 17,
    KS_LOG_ZADD = 18,
    KS_LOG_ZREM = 19
};

enum { KS_SYNC_NO = 0, KS_SYNC_EVERYSEC = 1, KS_SYNC_ALWAYS = 2 };

#define KS_BLOB_MIN ((size_t)1 << 20)
#define KS_LOG_BY_REF ((size_t)16 << 10)    /* values from here on are written from where they are */
#define KS_LOG_SPILL ((size_t)16 << 20)     /* pending bytes that are written before the batch ends */
#define KS_BLOB_TYPE 0x424f4c42u            /* "BLOB" */
#define KS_BLOB_VERSION 1
#define KS_BLOB_KIND 2

struct klog_piece {
    size_t at; /* the value follows this many bytes of the buffer */
    kval *value;
};

struct klog_drop {
    uint64_t blob, position;
};

typedef struct klog {
    pthread_mutex_t lock; /* over drops and fresh, which the syncing thread takes from */
    int fd;      /* -1: nothing is logged */
    int blob_fd; /* directory of the value files, -1: none */
    int policy;
    int error;      /* errno of a failed write; refuses writers */
    int sync_error; /* errno of a failed sync */
    uint32_t seed;
    uint64_t size;    /* bytes of whole records in the file (atomic) */
    uint64_t base;    /* position at which this file begins: position = base + offset */
    uint64_t synced;  /* position up to which everything is on disk (atomic) */
    uint64_t marked;  /* `synced` of the last KS_LOG_SYNC record */
    uint64_t records; /* since the log was attached */
    uint8_t *buf;
    size_t len, cap;
    size_t by_ref; /* bytes of values in `pieces` */
    struct klog_piece *pieces;
    size_t npieces, cap_pieces;
    struct klog_drop *drops; /* blobs to unlink, in order of position; UINT64_MAX: not written yet */
    size_t ndrops, cap_drops, drops_written;
    uint64_t *fresh; /* blobs written since the last sync */
    size_t nfresh, cap_fresh;
    size_t group_at; /* buffer offset of an open GROUP record */
    uint64_t group_start;
    int in_group; /* depth */
    int lost; /* a record could not be buffered: only a new generation brings log and table together again */
} klog;

static inline void klog_init(klog *g) {
    memset(g, 0, sizeof *g);
    pthread_mutex_init(&g->lock, NULL);
    g->fd = g->blob_fd = -1;
}

static inline size_t klog_pending(const klog *g) { return g->len + g->by_ref; }

/* Position behind the last record, written or not. Positions grow over all generations. */
static inline uint64_t klog_position(const klog *g) { return g->base + g->size + klog_pending(g); }

/* Position behind the last record in the file; any thread may ask. */
static inline uint64_t klog_written(const klog *g) { return g->base + __atomic_load_n(&g->size, __ATOMIC_ACQUIRE); }

static inline int klog_reserve(void **array, size_t *cap, size_t need, size_t item) {
    if (need <= *cap) return 0;
    size_t grown = *cap ? *cap * 2 : 64;
    while (grown < need) grown *= 2;
    void *p = realloc(*array, grown * item);
    if (!p) return -ENOMEM;
    *array = p;
    *cap = grown;
    return 0;
}

static inline int ks_fsync(int fd) {
#if defined(__APPLE__)
    if (fcntl(fd, F_FULLFSYNC) == 0 || fsync(fd) == 0) return 0;
#else
    if (fdatasync(fd) == 0) return 0;
#endif
    return -errno;
}

/* Write all of iov at `offset`; 0 or -errno. iov is consumed. */
static inline int ks_pwritev_all(int fd, struct iovec *iov, int n, uint64_t offset) {
    while (n) {
        const ssize_t done = pwritev(fd, iov, n < 256 ? n : 256, (off_t)offset);
        if (done < 0) {
            if (errno == EINTR) continue;
            return -errno;
        }
        if (done == 0) return -EIO;
        offset += (uint64_t)done;
        size_t left = (size_t)done;
        while (n && left >= iov->iov_len) {
            left -= iov->iov_len;
            iov++;
            n--;
        }
        if (left) {
            iov->iov_base = (char *)iov->iov_base + left;
            iov->iov_len -= left;
        }
    }
    return 0;
}

static inline void klog_append(klog *g, uint8_t kind, uint8_t db, const void *key, size_t klen, const void *value,
                               size_t vlen, kval *v, uint64_t expire);

/* In front of a batch: say how much of this file is known to be on disk. */
static inline void klog_mark(klog *g) {
    const uint64_t synced = __atomic_load_n(&g->synced, __ATOMIC_ACQUIRE);
    if (synced <= g->marked || synced <= g->base || klog_pending(g)) return;
    const uint64_t offset = synced - g->base;
    g->marked = synced;
    klog_append(g, KS_LOG_SYNC, 0, "", 0, &offset, 8, NULL, 0);
}

/* Append one record. `v` (or NULL) may be the value, which is then referenced instead of copied when large. Memory that
 * cannot be had counts as a failed write. */
static inline void klog_append(klog *g, uint8_t kind, uint8_t db, const void *key, size_t klen, const void *value,
                               size_t vlen, kval *v, uint64_t expire) {
    if (klen + vlen > FR_LOG_MAX - FR_LOG_FIXED) {
        g->error = EFBIG;
        g->lost = 1;
        return;
    }
    klog_mark(g);
    const int by_ref = v && vlen >= KS_LOG_BY_REF;
    const size_t inline_len = FR_LOG_HEADER + klen + (by_ref ? 0 : vlen);
    if (klog_reserve((void **)&g->buf, &g->cap, g->len + inline_len, 1) ||
        (by_ref && klog_reserve((void **)&g->pieces, &g->cap_pieces, g->npieces + 1, sizeof *g->pieces))) {
        g->error = ENOMEM;
        g->lost = 1;
        return;
    }
    uint8_t *p = g->buf + g->len;
    fr_log_encode(p, kind, db, key, (uint32_t)klen, value, (uint32_t)vlen, expire, g->seed);
    memcpy(p + FR_LOG_HEADER, key, klen);
    g->len += inline_len;
    if (by_ref) {
        kval_ref(v);
        g->pieces[g->npieces].at = g->len;
        g->pieces[g->npieces++].value = v;
        g->by_ref += vlen;
    } else if (vlen) {
        memcpy(p + FR_LOG_HEADER + klen, value, vlen);
    }
    g->records++;
}

/* Records up to klog_group_end count together or not at all. Groups nest; the outermost counts. */
static inline void klog_group_begin(klog *g) {
    if (g->fd < 0 || g->in_group++) return;
    klog_mark(g);
    g->group_at = g->len;
    const uint64_t nothing = 0;
    klog_append(g, KS_LOG_GROUP, 0, "", 0, &nothing, 8, NULL, 0);
    g->group_start = klog_position(g);
}

static inline void klog_group_end(klog *g) {
    if (!g->in_group || --g->in_group) return;
    const uint64_t bytes = klog_position(g) - g->group_start;
    if (g->error) return;
    if (!bytes) { /* nothing happened: take the record back */
        g->len = g->group_at;
        g->records--;
        return;
    }
    uint8_t *p = g->buf + g->group_at;
    memcpy(p + FR_LOG_HEADER, &bytes, 8);
    fr_log_encode(p, KS_LOG_GROUP, 0, "", 0, p + FR_LOG_HEADER, 8, 0, g->seed);
}

static inline void klog_clear(klog *g) {
    for (size_t i = 0; i < g->npieces; i++) kval_unref(g->pieces[i].value);
    g->npieces = 0;
    g->by_ref = g->len = 0;
    if (g->cap > (4u << 20)) { /* one large batch is no reason to keep its buffer */
        free(g->buf);
        g->buf = NULL;
        g->cap = 0;
    }
}

static inline int klog_write(klog *g) {
    struct iovec few[128], *iov = few;
    const size_t most = 2 * g->npieces + 1;
    if (most > 128 && !(iov = (struct iovec *)malloc(most * sizeof *iov))) return -ENOMEM;
    size_t from = 0;
    int n = 0;
    for (size_t i = 0; i < g->npieces; i++) {
        if (g->pieces[i].at > from) {
            iov[n].iov_base = g->buf + from;
            iov[n++].iov_len = g->pieces[i].at - from;
            from = g->pieces[i].at;
        }
        iov[n].iov_base = g->pieces[i].value->data;
        iov[n++].iov_len = g->pieces[i].value->len;
    }
    if (g->len > from) {
        iov[n].iov_base = g->buf + from;
        iov[n++].iov_len = g->len - from;
    }
    const int rc = ks_pwritev_all(g->fd, iov, n, g->size);
    if (iov != few) free(iov);
    return rc;
}

/* Move the oldest of the value files written since the last sync to `out`; returns how many. */
static inline size_t klog_take_fresh(klog *g, uint64_t *out, size_t most) {
    pthread_mutex_lock(&g->lock);
    const size_t n = g->nfresh < most ? g->nfresh : most;
    if (n) {
        memcpy(out, g->fresh, n * sizeof *out);
        memmove(g->fresh, g->fresh + n, (g->nfresh - n) * sizeof *out);
    }
    g->nfresh -= n;
    pthread_mutex_unlock(&g->lock);
    return n;
}

/* Make these value files and their names durable. */
static inline int ks_blob_sync(int dirfd, const uint64_t *blobs, size_t n) {
    for (size_t i = 0; i < n; i++) {
        char name[24];
        snprintf(name, sizeof name, "%016llx", (unsigned long long)blobs[i]);
        const int fd = openat(dirfd, name, O_RDONLY | O_CLOEXEC);
        if (fd < 0) {
            if (errno == ENOENT) continue; /* dropped since */
            return -errno;
        }
        const int rc = ks_fsync(fd);
        close(fd);
        if (rc) return rc;
    }
    return n && fsync(dirfd) ? -errno : 0;
}

static inline int klog_sync_blobs(klog *g) {
    uint64_t blobs[64];
    size_t n;
    while ((n = klog_take_fresh(g, blobs, 64))) {
        const int rc = ks_blob_sync(g->blob_fd, blobs, n);
        if (rc) return rc;
    }
    return 0;
}

/* Write what is pending; with KS_SYNC_ALWAYS also make it durable. 0, or -errno of this or an earlier failure. */
static inline int klog_flush(klog *g) {
    if (g->fd < 0) return 0;
    if (g->error) return -g->error;
    if (g->sync_error && g->policy == KS_SYNC_ALWAYS) return -g->sync_error;
    if (!klog_pending(g)) return 0;
    const int rc = klog_write(g);
    if (rc) {
        /* Should even this fail, replay stops at the torn record, and a retry writes over it. */
        if (ftruncate(g->fd, (off_t)g->size)) g->error = errno;
        g->error = -rc;
        return rc;
    }
    const uint64_t size = g->size + klog_pending(g), position = g->base + size;
    __atomic_store_n(&g->size, size, __ATOMIC_RELEASE);
    klog_clear(g);
    if (g->drops_written < g->ndrops) {
        pthread_mutex_lock(&g->lock);
        for (; g->drops_written < g->ndrops; g->drops_written++) g->drops[g->drops_written].position = position;
        pthread_mutex_unlock(&g->lock);
    }
    if (g->policy == KS_SYNC_ALWAYS) {
        int failed = klog_sync_blobs(g);
        if (!failed) failed = ks_fsync(g->fd);
        if (failed) {
            g->sync_error = -failed;
            return failed;
        }
        __atomic_store_n(&g->synced, position, __ATOMIC_RELEASE);
    }
    return 0;
}

/* Move the blobs whose dropping is on disk to `out` (room for `most`); returns how many. */
static inline size_t klog_take_drops(klog *g, uint64_t *out, size_t most) {
    const uint64_t synced = __atomic_load_n(&g->synced, __ATOMIC_ACQUIRE);
    size_t n = 0;
    pthread_mutex_lock(&g->lock);
    while (n < most && n < g->drops_written && g->drops[n].position <= synced) {
        out[n] = g->drops[n].blob;
        n++;
    }
    if (n) memmove(g->drops, g->drops + n, (g->ndrops - n) * sizeof *g->drops);
    g->ndrops -= n;
    g->drops_written -= n;
    pthread_mutex_unlock(&g->lock);
    return n;
}

/* Try again after a failed write: 0 when everything pending is in the file. */
static inline int klog_retry(klog *g) {
    if (g->lost) return -g->error;
    g->error = 0;
    return klog_flush(g);
}

/* The file `blob` is no longer needed once the records appended so far (and in this batch) are on disk. */
static inline void klog_drop_blob(klog *g, uint64_t blob) {
    if (g->blob_fd < 0) return;
    pthread_mutex_lock(&g->lock);
    if (!klog_reserve((void **)&g->drops, &g->cap_drops, g->ndrops + 1, sizeof *g->drops)) {
        g->drops[g->ndrops].blob = blob;
        g->drops[g->ndrops++].position = UINT64_MAX;
    } /* else the file stays until the next start */
    pthread_mutex_unlock(&g->lock);
}

/* Between batches: what was dropped without a record of its own (the rest of a flush) goes with the records before it. */
static inline void klog_settle(klog *g) {
    if (g->drops_written == g->ndrops || klog_pending(g) || g->error) return;
    pthread_mutex_lock(&g->lock);
    for (; g->drops_written < g->ndrops; g->drops_written++) g->drops[g->drops_written].position = klog_position(g);
    pthread_mutex_unlock(&g->lock);
}

/* Remember that a mover or this thread wrote the file `blob`. */
static inline int klog_fresh_blob(klog *g, uint64_t blob) {
    pthread_mutex_lock(&g->lock);
    const int rc = klog_reserve((void **)&g->fresh, &g->cap_fresh, g->nfresh + 1, sizeof *g->fresh);
    if (!rc) g->fresh[g->nfresh++] = blob;
    pthread_mutex_unlock(&g->lock);
    return rc;
}

/* Offset of the first record at or after `offset` that is whole, or -1: tells damage in the middle from a torn tail. */
static inline int64_t klog_resync(int fd, uint64_t offset, uint64_t end, uint32_t seed, int *error) {
    const size_t room = 4u << 20;
    uint8_t *window = (uint8_t *)malloc(room);
    int64_t found = -1;
    *error = window ? 0 : ENOMEM;
    while (window && found < 0 && offset + FR_LOG_HEADER <= end) {
        const size_t want = end - offset < room ? (size_t)(end - offset) : room;
        const ssize_t got = fr_pread(fd, window, want, offset);
        if (got < (ssize_t)want) {
            *error = got < 0 ? errno : EIO;
            break;
        }
        for (size_t i = 0; i + FR_LOG_HEADER <= want; i++) {
            const uint8_t *p = window + i;
            const uint32_t len = fr_get32(p);
            if (len < FR_LOG_FIXED || len > FR_LOG_MAX || 8 + (uint64_t)len > end - offset - i || p[8] == 0 ||
                p[8] > KS_LOG_ZREM || p[9] >= 64 || fr_get32(p + 10) > len - FR_LOG_FIXED)
                continue;
            uint32_t crc = crc32c(seed, p, 4);
            if (8 + (size_t)len <= want - i) crc = crc32c(crc, p + 8, len);
            else if ((*error = fr_crc_file(fd, offset + i + 8, len, crc, &crc))) break;
            if (crc == fr_get32(p + 4)) {
                found = (int64_t)(offset + i);
                break;
            }
        }
        if (*error || want < room) break;
        offset += want - FR_LOG_HEADER + 1;
    }
    free(window);
    return found;
}

static inline void klog_free(klog *g) {
    klog_clear(g);
    free(g->buf);
    free(g->pieces);
    free(g->drops);
    free(g->fresh);
    pthread_mutex_destroy(&g->lock);
    klog_init(g);
}

enum { KS_WRITE_PIECE = 1 << 20 };

/* Write n bytes at `offset`; the medium starts on each piece while the next is copied, for a sync that follows at once. */
static inline int ks_write_ahead(int fd, const char *data, size_t n, uint64_t offset) {
    for (size_t at = 0, piece; at < n; at += piece) {
        piece = n - at < KS_WRITE_PIECE ? n - at : KS_WRITE_PIECE;
        struct iovec iov[1] = {{(char *)data + at, piece}};
        const int rc = ks_pwritev_all(fd, iov, 1, offset + at);
        if (rc) return rc;
#if defined(__linux__)
        (void)!sync_file_range(fd, (off_t)(offset + at), (off_t)piece, SYNC_FILE_RANGE_WRITE);
#endif
    }
    return 0;
}

enum { KS_BLOB_HEAD = 2 * FR_HEADER };

/* Value files. Any thread may write one: open, put what there is, in order, end. 0 or -errno, and a descriptor from open.
 * *crc is the checksum of what was put: fr_seed(blob) at the beginning. */
static inline int ks_blob_open(int dirfd, uint64_t blob) {
    char name[24];
    snprintf(name, sizeof name, "%016llx", (unsigned long long)blob);
    const int fd = openat(dirfd, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    return fd < 0 ? -errno : fd;
}

/* `durable`: the medium starts on it at once. */
static inline int ks_blob_put(int fd, const char *data, size_t n, size_t at, uint32_t *crc, int durable) {
    *crc = crc32c(*crc, data, n);
    if (durable) return ks_write_ahead(fd, data, n, KS_BLOB_HEAD + at);
    struct iovec iov[1] = {{(char *)data, n}};
    return ks_pwritev_all(fd, iov, 1, KS_BLOB_HEAD + at);
}

/* Close a file, and remove it when `rc` says that it is not to be. rc, or -errno of the close. */
static inline int ks_blob_close(int dirfd, uint64_t blob, int fd, int rc) {
    char name[24];
    if (close(fd) && !rc) rc = -errno;
    snprintf(name, sizeof name, "%016llx", (unsigned long long)blob);
    if (rc) unlinkat(dirfd, name, 0);
    return rc;
}

/* All `n` bytes are put: write the head and close it. A file that could not be written is removed. `durable`: its content
 * is on disk when this returns (its name is not). */
static inline int ks_blob_end(int dirfd, uint64_t blob, int fd, size_t n, uint32_t crc, int durable) {
    uint8_t head[KS_BLOB_HEAD];
    fr_header h;
    memset(&h, 0, sizeof h);
    h.kind = FR_KIND_FILE;
    h.state = FR_VALID;
    h.aux = KS_BLOB_TYPE;
    h.start = KS_BLOB_VERSION;
    h.token = blob;
    h.header_len = FR_HEADER;
    fr_encode(head, &h, NULL, 0);
    h.kind = KS_BLOB_KIND;
    h.aux = h.start = 0;
    h.token = 0;
    h.payload_len = n;
    h.payload_crc = crc;
    fr_encode(head + FR_HEADER, &h, NULL, fr_seed(blob));
    struct iovec iov[1] = {{head, sizeof head}};
    int rc = ks_pwritev_all(fd, iov, 1, 0);
    if (durable && !rc) rc = ks_fsync(fd);
    return ks_blob_close(dirfd, blob, fd, rc);
}

/* Write n bytes as value file `blob` under `dirfd`; *crc gets their checksum. */
static inline int ks_blob_write(int dirfd, uint64_t blob, const char *data, size_t n, uint32_t *crc, int durable) {
    const int fd = ks_blob_open(dirfd, blob);
    if (fd < 0) return fd;
    *crc = fr_seed(blob);
    const int rc = ks_blob_put(fd, data, n, 0, crc, durable);
    return rc ? ks_blob_close(dirfd, blob, fd, rc) : ks_blob_end(dirfd, blob, fd, n, *crc, durable);
}

/* From now on the file holds the bytes of `v` (KV_BIG). */
static inline void ks_blob_attach(kval *v, uint64_t blob, uint32_t crc) {
    ((kbig *)v)->blob = blob;
    ((kbig *)v)->crc = crc;
    v->flags &= ~(uint32_t)KV_DIRTY;
}

/* Load a ghost. 0, -errno, or -EILSEQ when the file does not hold what the log says. */
static inline int ks_blob_read(int dirfd, kval *v) {
    kbig *b = (kbig *)v;
    char name[24];
    uint8_t head[2 * FR_HEADER];
    fr_header file, h;
    size_t alloc = 0;
    snprintf(name, sizeof name, "%016llx", (unsigned long long)b->blob);
    const int fd = openat(dirfd, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -errno;
    char *data = NULL;
    const uint32_t seed = fr_seed(b->blob);
    int rc = -EILSEQ;
    ssize_t got = fr_pread(fd, head, sizeof head, 0);
    if (got < 0) rc = -errno;
    if (got == (ssize_t)sizeof head && fr_decode(head, FR_HEADER, 0, &file) == FR_OK && file.token == b->blob &&
        file.aux == KS_BLOB_TYPE && file.start == KS_BLOB_VERSION &&
        fr_decode(head + FR_HEADER, FR_HEADER, seed, &h) == FR_OK &&
        h.payload_len == v->len && h.payload_crc == b->crc) {
        data = (char *)kpool_take(b->pool, v->len, &alloc);
        got = data ? fr_pread(fd, data, v->len, sizeof head) : 0;
        if (!data) rc = -ENOMEM;
        else if (got < 0) rc = -errno;
        else if ((size_t)got == v->len && crc32c(seed, data, v->len) == b->crc) rc = 0;
    }
    close(fd);
    if (rc) {
        if (data) kpool_give(b->pool, data, alloc);
        return rc;
    }
    v->data = data;
    v->cap = b->alloc = alloc;
    v->flags &= ~(uint32_t)KV_GHOST;
    return 0;
}

#endif
