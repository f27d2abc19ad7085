/* Row formats in both directions, on unaligned little-endian buffers: the table over the kernels in the q*.h headers.
 *
 * A format is an int, code | param << 8. The code is a byte on disk and never changes; the parameter (16 bits) says how
 * a row is laid out where the code alone does not: see q_row_bytes. A row of `dim` values takes q_row_bytes(fmt, dim)
 * bytes and stands for itself: pieces at row boundaries give the bytes of one call.
 *
 * The rule is "right or refused": words already in the wanted format move verbatim, NaN payloads included; a
 * finite value that the wanted format cannot hold is refused with the row it stands in; it never becomes an infinity.
 * Arithmetic is plain IEEE single precision, one rounding per operation (-ffp-contract=off), so every machine writes
 * the same bytes; pion/ref/quant.py says the same in numpy.
 *
 * Pure C, no Python, no allocation, no locks.
 */
#ifndef PION_QUANT_H
#define PION_QUANT_H

#include "qfloat.h"
#include "qint8.h"

enum { Q_INT8 = 0 }; /* Q_FP16, Q_FP32 and Q_BF16 are in qfloat.h */
enum { Q_OK = 0, Q_REFUSED = 1, Q_UNSUPPORTED = -1 };

static inline int q_code(int fmt) { return fmt & 255; }

static inline size_t q_param(int fmt) { return (size_t)(fmt >> 8 & 0xffff); }

static inline int q_is_source(int fmt) { return fmt == Q_FP32 || fmt == Q_FP16 || fmt == Q_BF16; }

/* Stored bytes of one row; 0 for a format this build does not know, and for a dim or parameter that it refuses. */
static inline size_t q_row_bytes(int fmt, size_t dim) {
    if (fmt < 0 || fmt >> 24 || dim == 0) return 0;
    switch (fmt) {
    case Q_INT8: return q_int8_bytes(dim);
    case Q_FP16:
    case Q_BF16: return 2 * dim;
    case Q_FP32: return 4 * dim;
    default: return 0;
    }
}

/* One row of a format that is more than flat words. Nonzero: a value does not fit. */
static inline uint32_t q_row(int from, int to, const uint8_t *src, uint8_t *dst, size_t dim, int f16c) {
    switch (q_code(to)) {
    case Q_INT8: return q_int8_row(from, src, dst, dim, f16c);
    default: return q_flat(from, to, src, dst, dim, f16c);
    }
}

/* As q_encode, with the choice of kernel left to the caller (tests compare both). */
static inline int q_encode_with(int from, int to, const void *source, void *target, size_t rows, size_t dim,
                                int64_t *bad_row, int f16c) {
    const uint8_t *src = (const uint8_t *)source;
    uint8_t *dst = (uint8_t *)target;
    size_t in = q_row_bytes(from, dim), out = q_row_bytes(to, dim);
    *bad_row = -1;
    if (!q_is_source(from) || (dim != 0 && out == 0)) return Q_UNSUPPORTED;
    if (rows == 0 || dim == 0) return Q_OK;
    if (from == to) {
        memcpy(dst, src, rows * out);
        return Q_OK;
    }
    if (q_is_source(to) && !q_flat(from, to, src, dst, rows * dim, f16c)) return Q_OK; /* no row boundaries to mind */
    for (size_t row = 0; row < rows; row++) {
        if (q_row(from, to, src + row * in, dst + row * out, dim, f16c)) {
            *bad_row = (int64_t)row;
            return Q_REFUSED;
        }
    }
    return Q_OK;
}

/* Convert `rows` rows of `dim` values from `from` (fp32, fp16, bf16) to any row format.
 * Q_OK; Q_REFUSED with the first refused row in *bad_row (the target's content is then undefined); Q_UNSUPPORTED.
 * Buffers may be unaligned and must not overlap. Whole rows only: pieces at row boundaries give the bytes of one call. */
static inline int q_encode(int from, int to, const void *src, void *dst, size_t rows, size_t dim, int64_t *bad_row) {
    return q_encode_with(from, to, src, dst, rows, dim, bad_row, q_have_f16c());
}

static inline int q_decode_with(int fmt, const void *source, void *target, size_t rows, size_t dim, int f16c) {
    const uint8_t *src = (const uint8_t *)source;
    uint8_t *dst = (uint8_t *)target;
    size_t stored = q_row_bytes(fmt, dim);
    if (dim != 0 && stored == 0) return Q_UNSUPPORTED;
    if (rows == 0 || dim == 0) return Q_OK;
    switch (q_code(fmt)) {
    case Q_FP32: memcpy(dst, src, 4 * rows * dim); return Q_OK;
    case Q_FP16: q_fp16_to_fp32(src, dst, rows * dim, f16c); return Q_OK;
    case Q_BF16: q_bf16_to_fp32(src, dst, rows * dim); return Q_OK;
    default: break;
    }
    for (size_t row = 0; row < rows; row++, src += stored, dst += 4 * dim) {
        switch (q_code(fmt)) {
        case Q_INT8: q_int8_row_to_fp32(src, dst, dim); break;
        default: return Q_UNSUPPORTED;
        }
    }
    return Q_OK;
}

/* Rows in any stored format to fp32. Q_OK or Q_UNSUPPORTED. */
static inline int q_decode(int fmt, const void *src, void *dst_f32, size_t rows, size_t dim) {
    return q_decode_with(fmt, src, dst_f32, rows, dim, q_have_f16c());
}

#endif
