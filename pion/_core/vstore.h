/* Where the rows of an entry stand in its file.
 *
 * One vs_map for each side and layer: a sorted array of extents that never overlap. A later store wins, so putting rows
 * that are already there cuts the older extents. All rows of a map have the same stored size, hence an extent is cut by
 * arithmetic alone. Records are aligned to 64 bytes; bit 0 of `record` says that the payload's checksum is known to be
 * right (this process wrote it or has read it).
 *
 * Key forms encode 64 neighbouring rows together. Such a layer has two maps: one of sealed groups, whose extents begin and
 * end at multiples of 64 and whose rows count a 64th of a block each, and one of loose fp16 rows, those of groups that are
 * not whole. Where both have a row, the sealed one counts.
 */
#ifndef PION_VSTORE_H
#define PION_VSTORE_H

#include "framing.h"
#include "quant.h"
#include "quant_keys.h"

#include <fcntl.h>
#include <sys/uio.h>

#define VS_CHECKED ((uint64_t)1)
#define VS_STORE 3 /* record kinds the C code reads; the others are listed in pion/store/layout.py */
#define VS_TRIM 6
#define VS_LAYERS 80
#define VS_GROUP QK_ROWS
#define VS_LOOSE 1u       /* flag in a record's aux: loose rows of a key form. The format's parameter is in bits 16..31 */
#define VS_ALIGN_FROM (512u << 10) /* payloads from this size on start at a multiple of VS_BIG_ALIGN */
#define VS_BIG_ALIGN (16u << 10)
#define VS_PIECE (1u << 20)

typedef struct vs_extent {
    uint32_t start, count;
    uint64_t offset, record;
} vs_extent;

typedef struct vs_map {
    vs_extent *at;
    uint32_t n, cap;
    uint32_t tokens;    /* rows the side reports: the largest end, lowered by a trim */
    uint32_t stride;    /* stored bytes of a row, 0 before the first store */
    uint32_t unchecked; /* extents without VS_CHECKED */
    uint32_t group;     /* 0, or the rows that stand and fall together */
    uint64_t live;      /* rows that are there */
} vs_map;

/* Format of a record's rows, as everywhere in memory: the code, and its parameter from bit 8 on. */
static inline int vs_format(const fr_header *h) { return h->fmt | (int)(h->aux >> 16) << 8; }
static inline void vs_set_format(fr_header *h, int fmt) {
    h->fmt = (uint8_t)fmt;
    h->aux = (h->aux & 0xffff) | (uint32_t)(fmt >> 8) << 16;
}
static inline int vs_is_keys(int fmt) { return q_key_bits(fmt) != 0; }

static inline void vs_free(vs_map *m) {
    free(m->at);
    memset(m, 0, sizeof *m);
}

/* Index of the first extent that ends behind `row`. */
static inline uint32_t vs_find(const vs_map *m, uint32_t row) {
    uint32_t lo = 0, hi = m->n;
    if (m->n && m->at[m->n - 1].start + m->at[m->n - 1].count <= row) return m->n;
    while (lo < hi) {
        const uint32_t mid = lo + (hi - lo) / 2;
        if (m->at[mid].start + m->at[mid].count > row) hi = mid;
        else lo = mid + 1;
    }
    return lo;
}

/* Room for two more extents than there are: all that one vs_put can need. 0 or -1. */
static inline int vs_room(vs_map *m) {
    if (m->n + 2 <= m->cap) return 0;
    const uint32_t cap = m->cap ? m->cap * 2 : 4;
    vs_extent *at = (vs_extent *)realloc(m->at, cap * sizeof *at);
    if (!at) return -1;
    m->at = at;
    m->cap = cap;
    return 0;
}

static inline vs_extent vs_cut(const vs_extent *e, uint32_t from, uint32_t to, uint32_t stride) {
    vs_extent out = {from, to - from, e->offset + (uint64_t)(from - e->start) * stride, e->record};
    return out;
}

/* Put `fresh` (or nothing, when NULL) in the place of rows [start, end). vs_room must have succeeded. Returns the rows
 * that were there before. */
