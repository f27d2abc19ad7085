/* Records of every file Pion writes: entry files, index, keyspace log and snapshot.
 *
 * A record is a header of 64 bytes, typed attributes, padding, the payload, and padding to the next multiple of 64:
 *
 *    0 magic u32 | 4 version u8 | 5 kind u8 | 6 state u8 | 7 flags u8 | 8 header_len u32 | 12 attrs_len u32
 *   16 payload_len u64 | 24 layer u16 | 26 side u8 | 27 fmt u8 | 28 start u32 | 32 count u32 | 36 dim u32
 *   40 payload_crc u32 | 44 aux u32 | 48 token u64 | 56 reserved u32 (0) | 60 header_crc u32
 *
 * header_len is the distance from the record to its payload: 64 + attrs, rounded up to 64, or more where the payload
 * is to be aligned. header_crc covers bytes 0..59 and the attributes with their padding to 64. Both checksums start
 * from the file's seed, the CRC of the random generation in the first record of the file, so that bytes of another
 * file or of an older life of this one never validate. Everything is little-endian.
 *
 * The keyspace log has a compact record without alignment:
 *    0 len u32 | 4 crc u32 | 8 kind u8 | 9 db u8 | 10 klen u32 | 14 expire u64 | 22 key | value
 * len counts the bytes from 8 on; crc covers len and those bytes.
 */
#ifndef PION_FRAMING_H
#define PION_FRAMING_H

#include "crc32c.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#define FR_MAGIC 0x4e4f4950u /* "PION" */
#define FR_VERSION 1
#define FR_HEADER 64u
#define FR_ALIGN 64u
#define FR_ATTRS_MAX (1u << 20)
#define FR_HEADER_MAX (4u << 20)
#define FR_PAYLOAD_MAX ((uint64_t)1 << 48)
#define FR_KIND_FILE 1 /* the first record of a file; its own seed is 0 */

#define FR_LOG_HEADER 22u
#define FR_LOG_FIXED 14u           /* what len counts beside key and value */
#define FR_LOG_MAX 0x7fffffffu     /* largest len a writer makes and a reader believes */

enum { FR_PENDING = 0, FR_VALID = 1, FR_DEAD = 2 };

/* Why decoding or a scan stopped. */
enum {
    FR_OK = 0,
    FR_END,       /* the file ends exactly here */
    FR_SHORT,     /* fewer bytes left than a header, or than the header says */
    FR_ZEROS,     /* zeros where a header should be */
    FR_BAD_MAGIC, /* something else than a record */
    FR_NEWER,     /* a record of a format version this build does not know */
    FR_BAD_CRC,   /* header checksum */
    FR_BAD_FIELD, /* lengths or state that no writer makes */
    FR_TORN,      /* the header is whole, the payload runs past the end of the file */
    FR_IO         /* pread failed: errno */
};

typedef struct fr_header {
    uint64_t payload_len;
    uint64_t token;
    uint32_t header_len, attrs_len;
    uint32_t start, count, dim, aux;
    uint32_t payload_crc;
    uint16_t layer;
    uint8_t kind, state, flags, side, fmt;
} fr_header;

static inline uint64_t fr_round(uint64_t n, uint64_t align) { return (n + align - 1) / align * align; }
static inline void fr_put16(uint8_t *p, uint16_t v) { memcpy(p, &v, 2); }
static inline void fr_put32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }
static inline void fr_put64(uint8_t *p, uint64_t v) { memcpy(p, &v, 8); }
static inline uint16_t fr_get16(const uint8_t *p) { uint16_t v; memcpy(&v, p, 2); return v; }
static inline uint32_t fr_get32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static inline uint64_t fr_get64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return v; }

/* Start value of every checksum of a file with this generation. */
static inline uint32_t fr_seed(uint64_t generation) { return crc32c(0, &generation, 8); }

/* Bytes from the start of a record to the start of the next one. */
static inline uint64_t fr_total(const fr_header *h) { return h->header_len + fr_round(h->payload_len, FR_ALIGN); }

/* header_len for a record at `offset` whose payload shall begin at a multiple of `align` (a multiple of 64). */
static inline uint32_t fr_header_len(uint64_t offset, uint32_t attrs_len, uint32_t align) {
    return (uint32_t)(fr_round(offset + fr_round(FR_HEADER + (uint64_t)attrs_len, FR_ALIGN), align) - offset);
}

