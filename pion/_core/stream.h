/* Bodies that move between sockets and files without being held in memory.
 *
 * fdref    a counted file descriptor (fdref.h)
 * extents  one bulk reply body (extents.h)
 * sink     one bulk argument written into a file as it arrives, optionally converted, with the CRC32C of what was
 *          written. It has one owner at a time.
 */
#ifndef PION_STREAM_H
#define PION_STREAM_H

#include "crc32c.h"
#include "extents.h"
#include "reserve.h"

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