static inline uint64_t vs_splice(vs_map *m, uint32_t start, uint32_t end, const vs_extent *fresh) {
    const uint32_t i = vs_find(m, start);
    vs_extent piece[3];
    uint32_t pieces = 0, j = i;
    uint64_t replaced = 0;
    if (i < m->n && m->at[i].start < start) piece[pieces++] = vs_cut(&m->at[i], m->at[i].start, start, m->stride);
    if (fresh) piece[pieces++] = *fresh;
    for (; j < m->n && m->at[j].start < end; j++) {
        const vs_extent *old = &m->at[j];
        const uint32_t old_end = old->start + old->count, from = old->start > start ? old->start : start;
        replaced += (old_end < end ? old_end : end) - from;
        m->unchecked -= !(old->record & VS_CHECKED);
        if (old_end > end) piece[pieces++] = vs_cut(old, end, old_end, m->stride);
    }
    memmove(m->at + i + pieces, m->at + j, (m->n - j) * sizeof *m->at);
    for (uint32_t k = 0; k < pieces; k++) {
        m->at[i + k] = piece[k];
        m->unchecked += !(piece[k].record & VS_CHECKED);
    }
    m->n = m->n - (j - i) + pieces;
    m->live -= replaced;
    return replaced;
}

/* Take in rows [start, start + count) at `offset`. vs_room must have succeeded. Returns the rows that were replaced. */
static inline uint64_t vs_put(vs_map *m, uint32_t start, uint32_t count, uint64_t offset, uint64_t record) {
    const vs_extent fresh = {start, count, offset, record};
    const uint64_t replaced = vs_splice(m, start, start + count, &fresh);
    m->live += count;
    if (start + count > m->tokens) m->tokens = start + count;
    return replaced;
}

/* Forget rows from `rows` on, and all of a group that goes beyond; returns how many of them were there. */
static inline uint64_t vs_trim(vs_map *m, uint32_t rows) {
    uint64_t gone = 0;
    if (m->group) rows -= rows % m->group;
    while (m->n && m->at[m->n - 1].start + m->at[m->n - 1].count > rows) {
        vs_extent *last = &m->at[m->n - 1];
        if (last->start < rows) {
            gone += last->start + last->count - rows;
            last->count = rows - last->start;
            break;
        }
        gone += last->count;
        m->unchecked -= !(last->record & VS_CHECKED);
        m->n--;
    }
    m->live -= gone;
    if (m->tokens > rows) m->tokens = rows;
    return gone;
}

/* The next piece of [*row, end): file bytes when *hit, else rows that are not there. Neighbours in the file are joined.
 * *i starts as vs_find(m, *row). */
static inline void vs_next(const vs_map *m, uint32_t *i, uint32_t *row, uint32_t end, int *hit, uint64_t *offset,
                           uint32_t *rows) {
    if (*i >= m->n || m->at[*i].start > *row) {
        const uint32_t stop = *i < m->n && m->at[*i].start < end ? m->at[*i].start : end;
        *hit = 0;
        *offset = 0;
        *rows = stop - *row;
        *row = stop;
        return;
    }
    const uint32_t first = *row;
    *hit = 1;
    *offset = m->at[*i].offset + (uint64_t)(first - m->at[*i].start) * m->stride;
    for (;;) {
        const uint32_t stop = m->at[*i].start + m->at[*i].count;
        if (stop > end) {
            *row = end;
            break;
        }
        *row = stop;
        (*i)++;
        if (stop == end || *i >= m->n || m->at[*i].start != stop ||
            m->at[*i].offset != *offset + (uint64_t)(stop - first) * m->stride)
            break;
    }
    *rows = *row - first;
}

/* The next piece of [*row, end) of a layer with two maps (either may be NULL): 1 = sealed rows, 2 = loose ones, 0 = rows
 * that are not there. *offset is that of the piece's first row, which for sealed rows may lie inside a block. */