/* Write the 64 bytes. `attrs` holds attrs_len bytes and zeros up to the next multiple of 64 (NULL when there are none). */
static inline void fr_encode(uint8_t *out, const fr_header *h, const uint8_t *attrs, uint32_t seed) {
    fr_put32(out, FR_MAGIC);
    out[4] = FR_VERSION;
    out[5] = h->kind;
    out[6] = h->state;
    out[7] = h->flags;
    fr_put32(out + 8, h->header_len);
    fr_put32(out + 12, h->attrs_len);
    fr_put64(out + 16, h->payload_len);
    fr_put16(out + 24, h->layer);
    out[26] = h->side;
    out[27] = h->fmt;
    fr_put32(out + 28, h->start);
    fr_put32(out + 32, h->count);
    fr_put32(out + 36, h->dim);
    fr_put32(out + 40, h->payload_crc);
    fr_put32(out + 44, h->aux);
    fr_put64(out + 48, h->token);
    fr_put32(out + 56, 0);
    uint32_t crc = crc32c(seed, out, 60);
    if (h->attrs_len) crc = crc32c(crc, attrs, fr_round(h->attrs_len, FR_ALIGN));
    fr_put32(out + 60, crc);
}

/* Check and read the fixed part only: *need gets the bytes fr_decode wants. The checksum is not looked at. */
static inline int fr_peek(const uint8_t *p, size_t n, fr_header *h, size_t *need) {
    *need = FR_HEADER;
    if (n < FR_HEADER) return FR_SHORT;
    if (fr_get32(p) != FR_MAGIC) {
        for (size_t i = 0; i < FR_HEADER; i++)
            if (p[i]) return FR_BAD_MAGIC;
        return FR_ZEROS;
    }
    h->kind = p[5];
    h->state = p[6];
    h->flags = p[7];
    h->header_len = fr_get32(p + 8);
    h->attrs_len = fr_get32(p + 12);
    h->payload_len = fr_get64(p + 16);
    h->layer = fr_get16(p + 24);
    h->side = p[26];
    h->fmt = p[27];
    h->start = fr_get32(p + 28);
    h->count = fr_get32(p + 32);
    h->dim = fr_get32(p + 36);
    h->payload_crc = fr_get32(p + 40);
    h->aux = fr_get32(p + 44);
    h->token = fr_get64(p + 48);
    if (h->attrs_len > FR_ATTRS_MAX) return FR_BAD_FIELD;
    *need = FR_HEADER + fr_round(h->attrs_len, FR_ALIGN);
    return FR_OK;
}

/* Decode the header at p, of which n bytes are there (64 + padded attributes are needed). */
static inline int fr_decode(const uint8_t *p, size_t n, uint32_t seed, fr_header *h) {
    size_t need;
    const int rc = fr_peek(p, n, h, &need);
    if (rc) return rc;
    if (n < need) return FR_SHORT;
    uint32_t crc = crc32c(seed, p, 60);
    if (h->attrs_len) crc = crc32c(crc, p + FR_HEADER, need - FR_HEADER);
    if (crc != fr_get32(p + 60)) return FR_BAD_CRC;
    if (p[4] != FR_VERSION) return FR_NEWER;
    if (h->state > FR_DEAD || h->header_len < need || h->header_len % FR_ALIGN || h->header_len > FR_HEADER_MAX ||
        h->payload_len > FR_PAYLOAD_MAX)
        return FR_BAD_FIELD;
    return FR_OK;
}

/* pread until n bytes or the end of the file; -1 with errno. */
static inline ssize_t fr_pread(int fd, void *buf, size_t n, uint64_t offset) {
    size_t got = 0;
    while (got < n) {
        const ssize_t k = pread(fd, (uint8_t *)buf + got, n - got, (off_t)(offset + got));
        if (k < 0) {
            if (errno == EINTR) continue;
            return -1;
        }
        if (k == 0) break;
        got += (size_t)k;
    }
    return (ssize_t)got;
}

/* A position in a file of records. `end` is fixed at the start: what is appended later is not looked at. */
typedef struct fr_scan {
    int fd, error;
    uint32_t seed;
    uint64_t offset, end;
    uint64_t window_offset;
    size_t window_len, window_cap;
    uint8_t *window;
} fr_scan;

static inline int fr_scan_init(fr_scan *s, int fd, uint64_t offset, uint64_t end, uint32_t seed) {
    memset(s, 0, sizeof *s);
    s->fd = fd;
    s->seed = seed;
    s->offset = offset;
    s->end = end;
    s->window_cap = 4096;
    s->window = (uint8_t *)malloc(s->window_cap);
    return s->window ? 0 : -1;
}

static inline void fr_scan_free(fr_scan *s) {
    free(s->window);
    s->window = NULL;
}

/* n bytes at the current offset (n <= end - offset), or NULL. */
static inline const uint8_t *fr_scan_bytes(fr_scan *s, size_t n) {
    if (s->offset >= s->window_offset && s->offset + n <= s->window_offset + s->window_len)
        return s->window + (s->offset - s->window_offset);
    if (n > s->window_cap) {
        uint8_t *grown = (uint8_t *)realloc(s->window, n);
        if (!grown) {
            s->error = ENOMEM;
            return NULL;
        }
        s->window = grown;
        s->window_cap = n;
    }
    size_t want = s->window_cap;
    if (want > s->end - s->offset) want = (size_t)(s->end - s->offset);
    const ssize_t got = fr_pread(s->fd, s->window, want, s->offset);
    s->window_offset = s->offset;
    s->window_len = got < 0 ? 0 : (size_t)got;
    if (got >= 0 && (size_t)got >= n) return s->window;
    s->error = got < 0 ? errno : EIO; /* the file shrank under us */
    return NULL;
}

