/* Bodies that move between sockets and files without being held in memory.
 *
 * fdref    a counted file descriptor; the last reference closes it on a background thread (the last close of an unlinked
 *          4 GB file takes seconds)
 * extents  one bulk reply body: pieces of files, zero fill, optionally decoded to FP32 on the way out
 * sink     one bulk argument written into a file as it arrives, optionally converted, with the CRC32C of what was written
 *
 * Positions of a reader are kept as output bytes (extents_at), so a reply can stop and go on anywhere, in any thread.
 * An fdref's own lock-free count is the only thing two threads touch at once; extents and sinks have one owner at a time.
 */
#ifndef PION_STREAM_H
#define PION_STREAM_H

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined(__linux__)
#include <sys/sendfile.h>
#endif

#include "crc32c.h"
#include "jobs.h"
#include "quant.h"
#include "reserve.h"

#define STREAM_PIECE (512u * 1024)       /* read, convert and write in pieces that stay in the L2/L3 cache */
#define STREAM_SENDFILE_MIN (32u * 1024) /* shorter pieces of a file are gathered into one buffer first */
#define STREAM_GAP 1024u                 /* bytes between two pieces that are read and thrown away to save a call */
#define STREAM_IOV 256
#define STREAM_RAW (-1)

#if defined(MSG_NOSIGNAL)
#define STREAM_NOSIGNAL MSG_NOSIGNAL
#else
#define STREAM_NOSIGNAL 0 /* macOS: SO_NOSIGPIPE is set on every socket instead */
#endif

/* ---- fdref ---------------------------------------------------------------------------------------------------- */

typedef struct fdref {
    job closing;     /* first member: the closer gets the fdref from its job */
    jobs *closer;    /* NULL: the last reference closes in its own thread */
    _Atomic int refs;
    int fd;
} fdref;