static inline int vs_next_of_two(const vs_map *sealed, const vs_map *loose, uint32_t *row, uint32_t end, uint64_t *offset,
                                 uint32_t *rows) {
    int hit;
    uint32_t i = sealed ? vs_find(sealed, *row) : 0;
    if (sealed && i < sealed->n && sealed->at[i].start <= *row) {
        vs_next(sealed, &i, row, end, &hit, offset, rows);
        return 1;
    }
    const uint32_t stop = sealed && i < sealed->n && sealed->at[i].start < end ? sealed->at[i].start : end;
    if (!loose) {
        *offset = 0;
        *rows = stop - *row;
        *row = stop;
        return 0;
    }
    i = vs_find(loose, *row);
    vs_next(loose, &i, row, stop, &hit, offset, rows);
    return hit ? 2 : 0;
}

/* Loose rows that a sealed group hides: those of a cut that a crash interrupted. */
static inline uint64_t vs_hidden(const vs_map *sealed, const vs_map *loose) {
    uint64_t hidden = 0;
    for (uint32_t i = 0; i < loose->n; i++) {
        const uint32_t end = loose->at[i].start + loose->at[i].count;
        uint32_t row = loose->at[i].start, j = vs_find(sealed, row);
        for (; j < sealed->n && sealed->at[j].start < end; j++) {
            const uint32_t to = sealed->at[j].start + sealed->at[j].count;
            if (sealed->at[j].start > row) row = sealed->at[j].start;
            hidden += (to < end ? to : end) - row;
            row = to;
        }
    }
    return hidden;
}

static inline uint32_t vs_align(uint64_t payload) { return payload >= VS_ALIGN_FROM ? VS_BIG_ALIGN : FR_ALIGN; }

/* pwritev of a whole record; 0 or errno. Short writes go on, so that the file system can say why. */
static inline int vs_writev(int fd, struct iovec *iov, int n, uint64_t offset) {
    while (n) {
        ssize_t done = pwritev(fd, iov, n, (off_t)offset);
        if (done < 0) {
            if (errno == EINTR) continue;
            return errno;
        }
        if (done == 0) return ENOSPC;
        offset += (uint64_t)done;
        while (n && (size_t)done >= iov->iov_len) {
            done -= (ssize_t)iov->iov_len;
            iov++;
            n--;
        }
        if (n && done) {
            iov->iov_base = (char *)iov->iov_base + done;
            iov->iov_len -= (size_t)done;
        }
    }
    return 0;
}

/* Write one record at `offset` of fd: header, payload, padding to the next record. The checksum is filled in. 0 or errno. */
static inline int vs_write_record(int fd, uint64_t offset, fr_header *h, const void *payload, uint32_t seed) {
    static const uint8_t zeros[VS_BIG_ALIGN + FR_ALIGN];
    uint8_t head[FR_HEADER];
    h->attrs_len = 0;
    h->header_len = fr_header_len(offset, 0, vs_align(h->payload_len));
    h->payload_crc = crc32c(seed, payload, h->payload_len);
    fr_encode(head, h, NULL, seed);
    struct iovec iov[4] = {
        {head, FR_HEADER},
        {(void *)(uintptr_t)zeros, h->header_len - FR_HEADER},
        {(void *)(uintptr_t)payload, h->payload_len},
        {(void *)(uintptr_t)zeros, fr_round(h->payload_len, FR_ALIGN) - h->payload_len},
    };
    return vs_writev(fd, iov, 4, offset);
}

/* Read a header of 64 bytes (store and trim records carry no attributes). FR_OK, FR_IO (errno) or what is wrong. */
static inline int vs_read_header(int fd, uint64_t offset, uint32_t seed, fr_header *h) {
    uint8_t head[FR_HEADER];
    const ssize_t got = fr_pread(fd, head, sizeof head, offset);
    if (got < 0) return FR_IO;
    return fr_decode(head, (size_t)got, seed, h);
}

/* Compare a stored payload with its checksum. FR_OK, FR_BAD_CRC, FR_TORN (the file ends early), FR_IO, FR_... */
static inline int vs_check_record(int fd, uint64_t offset, uint32_t seed) {
    fr_header h;
    uint32_t crc;
    const int rc = vs_read_header(fd, offset, seed, &h);
    if (rc) return rc;
    const int error = fr_crc_file(fd, offset + h.header_len, h.payload_len, seed, &crc);
    if (error) {
        errno = error;
        return error == EIO ? FR_TORN : FR_IO;
    }
    return crc == h.payload_crc ? FR_OK : FR_BAD_CRC;
}

