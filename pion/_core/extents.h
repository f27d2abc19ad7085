/* One bulk reply body that is never held in memory as a whole: pieces of files and of memory, zero fill, as they are or
 * decoded to FP32 on the way out.
 *
 * Positions of a reader are kept as output bytes (extents_at), so a reply can stop and go on anywhere, in any thread.
 * Extents have one owner at a time.
 */
#ifndef PION_EXTENTS_H
#define PION_EXTENTS_H

#include <errno.h>
#include <limits.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#if defined(__linux__)
#include <sys/sendfile.h>
#endif

#include "fdref.h"
#include "quant.h"
#include "quant_keys.h"

#define STREAM_PIECE (512u * 1024)       /* read, convert and write in pieces that stay in the L2/L3 cache */
#define STREAM_SENDFILE_MIN (32u * 1024) /* shorter pieces of a file are gathered into one buffer first */
#define STREAM_GAP 1024u                 /* bytes between two pieces that are read and thrown away to save a call */
#define STREAM_IOV 256
#define STREAM_RAW (-1)
#define STREAM_MIXED (-2) /* every segment says what it holds */

#if defined(MSG_NOSIGNAL)
#define STREAM_NOSIGNAL MSG_NOSIGNAL
#else
#define STREAM_NOSIGNAL 0 /* macOS: SO_NOSIGPIPE is set on every socket instead */
#endif
#if defined(MSG_MORE)
#define STREAM_MORE MSG_MORE
#else
#define STREAM_MORE 0
#endif

typedef struct extent {
    fdref *ref;       /* NULL: bytes in memory, or n zero bytes */
    const char *mem;  /* the head, which belongs to the extents */
    int64_t offset;
    uint64_t n;       /* stored bytes */
    int fmt;          /* STREAM_MIXED only, like what follows: format of the stored rows */
    uint32_t first;   /* position of the first stored row in its sequence */
    uint32_t skip;    /* stored rows before the first one that is wanted */
    uint32_t rows;    /* rows wanted */
} extent;

typedef struct extents {
    _Atomic int refs;
    int nseg;
    int decode;          /* STREAM_RAW, STREAM_MIXED or a format */
    uint32_t dim;
    double theta;        /* base of the rotary embedding, for formats that un-rotate; 0 = none */
    char *head;          /* bytes in front of the first segment */
    uint64_t row;        /* stored bytes of a row, when decoding */
    uint64_t total;      /* reply bytes */
    extent seg[];
} extents;

/* `rows` stored rows of a segment of mixed extents, beginning `from` rows behind its first, to FP32. 0 or -1. */
static inline int extents__decode(const extents *e, const extent *x, uint64_t from, const char *in, char *out, size_t rows) {
    if (!q_key_bits(x->fmt)) return q_decode(x->fmt, in, out, rows, e->dim) == Q_OK ? 0 : -1;
    return q_keys_decode(x->fmt, in, out, rows / QK_ROWS, e->dim, x->first + from, e->theta) == Q_OK ? 0 : -1;
}

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
    e->row = decode < 0 ? 0 : q_row_bytes(decode, dim);
    return e;
}

/* Whether a segment of mixed extents holds whole groups, and the rows it promises are among them. */
static inline int extents__fits(const extents *e, const extent *x) {
    const uint64_t row = q_row_bytes(x->fmt, e->dim), rows = row ? x->n / row : 0;
    if (!row || x->n % row || rows % (uint32_t)q_group_rows(x->fmt) || rows > UINT32_MAX) return 0;
    return (uint64_t)x->skip + x->rows <= rows;
}

/* After the segments are filled in: total reply bytes. 0, or -EINVAL when a decoded segment is not whole rows. */
static inline int extents_seal(extents *e) {
    uint64_t stored = 0, rows = 0;
    for (int i = 0; i < e->nseg; i++) {
        const extent *x = &e->seg[i];
        if (e->decode >= 0 && (e->row == 0 || x->n % e->row)) return -EINVAL;
        if (e->decode == STREAM_MIXED && !extents__fits(e, x)) return -EINVAL;
        if (x->n > (uint64_t)INT64_MAX - stored) return -EINVAL;
        stored += x->n;
        rows += x->rows;
    }
    if (e->decode == STREAM_RAW) e->total = stored;
    else e->total = (e->decode == STREAM_MIXED ? rows : stored / e->row) * e->dim * 4;
    return 0;
}