static inline void fdref__close(job *item, void *state) {
    (void)state;
    fdref *ref = (fdref *)item;
    close(ref->fd);
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

/* ---- extents ------------------------------------------------------------------------------------------------------ */

typedef struct extent {
    fdref *ref;      /* NULL: n zero bytes */
    int64_t offset;
    uint64_t n;      /* stored bytes */
} extent;

typedef struct extents {
    _Atomic int refs;
    int nseg;
    int decode;          /* STREAM_RAW or a format */
    uint32_t dim;
    uint64_t row;        /* stored bytes of a row, when decoding */
    uint64_t total;      /* reply bytes */
    extent seg[];
} extents;

/* A reader's position. seg/seg_start only speed up the search and never go backwards. */
typedef struct extents_at {
    uint64_t out;
    uint64_t seg_start;
    int seg;
} extents_at;

enum { STREAM_AGAIN = 0, STREAM_SHORT = -100000 /* the file is shorter than promised */ };

static inline extents *extents_new(int nseg, int decode, uint32_t dim) {
    extents *e = (extents *)calloc(1, sizeof *e + (size_t)nseg * sizeof(extent));
    if (!e) return NULL;
    atomic_store_explicit(&e->refs, 1, memory_order_relaxed);
    e->nseg = nseg;
    e->decode = decode;
    e->dim = dim;
    e->row = decode == STREAM_RAW ? 0 : q_row_bytes(decode, dim);
    return e;
}

/* After the segments are filled in: total reply bytes. 0, or -EINVAL when a decoded segment is not whole rows. */
static inline int extents_seal(extents *e) {
    uint64_t stored = 0;
    for (int i = 0; i < e->nseg; i++) {
        if (e->decode != STREAM_RAW && (e->row == 0 || e->seg[i].n % e->row)) return -EINVAL;
        if (e->seg[i].n > (uint64_t)INT64_MAX - stored) return -EINVAL;
        stored += e->seg[i].n;
    }
    if (e->decode == STREAM_RAW) e->total = stored;
    else e->total = stored / e->row * e->dim * 4;
    return 0;
}

static inline extents *extents_ref(extents *e) {
    atomic_fetch_add_explicit(&e->refs, 1, memory_order_relaxed);
    return e;
}

static inline void extents_unref(extents *e) {
    if (!e || atomic_fetch_sub_explicit(&e->refs, 1, memory_order_acq_rel) != 1) return;
    for (int i = 0; i < e->nseg; i++) fdref_unref(e->seg[i].ref);
    free(e);
}

/* Bring at->seg to the segment that holds stored byte `pos`; empty segments are stepped over. */
static inline void extents__seek(const extents *e, extents_at *at, uint64_t pos) {
    while (at->seg < e->nseg && pos >= at->seg_start + e->seg[at->seg].n) {
        at->seg_start += e->seg[at->seg].n;
        at->seg++;
    }
}

/* preadv that survives EINTR. nowait: resident pages only (Linux; elsewhere answers -EAGAIN). */
static inline ssize_t stream__preadv(int fd, struct iovec *iov, int n, int64_t offset, int nowait) {
    for (;;) {
        ssize_t got;
        if (nowait) {
#if defined(__linux__) && defined(RWF_NOWAIT)
            got = preadv2(fd, iov, n, (off_t)offset, RWF_NOWAIT);
#else
            errno = EAGAIN;
            got = -1;
#endif
        } else {
            got = preadv(fd, iov, n, (off_t)offset);
        }
        if (got >= 0 || errno != EINTR) return got < 0 ? -errno : got;
    }
}

/* Read `want` stored bytes from position `pos` into buf, across segments. Neighbouring small segments of one file are
 * read by one preadv, the bytes between them going to `junk`. 0, -errno or STREAM_SHORT; -EAGAIN only with nowait. */
static inline int extents__gather(const extents *e, extents_at at, uint64_t pos, char *buf, size_t want, int nowait) {
    char junk[STREAM_GAP];
    while (want) {
        extents__seek(e, &at, pos);
        if (at.seg >= e->nseg) return STREAM_SHORT;
        const extent *first = &e->seg[at.seg];
        uint64_t inside = pos - at.seg_start;
        size_t take = first->n - inside < want ? (size_t)(first->n - inside) : want;
        if (!first->ref) {
            memset(buf, 0, take);
            buf += take, pos += take, want -= take;
            continue;
        }
        struct iovec iov[STREAM_IOV];
        int64_t start = first->offset + (int64_t)inside, end = start + (int64_t)take;
        size_t useful = take;
        int n = 1;
        iov[0].iov_base = buf;
        iov[0].iov_len = take;
        for (int i = at.seg + 1; i < e->nseg && useful < want && n + 2 <= STREAM_IOV; i++) {
            const extent *next = &e->seg[i];
            if (!next->n) continue;
            int64_t gap = next->offset - end;
            if (next->ref != first->ref || gap < 0 || gap > (int64_t)STREAM_GAP) break;
            size_t more = next->n < want - useful ? (size_t)next->n : want - useful;
            if (gap) {
                iov[n].iov_base = junk;
                iov[n++].iov_len = (size_t)gap;
            }
            iov[n].iov_base = buf + useful;
            iov[n++].iov_len = more;
            useful += more;
            end = next->offset + (int64_t)more;
        }
        ssize_t got = stream__preadv(first->ref->fd, iov, n, start, nowait);
        if (got < 0) return (int)got;
        if (got == 0) return nowait ? -EAGAIN : STREAM_SHORT;
        if (got < end - start) {             /* short: keep what is surely useful, ask again for the rest */
            if (nowait) return -EAGAIN;
            useful = (size_t)got < take ? (size_t)got : take;
        }
        buf += useful, pos += useful, want -= useful;
    }
    return 0;
}

/* The longest comfortable window of reply bytes at at->out: pointer and length into the scratch buffers, read (and
 * decoded) only when the scratch does not hold it yet. Returns the length, 0 at the end, <0 on error. */
static inline ssize_t extents_window(const extents *e, extents_at *at, scratch *s, size_t max, int nowait, const char **p) {
    if (at->out >= e->total) return 0;
    if (s->key == e && at->out >= s->from && at->out < s->from + s->len) {
        *p = s->window + (at->out - s->from);
        size_t left = s->len - (size_t)(at->out - s->from);
        return (ssize_t)(left < max ? left : max);
    }
    s->key = NULL;
    size_t piece = max < STREAM_PIECE ? max : STREAM_PIECE;
    int rc;
    if (e->decode == STREAM_RAW) {
        uint64_t left = e->total - at->out;
        if (piece > left) piece = (size_t)left;
        extents__seek(e, at, at->out);
        if (scratch_grow(&s->in, &s->in_cap, STREAM_PIECE)) return -ENOMEM;
        if ((rc = extents__gather(e, *at, at->out, s->in, piece, nowait))) return rc;
        s->from = at->out;
        s->window = s->in;
        s->len = piece;
    } else {
        uint64_t row_out = (uint64_t)e->dim * 4, row = at->out / row_out, rows_left = e->total / row_out - row;
        uint64_t rows = STREAM_PIECE / row_out;
        if (rows < 1) rows = 1;
        if (rows > rows_left) rows = rows_left;
        extents__seek(e, at, row * e->row);
        if (scratch_grow(&s->in, &s->in_cap, rows * e->row > STREAM_PIECE ? rows * e->row : STREAM_PIECE)) return -ENOMEM;
        if (scratch_grow(&s->out, &s->out_cap, rows * row_out > STREAM_PIECE ? rows * row_out : STREAM_PIECE)) return -ENOMEM;
        if ((rc = extents__gather(e, *at, row * e->row, s->in, (size_t)(rows * e->row), nowait))) return rc;
        if (q_decode(e->decode, s->in, s->out, (size_t)rows, e->dim) != Q_OK) return -EINVAL;
        s->from = row * row_out;
        s->window = s->out;
        s->len = (size_t)(rows * row_out);
    }
    s->key = e;
    *p = s->window + (at->out - s->from);
    size_t left = s->len - (size_t)(at->out - s->from);
    return (ssize_t)(left < max ? left : max);
}

/* Copy up to n reply bytes into buf. Returns the count, <0 on error. */
static inline ssize_t extents_read(const extents *e, extents_at *at, scratch *s, char *buf, size_t n) {
    size_t done = 0;
    while (done < n) {
        const char *p = NULL;
        ssize_t got = extents_window(e, at, s, n - done, 0, &p);
        if (got < 0) return got;
        if (got == 0) break;
        memcpy(buf + done, p, (size_t)got);
        done += (size_t)got;
        at->out += (uint64_t)got;
    }
    return (ssize_t)done;
}

static inline ssize_t stream__sendfile(int sock, int fd, int64_t offset, size_t n) {
#if defined(__linux__)
    off_t from = (off_t)offset;
    return sendfile(sock, fd, &from, n);
#elif defined(__APPLE__)
    off_t len = (off_t)n;
    int rc = sendfile(fd, sock, (off_t)offset, &len, NULL, 0);
    if (len > 0) return (ssize_t)len;     /* macOS: -1 with EAGAIN after a partial send */
    return rc;
#else
    (void)sock, (void)fd, (void)offset, (void)n;
    errno = ENOSYS;
    return -1;
#endif
}

/* Send up to max bytes at `at` to a non-blocking socket. >0 bytes sent, STREAM_AGAIN, or <0: -errno, STREAM_SHORT. */
static inline ssize_t extents_send(const extents *e, extents_at *at, int sock, size_t max, scratch *s) {
    ssize_t sent;
    if (at->out >= e->total) return 0;
    if (e->decode == STREAM_RAW) {
        extents__seek(e, at, at->out);
        const extent *seg = &e->seg[at->seg];
        uint64_t inside = at->out - at->seg_start;
        size_t left = seg->n - inside < max ? (size_t)(seg->n - inside) : max;
        if (seg->ref && left >= STREAM_SENDFILE_MIN) {
            do sent = stream__sendfile(sock, seg->ref->fd, seg->offset + (int64_t)inside, left);
            while (sent < 0 && errno == EINTR);
            if (sent == 0) return STREAM_SHORT;      /* only a truncated file answers 0 here */
            if (sent > 0) {
                at->out += (uint64_t)sent;
                return sent;
            }
            if (errno != EINVAL && errno != ENOSYS)  /* a file system without sendfile: read and send */
                return errno == EAGAIN || errno == EWOULDBLOCK ? STREAM_AGAIN : -errno;
        }
    }
    const char *p = NULL;
    ssize_t n = extents_window(e, at, s, max, 0, &p);
    if (n <= 0) return n;
    do sent = send(sock, p, (size_t)n, MSG_DONTWAIT | STREAM_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? STREAM_AGAIN : -errno;
    at->out += (uint64_t)sent;
    return sent;
}

/* ---- sink ----------------------------------------------------------------------------------------------------------- */

typedef struct sink {
    _Atomic int refs;
    fdref *ref;              /* NULL: take the bytes and forget them */
    int64_t offset;          /* of the next written byte */
    uint64_t want, got, written;
    uint64_t reserve;        /* disk blocks to ask for before the first write */
    int conv;                /* STREAM_RAW or from << 24 | to (a format takes 24 bits) */
    uint32_t dim;
    uint64_t row_in, row_out;
    uint32_t crc;
    int error;               /* errno of the first failure; the rest of the body is then drained */
    int64_t rows, bad_row;   /* rows converted; first row that does not fit the target format, or -1 */
    char *carry;             /* the beginning of a row that has not arrived as a whole */
    size_t ncarry;
} sink;

static inline sink *sink_new(fdref *ref, int64_t offset, uint64_t want, int conv, uint32_t dim, uint32_t crc) {
    sink *s = (sink *)calloc(1, sizeof *s);
    if (!s) return NULL;
    atomic_store_explicit(&s->refs, 1, memory_order_relaxed);
    s->ref = fdref_ref(ref);
    s->offset = offset;
    s->want = want;
    s->conv = conv;
    s->dim = dim;
    s->crc = crc;
    s->bad_row = -1;
    if (conv != STREAM_RAW) {
        s->row_in = q_row_bytes(conv >> 24, dim);
        s->row_out = q_row_bytes(conv & 0xffffff, dim);
    }
    return s;
}

static inline void sink_unref(sink *s) {
    if (!s || atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) != 1) return;
    fdref_unref(s->ref);
    free(s->carry);
    free(s);
}

static inline sink *sink_ref(sink *s) {
    atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed);
    return s;
}