/* Copy the extents [i, j) of a map, which follow each other without a gap, into one record at `at` of another file.
 * `buf` holds VS_PIECE bytes. Returns 0 or errno; *total gets the length of the record. */
static inline int vs_merge(const vs_map *m, uint32_t i, uint32_t j, int from, int to, uint64_t at, fr_header *h,
                           uint32_t seed, uint8_t *buf, uint64_t *total) {
    size_t have = 0;
    h->attrs_len = 0;
    h->start = m->at[i].start;
    h->count = m->at[j - 1].start + m->at[j - 1].count - h->start;
    h->payload_len = (uint64_t)h->count * m->stride;
    h->header_len = fr_header_len(at, 0, vs_align(h->payload_len));
    h->payload_crc = seed;
    uint64_t out = at + h->header_len;
    int error = 0;
    for (; i < j; i++) {
        uint64_t offset = m->at[i].offset, left = (uint64_t)m->at[i].count * m->stride;
        while (left) {
            const size_t want = left < VS_PIECE - have ? (size_t)left : VS_PIECE - have;
            const ssize_t got = fr_pread(from, buf + have, want, offset);
            if (got < 0 || (size_t)got < want) return got < 0 ? errno : EIO;
            offset += want;
            left -= want;
            have += want;
            if (have < VS_PIECE && (left || i + 1 < j)) continue;
            h->payload_crc = crc32c(h->payload_crc, buf, have);
            struct iovec iov = {buf, have};
            if ((error = vs_writev(to, &iov, 1, out))) return error;
            out += have;
            have = 0;
        }
    }
    uint8_t head[FR_HEADER];
    fr_encode(head, h, NULL, seed);
    struct iovec iov = {head, FR_HEADER};
    if ((error = vs_writev(to, &iov, 1, at))) return error;
    *total = fr_total(h);
    return 0;
}

/* Copy a whole record, whatever its kind, into a file of another seed; the old checksum is compared on the way.
 * Returns FR_OK, FR_BAD_CRC or FR_IO (errno). attrs as in fr_encode. */
static inline int vs_recode(int from, uint64_t at, fr_header *h, const uint8_t *attrs, uint32_t seed, int to,
                            uint64_t to_at, uint32_t to_seed, uint8_t *buf) {
    uint32_t old = seed, fresh = to_seed;
    uint64_t offset = at + h->header_len, left = h->payload_len;
    h->header_len = fr_header_len(to_at, h->attrs_len, vs_align(h->payload_len));
    uint64_t out = to_at + h->header_len;
    while (left) {
        const size_t want = left < VS_PIECE ? (size_t)left : VS_PIECE;
        const ssize_t got = fr_pread(from, buf, want, offset);
        if (got < 0 || (size_t)got < want) {
            errno = got < 0 ? errno : EIO;
            return FR_IO;
        }
        old = crc32c(old, buf, want);
        fresh = crc32c(fresh, buf, want);
        struct iovec iov = {buf, want};
        if ((errno = vs_writev(to, &iov, 1, out))) return FR_IO;
        offset += want;
        out += want;
        left -= want;
    }
    if (old != h->payload_crc) return FR_BAD_CRC;
    h->payload_crc = fresh;
    uint8_t head[FR_HEADER];
    fr_encode(head, h, attrs, to_seed);
    struct iovec iov[2] = {{head, FR_HEADER}, {(void *)(uintptr_t)attrs, fr_round(h->attrs_len, FR_ALIGN)}};
    if ((errno = vs_writev(to, iov, h->attrs_len ? 2 : 1, to_at))) return FR_IO;
    return FR_OK;
}

/* Turn `rows` rows that stand at `at` in format `from` into format `to`, in place; the region holds the longer of the
 * two. Shrinking rows go front to back, growing ones back to front, so that no row is overwritten before it is read.
 * `in` and `out` hold VS_PIECE bytes each. 0, errno, or -1 with the refused row in *bad. */