static inline extents *extents_ref(extents *e) {
    atomic_fetch_add_explicit(&e->refs, 1, memory_order_relaxed);
    return e;
}

static inline void extents_unref(extents *e) {
    if (!e || atomic_fetch_sub_explicit(&e->refs, 1, memory_order_acq_rel) != 1) return;
    for (int i = 0; i < e->nseg; i++) fdref_unref(e->seg[i].ref);
    free(e->head);
    free(e);
}

/* Bring at->seg to the segment that holds stored byte `pos` (mixed: output byte); empty segments are stepped over. */
static inline void extents__seek(const extents *e, extents_at *at, uint64_t pos) {
    for (; at->seg < e->nseg; at->seg++) {
        const extent *x = &e->seg[at->seg];
        const uint64_t n = e->decode == STREAM_MIXED ? (uint64_t)x->rows * e->dim * 4 : x->n;
        if (pos < at->seg_start + n) return;
        at->seg_start += n;
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

/* Read n bytes of one file. 0, -errno or STREAM_SHORT; -EAGAIN only with nowait. */
static inline int stream__pread(int fd, char *buf, size_t n, int64_t offset, int nowait) {
    while (n) {
        struct iovec iov = {buf, n};
        const ssize_t got = stream__preadv(fd, &iov, 1, offset, nowait);
        if (got < 0) return (int)got;
        if (got == 0 || (nowait && (size_t)got < n)) return nowait ? -EAGAIN : STREAM_SHORT;
        buf += got, n -= (size_t)got, offset += got;
    }
    return 0;
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
            if (first->mem) memcpy(buf, first->mem + inside, take);
            else memset(buf, 0, take);
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

/* Fill the scratch with reply bytes from at->out on, as they are stored. 0 or <0 on error. */
static inline int extents__window_raw(const extents *e, extents_at *at, scratch *s, size_t piece, int nowait) {
    const uint64_t left = e->total - at->out;
    int rc;
    if (piece > left) piece = (size_t)left;
    extents__seek(e, at, at->out);
    if (scratch_grow(&s->in, &s->in_cap, STREAM_PIECE)) return -ENOMEM;
    if ((rc = extents__gather(e, *at, at->out, s->in, piece, nowait))) return rc;
    s->from = at->out;
    s->window = s->in;
    s->len = piece;
    return 0;
}

/* Room for `rows` stored rows of `row` bytes, and for the same rows as FP32. */
static inline int extents__room(const extents *e, scratch *s, uint64_t rows, uint64_t row) {
    const uint64_t out = rows * e->dim * 4;
    if (scratch_grow(&s->in, &s->in_cap, rows * row > STREAM_PIECE ? rows * row : STREAM_PIECE)) return -ENOMEM;
    return scratch_grow(&s->out, &s->out_cap, out > STREAM_PIECE ? out : STREAM_PIECE) ? -ENOMEM : 0;
}

/* The same, decoded from the one format of all segments. */
static inline int extents__window_rows(const extents *e, extents_at *at, scratch *s, int nowait) {
    const uint64_t row_out = (uint64_t)e->dim * 4, row = at->out / row_out, rows_left = e->total / row_out - row;
    uint64_t rows = STREAM_PIECE / row_out;
    int rc;
    if (rows < 1) rows = 1;
    if (rows > rows_left) rows = rows_left;
    extents__seek(e, at, row * e->row);
    if (extents__room(e, s, rows, e->row)) return -ENOMEM;
    if ((rc = extents__gather(e, *at, row * e->row, s->in, (size_t)(rows * e->row), nowait))) return rc;
    if (q_decode(e->decode, s->in, s->out, (size_t)rows, e->dim) != Q_OK) return -EINVAL;
    s->from = row * row_out;
    s->window = s->out;
    s->len = (size_t)(rows * row_out);
    return 0;
}

/* The same for one segment of mixed extents: whole groups are decoded, what was not asked for is left out. */
static inline int extents__window_mixed(const extents *e, extents_at *at, scratch *s, int nowait) {
    extents__seek(e, at, at->out);
    const extent *x = &e->seg[at->seg];
    const uint64_t row_out = (uint64_t)e->dim * 4, row = q_row_bytes(x->fmt, e->dim), group = (uint32_t)q_group_rows(x->fmt);
    const uint64_t here = x->skip + (at->out - at->seg_start) / row_out, last = (uint64_t)x->skip + x->rows;
    const uint64_t from = here / group * group, most = STREAM_PIECE / row_out / group * group;
    uint64_t rows = (last - from + group - 1) / group * group;
    if (rows > (most ? most : group)) rows = most ? most : group;
    if (extents__room(e, s, rows, row)) return -ENOMEM;
    if (!x->ref) {
        memset(s->out, 0, (size_t)(rows * row_out));
    } else {
        const int rc = stream__pread(x->ref->fd, s->in, (size_t)(rows * row), x->offset + (int64_t)(from * row), nowait);
        if (rc) return rc;
        if (extents__decode(e, x, from, s->in, s->out, (size_t)rows)) return -EINVAL;
    }
    const uint64_t first = from > x->skip ? from : x->skip, end = from + rows < last ? from + rows : last;
    s->from = at->seg_start + (first - x->skip) * row_out;
    s->window = s->out + (first - from) * row_out;
    s->len = (size_t)((end - first) * row_out);
    return 0;
}

/* The longest comfortable window of reply bytes at at->out: pointer and length into the scratch buffers, read (and
 * decoded) only when the scratch does not hold it yet. Returns the length, 0 at the end, <0 on error. */
static inline ssize_t extents_window(const extents *e, extents_at *at, scratch *s, size_t max, int nowait, const char **p) {
    if (at->out >= e->total) return 0;
    if (s->key != e || at->out < s->from || at->out >= s->from + s->len) {
        int rc;
        s->key = NULL;
        if (e->decode == STREAM_RAW) rc = extents__window_raw(e, at, s, max < STREAM_PIECE ? max : STREAM_PIECE, nowait);
        else if (e->decode == STREAM_MIXED) rc = extents__window_mixed(e, at, s, nowait);
        else rc = extents__window_rows(e, at, s, nowait);
        if (rc) return rc;
        s->key = e;
    }
    *p = s->window + (at->out - s->from);
    const size_t left = s->len - (size_t)(at->out - s->from);
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

/* Reading failed: whoever asks for the files again is to know. Returns rc. */
static inline ssize_t extents__failed(const extents *e, ssize_t rc) {
    for (int i = 0; i < e->nseg; i++)
        if (e->seg[i].ref)
            atomic_store_explicit(&e->seg[i].ref->failed, rc == STREAM_SHORT ? EIO : (int)-rc, memory_order_relaxed);
    return rc;
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
        if (seg->mem && at->seg + 1 < e->nseg && e->seg[at->seg + 1].ref && e->seg[at->seg + 1].n >= STREAM_SENDFILE_MIN) {
            do sent = send(sock, seg->mem + inside, left, MSG_DONTWAIT | STREAM_NOSIGNAL | STREAM_MORE);
            while (sent < 0 && errno == EINTR);
            if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? STREAM_AGAIN : -errno;
            at->out += (uint64_t)sent;
            return sent;
        }
        if (seg->ref && left >= STREAM_SENDFILE_MIN) {
            do sent = stream__sendfile(sock, seg->ref->fd, seg->offset + (int64_t)inside, left);
            while (sent < 0 && errno == EINTR);
            if (sent == 0) return extents__failed(e, STREAM_SHORT);      /* only a truncated file answers 0 here */
            if (sent > 0) {
                at->out += (uint64_t)sent;
                return sent;
            }
            if (errno == EIO) return extents__failed(e, -EIO);
            if (errno != EINVAL && errno != ENOSYS)  /* a file system without sendfile: read and send */
                return errno == EAGAIN || errno == EWOULDBLOCK ? STREAM_AGAIN : -errno;
        }
    }
    const char *p = NULL;
    ssize_t n = extents_window(e, at, s, max, 0, &p);
    if (n == STREAM_SHORT || n == -EIO) return extents__failed(e, n);
    if (n <= 0) return n;
    do sent = send(sock, p, (size_t)n, MSG_DONTWAIT | STREAM_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? STREAM_AGAIN : -errno;
    at->out += (uint64_t)sent;
    return sent;
}

#endif