static inline int sink_done(const sink *s) { return s->got >= s->want; }

static inline void sink__write(sink *s, const char *p, size_t n) {
    s->crc = crc32c(s->crc, p, n);
    while (n && !s->error) {
        ssize_t w = pwrite(s->ref->fd, p, n, (off_t)s->offset);
        if (w < 0) {
            if (errno != EINTR) s->error = errno;
            continue;
        }
        if (w == 0) s->error = ENOSPC;       /* a write that moves nothing would be repeated for ever */
        p += w, n -= (size_t)w, s->offset += w, s->written += (uint64_t)w;
    }
}

/* Convert and write whole rows. */
static inline void sink__rows(sink *s, const char *p, size_t rows, scratch *t) {
    size_t step = (size_t)(STREAM_PIECE / (s->row_out > s->row_in ? s->row_out : s->row_in));
    if (step < 1) step = 1;
    if (scratch_grow(&t->out, &t->out_cap, step * s->row_out > STREAM_PIECE ? step * s->row_out : STREAM_PIECE)) {
        s->error = ENOMEM;
        return;
    }
    while (rows && !s->error && s->bad_row < 0) {
        size_t n = rows < step ? rows : step;
        int64_t bad;
        int rc = q_encode(s->conv >> 24, s->conv & 0xffffff, p, t->out, n, s->dim, &bad);
        if (rc == Q_REFUSED) s->bad_row = s->rows + bad;
        else if (rc != Q_OK) s->error = EINVAL;
        if (rc != Q_OK) return;
        sink__write(s, t->out, n * s->row_out);
        s->rows += (int64_t)n;
        p += n * s->row_in, rows -= n;
    }
}