static inline int vs_convert(int fd, uint64_t at, uint64_t rows, uint32_t dim, int from, int to, uint32_t seed,
                             uint8_t *in, uint8_t *out, uint32_t *crc, int64_t *bad) {
    const size_t si = q_row_bytes(from, dim), so = q_row_bytes(to, dim), longest = si > so ? si : so;
    if (!si || !so || longest > VS_PIECE) return EINVAL;
    const uint64_t step = VS_PIECE / longest;
    for (uint64_t done = 0; done < rows;) {
        const uint64_t n = rows - done < step ? rows - done : step;
        const uint64_t first = so > si ? rows - done - n : done;
        const ssize_t got = fr_pread(fd, in, n * si, at + first * si);
        if (got < 0 || (size_t)got < n * si) return got < 0 ? errno : EIO;
        if (q_encode(from, to, in, out, n, dim, bad)) {
            if (*bad < 0) return EINVAL;
            *bad += (int64_t)first;
            return -1;
        }
        struct iovec iov = {out, n * so};
        const int error = vs_writev(fd, &iov, 1, at + first * so);
        if (error) return error;
        done += n;
    }
    return fr_crc_file(fd, at, rows * so, seed, crc);
}

/* Encode groups of keys in their file: rows that stand at `rows_at` in format `from` become blocks at `at`, which is not
 * behind that. Front to back, since a block is shorter than its rows. `first` is the position of the first row. 0, errno,
 * or -1 with the refused row in *bad. */
static inline int vs_convert_keys(int fd, uint64_t rows_at, uint64_t at, uint64_t groups, uint32_t dim, int from, int to,
                                  uint64_t first, double theta, uint32_t seed, uint32_t *crc, int64_t *bad) {
    const size_t gi = q_row_bytes(from, dim) * QK_ROWS, go = q_row_bytes(to, dim) * QK_ROWS;
    if (!gi || !go || go > gi || at > rows_at) return EINVAL;
    const uint64_t step = gi < VS_PIECE ? VS_PIECE / gi : 1;
    uint8_t *in = (uint8_t *)malloc(step * (gi + go)), *out = in + step * gi;
    int rc = in ? 0 : ENOMEM;
    *crc = seed;
    for (uint64_t done = 0; done < groups && !rc;) {
        const uint64_t n = groups - done < step ? groups - done : step;
        const ssize_t got = fr_pread(fd, in, n * gi, rows_at + done * gi);
        if (got < 0 || (size_t)got < n * gi) {
            rc = got < 0 ? errno : EIO;
            break;
        }
        if (q_keys_encode(from, to, in, out, n, dim, first + done * QK_ROWS, theta, bad)) {
            rc = *bad < 0 ? EINVAL : -1;
            *bad += (int64_t)(done * QK_ROWS);
            break;
        }
        *crc = crc32c(*crc, out, n * go);
        struct iovec iov = {out, n * go};
        rc = vs_writev(fd, &iov, 1, at + done * go);
        done += n;
    }
    free(in);
    return rc;
}

/* The first of n fp16 values whose magnitude, as bits, is above `limit`, or -1. */
static inline int64_t vs_beyond(const uint8_t *words, size_t n, uint32_t limit) {
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = fr_get16(words + 2 * i) & 0x7fffu;
        most = bits > most ? bits : most;
    }
    for (size_t i = 0; most > limit && i < n; i++)
        if ((fr_get16(words + 2 * i) & 0x7fffu) > limit) return (int64_t)i;
    return -1;
}

/* Bring decoded values back into the range of fp16, which a rotation may have left by a little. */
static inline void vs_clamp(float *values, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const float v = values[i] < -65504.0f ? -65504.0f : values[i];
        values[i] = v > 65504.0f ? 65504.0f : v;
    }
}

/* Start writing the dirty pages of a file without waiting, so that the flushes that follow overlap. */
static inline void vs_writeback(int fd) {
#if defined(__linux__)
    (void)!sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE);
#else
    (void)fd;
#endif
}

/* Bring a file's data to the medium; 0 or errno. */
static inline int vs_flush(int fd) {
#if defined(__APPLE__)
    if (fcntl(fd, F_FULLFSYNC) == 0) return 0;
    return fsync(fd) == 0 ? 0 : errno; /* a file system without F_FULLFSYNC */
#else
    return fdatasync(fd) == 0 ? 0 : errno;
#endif
}

#endif
