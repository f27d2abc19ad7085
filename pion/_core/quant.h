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
#include "qfp8.h"
#include "qint8.h"
#include "qmlx4.h"
#include "qturbo.h"

/* Q_FP16 2, Q_FP32 8 and Q_BF16 9 are in qfloat.h. */
enum { Q_INT8 = 0, Q_TURBO4 = 1, Q_TURBO3 = 3, Q_TURBO2 = 4, Q_FP8 = 5, Q_BF16_ROPE_FP8_BODY = 6, Q_MLX4G32 = 7 };
enum { Q_OK = 0, Q_REFUSED = 1, Q_UNSUPPORTED = -1 };

static inline int q_code(int fmt) { return fmt & 255; }

static inline size_t q_param(int fmt) { return (size_t)(fmt >> 8 & 0xffff); }

/* The forms of turbo for keys: see quant_keys.h. */
enum { Q_KTURBO4 = 17, Q_KTURBO3 = 19, Q_KTURBO2 = 20, Q_KEY_ROWS = 64 };

/* Bits of a code of a key form; 0 for a row format. */
static inline size_t q_key_bits(int fmt) {
    return q_code(fmt) == Q_KTURBO4 ? 4 : q_code(fmt) == Q_KTURBO3 ? 3 : q_code(fmt) == Q_KTURBO2 ? 2 : 0;
}

/* How many rows stand or fall together: 64 for the key forms. */
static inline int q_group_rows(int fmt) { return q_key_bits(fmt) ? Q_KEY_ROWS : 1; }

/* A 64th of the block of 64 rows, which is a multiple of 64 bytes; the parameter is the head size and does not count. */
static inline size_t q_key_row_bytes(int fmt, size_t dim) {
    size_t bits = q_key_bits(fmt);
    return bits ? ((8 * bits + 4) * dim + 63) / 64 : 0;
}

static inline int q_is_source(int fmt) { return fmt == Q_FP32 || fmt == Q_FP16 || fmt == Q_BF16; }

static inline int q_turbo_bits(int fmt) { return q_code(fmt) == Q_TURBO4 ? 4 : q_code(fmt) == Q_TURBO3 ? 3 : 2; }

/* Stored bytes of one row; 0 for a format this build does not know, and for a dim or parameter that it refuses.
 * The parameter is the head size for turbo4, 3 and 2 (0, or one that does not divide dim: the row is split as a whole),
 * the number of leading bf16 values for bf16_rope_fp8_body, and 0 for all others. */
static inline size_t q_row_bytes(int fmt, size_t dim) {
    if (fmt < 0 || fmt >> 24 || dim == 0) return 0;
    switch (q_code(fmt)) {
    case Q_TURBO4:
    case Q_TURBO3:
    case Q_TURBO2: return q_turbo_bytes(q_turbo_bits(fmt), q_param(fmt), dim);
    case Q_BF16_ROPE_FP8_BODY: return q_hybrid_bytes(dim, q_param(fmt));
    default: break;
    }
    switch (fmt) {
    case Q_FP8: return q_fp8_bytes(dim);
    case Q_MLX4G32: return q_mlx4_bytes(dim);
    case Q_INT8: return q_int8_bytes(dim);
    case Q_FP16:
    case Q_BF16: return 2 * dim;
    case Q_FP32: return 4 * dim;
    default: return q_key_row_bytes(fmt, dim);
    }
}

/* One row of a format that is more than flat words. Nonzero: a value does not fit. */
static inline uint32_t q_row(int from, int to, const uint8_t *src, uint8_t *dst, size_t dim, int f16c) {
    switch (q_code(to)) {
    case Q_INT8: return q_int8_row(from, src, dst, dim, f16c);
    case Q_FP8: return q_fp8_row(from, src, dst, dim, f16c);
    case Q_MLX4G32: return q_mlx4_row(from, src, dst, dim, f16c);
    case Q_BF16_ROPE_FP8_BODY: return q_hybrid_row(from, src, dst, dim, q_param(to), f16c);
    case Q_TURBO4:
    case Q_TURBO3:
    case Q_TURBO2: return q_turbo_row(q_turbo_bits(to), q_param(to), from, src, dst, dim, f16c);
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
    if (!q_is_source(from) || (dim != 0 && out == 0) || q_group_rows(to) != 1) return Q_UNSUPPORTED;
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
    if ((dim != 0 && stored == 0) || q_group_rows(fmt) != 1) return Q_UNSUPPORTED;
    if (rows == 0 || dim == 0) return Q_OK;
    switch (q_code(fmt)) {
    case Q_FP32: memcpy(dst, src, 4 * rows * dim); return Q_OK;
    case Q_FP16: q_fp16_to_fp32(src, dst, rows * dim, f16c); return Q_OK;
    case Q_BF16: q_bf16_to_fp32(src, dst, rows * dim); return Q_OK;
    default: break;
    }
    for (size_t row = 0; row < rows; row++, src += stored, dst += 4 * dim) {
        switch (q_code(fmt)) {
        case Q_INT8: q_int8_row_to_fp32(src, dst, dim, f16c); break;
        case Q_FP8: q_fp8_row_to_fp32(src, dst, dim, f16c); break;
        case Q_MLX4G32: q_mlx4_row_to_fp32(src, dst, dim); break;
        case Q_BF16_ROPE_FP8_BODY: q_hybrid_row_to_fp32(src, dst, dim, q_param(fmt), f16c); break;
        case Q_TURBO4:
        case Q_TURBO3:
        case Q_TURBO2: q_turbo_row_to_fp32(q_turbo_bits(fmt), q_param(fmt), src, dst, dim, f16c); break;
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