/* Take the next n bytes of the body (n never more than what is left). Blocks on the file; call from a mover or a feed. */
static inline void sink_feed(sink *s, const char *p, size_t n, scratch *t) {
    s->got += n;
    t->key = NULL;
    if (!s->ref || s->error || s->bad_row >= 0) return;
    if (s->reserve) {
        reserve_blocks(s->ref->fd, (uint64_t)s->offset, s->reserve);
        s->reserve = 0;
    }
    if (s->conv == STREAM_RAW) {
        sink__write(s, p, n);
        return;
    }
    if (s->ncarry) {
        size_t take = s->row_in - s->ncarry < n ? (size_t)(s->row_in - s->ncarry) : n;
        memcpy(s->carry + s->ncarry, p, take);
        s->ncarry += take, p += take, n -= take;
        if (s->ncarry < s->row_in) return;
        s->ncarry = 0;
        sink__rows(s, s->carry, 1, t);
    }
    size_t rows = (size_t)(n / s->row_in), rest = (size_t)(n - rows * s->row_in);
    if (rows) sink__rows(s, p, rows, t);
    if (rest && !s->error && s->bad_row < 0) {
        if (!s->carry && !(s->carry = (char *)malloc(s->row_in))) {
            s->error = ENOMEM;
            return;
        }
        memcpy(s->carry, p + rows * s->row_in, rest);
        s->ncarry = rest;
    }
}

#endif