/* The record at s->offset, whatever its state. *attrs points into the window until the next call; the caller moves on
 * by adding fr_total(h) to s->offset. */
static inline int fr_scan_here(fr_scan *s, fr_header *h, const uint8_t **attrs) {
    if (s->offset >= s->end) return FR_END;
    const uint64_t left = s->end - s->offset;
    size_t need = left < FR_HEADER ? (size_t)left : FR_HEADER;
    const uint8_t *p = fr_scan_bytes(s, need);
    if (!p) return FR_IO;
    int rc = fr_peek(p, need, h, &need);
    if (rc) return rc;
    if (need > left) return FR_SHORT;
    if (!(p = fr_scan_bytes(s, need))) return FR_IO;
    if ((rc = fr_decode(p, need, s->seed, h))) return rc;
    if (fr_total(h) > left && h->header_len + h->payload_len > left) return FR_TORN;
    *attrs = p + FR_HEADER;
    return FR_OK;
}

/* Offset of the first whole record at or after `offset` (both multiples of 64), or -1: tells damage in the middle
 * of a file from a torn tail. s->error is set when reading failed. */
static inline int64_t fr_resync(fr_scan *s, uint64_t offset) {
    fr_header h;
    const uint8_t *attrs;
    for (s->offset = fr_round(offset, FR_ALIGN); s->offset + FR_HEADER <= s->end; s->offset += FR_ALIGN) {
        const uint8_t *p = fr_scan_bytes(s, FR_HEADER);
        if (!p) return -1;
        if (fr_get32(p) == FR_MAGIC && fr_scan_here(s, &h, &attrs) == FR_OK) return (int64_t)s->offset;
    }
    return -1;
}

/* CRC of n payload bytes at `offset`, read in pieces; 0 or errno. */
static inline int fr_crc_file(int fd, uint64_t offset, uint64_t n, uint32_t seed, uint32_t *crc) {
    const size_t piece = 256u << 10;
    uint8_t *buf = (uint8_t *)malloc(piece);
    if (!buf) return ENOMEM;
    int error = 0;
    for (*crc = seed; n;) {
        const size_t want = n < piece ? (size_t)n : piece;
        const ssize_t got = fr_pread(fd, buf, want, offset);
        if (got < 0 || (size_t)got < want) {
            error = got < 0 ? errno : EIO;
            break;
        }
        *crc = crc32c(*crc, buf, want);
        offset += want;
        n -= want;
    }
    free(buf);
    return error;
}

/* ---- the compact record of the keyspace log ---- */

typedef struct fr_log {
    uint64_t expire;
    const uint8_t *key, *value;
    uint32_t klen, vlen;
    uint32_t total; /* bytes of the whole record */
    uint8_t kind, db;
} fr_log;

/* Fill the 22 header bytes for a key and a value that follow; `value` may be in two pieces of the same buffer. */
static inline void fr_log_encode(uint8_t *out, uint8_t kind, uint8_t db, const void *key, uint32_t klen,
                                 const void *value, uint32_t vlen, uint64_t expire, uint32_t seed) {
    fr_put32(out, FR_LOG_FIXED + klen + vlen);
    out[8] = kind;
    out[9] = db;
    fr_put32(out + 10, klen);
    fr_put64(out + 14, expire);
    uint32_t crc = crc32c(seed, out, 4);
    crc = crc32c(crc, out + 8, FR_LOG_FIXED);
    crc = crc32c(crc, key, klen);
    crc = crc32c(crc, value, vlen);
    fr_put32(out + 4, crc);
}

/* The record at p, of which n bytes are there. FR_SHORT when it may go on behind them. */
static inline int fr_log_decode(const uint8_t *p, size_t n, uint32_t seed, fr_log *r) {
    if (n == 0) return FR_END;
    if (n < 4) return FR_SHORT;
    const uint32_t len = fr_get32(p);
    if (len < FR_LOG_FIXED || len > FR_LOG_MAX) return len ? FR_BAD_FIELD : FR_ZEROS;
    if (n < 8 + (size_t)len) return FR_SHORT;
    r->klen = fr_get32(p + 10);
    if (r->klen > len - FR_LOG_FIXED) return FR_BAD_FIELD;
    if (crc32c(crc32c(seed, p, 4), p + 8, len) != fr_get32(p + 4)) return FR_BAD_CRC;
    r->kind = p[8];
    r->db = p[9];
    r->expire = fr_get64(p + 14);
    r->key = p + FR_LOG_HEADER;
    r->value = r->key + r->klen;
    r->vlen = len - FR_LOG_FIXED - r->klen;
    r->total = 8 + len;
    return FR_OK;
}

#endif
