/* int8 rows: `dim` codes, then one (fp16 scale, fp16 min) pair for each group of 32 values, the last group possibly
 * shorter; a value is min + scale * code, kept within +-65504 (the rounded scale could carry the largest past that).
 */
#ifndef PION_QINT8_H
#define PION_QINT8_H

#include "qfloat.h"

static inline size_t q_int8_bytes(size_t dim) { return dim + 4 * ((dim + Q_GROUP - 1) / Q_GROUP); }

/* Floats as integers in the same order, so that minimum and maximum are integer reductions, which compilers vectorise. */
static inline int32_t q_ordered(uint32_t word) { return (int32_t)(word ^ ((uint32_t)((int32_t)word >> 31) >> 1)); }

static inline void q_group_range(const uint8_t *src, size_t n, int32_t *low, int32_t *high) {
    int32_t lo = INT32_MAX, hi = INT32_MIN;
    for (size_t i = 0; i < n; i++) {
        int32_t key = q_ordered(q_load32(src + 4 * i));
        lo = key < lo ? key : lo;
        hi = key > hi ? key : hi;
    }
    *low = lo;
    *high = hi;
}

static inline void q_group_codes(const uint8_t *restrict src, uint8_t *restrict codes, size_t n, float min,
                                 float inverse) {
    for (size_t i = 0; i < n; i++) {
        float code = (q_float(q_load32(src + 4 * i)) - min) * inverse + 12582912.0f; /* 1.5 * 2^23: rounds to even */
        codes[i] = (uint8_t)(q_bits(code) - 0x4b400000u);
    }
}

/* Up to Q_CHUNK values of one row, starting at a group boundary: codes to `codes`, pairs to `pairs`. Three loops, so
 * that each vectorises: ranges, the pairs of all groups at once, codes.
 * min is rounded down and scale up, both to fp16, and the codes are chosen against the rounded pair: x - min is never
 * negative and (hi - min) / scale exceeds 255 by less than 2^-14, so no code needs clamping. A constant group that
 * fp16 holds gets scale 0 and is exact. Nonzero: a value is not within +-65504. */
Q_CLONES static uint32_t q_fp32_to_int8(const uint8_t *src, uint8_t *codes, uint8_t *pairs, size_t n) {
    int32_t low[Q_CHUNK / Q_GROUP], high[Q_CHUNK / Q_GROUP];
    float mins[Q_CHUNK / Q_GROUP], inverses[Q_CHUNK / Q_GROUP];
    size_t whole = n / Q_GROUP, groups = (n + Q_GROUP - 1) / Q_GROUP;
    const int32_t bottom = q_ordered(Q_F32_65504 | Q_F32_SIGN), top = Q_F32_65504;
    uint32_t bad = 0;
    for (size_t g = 0; g < whole; g++) q_group_range(src + 4 * Q_GROUP * g, Q_GROUP, low + g, high + g);
    if (whole < groups) q_group_range(src + 4 * Q_GROUP * whole, n - Q_GROUP * whole, low + whole, high + whole);
    for (size_t g = 0; g < groups; g++) {
        bad |= (uint32_t)(high[g] > top) | (uint32_t)(low[g] < bottom);
        float lo = q_float((uint32_t)q_ordered((uint32_t)low[g])) + 0.0f; /* -0 becomes +0 */
        float hi = q_float((uint32_t)q_ordered((uint32_t)high[g])) + 0.0f;
        uint32_t half_min = q_half_down(lo);
        float min = q_float(q_half_to(half_min));
        uint32_t half_scale = q_half_up((hi - min) / 255.0f);
        float scale = q_float(q_half_to(half_scale));
        mins[g] = min;
        inverses[g] = scale > 0.0f ? 1.0f / scale : 0.0f;
        q_store32(pairs + 4 * g, half_scale | half_min << 16);
    }
    if (bad) return bad;
    for (size_t g = 0; g < whole; g++)
        q_group_codes(src + 4 * Q_GROUP * g, codes + Q_GROUP * g, Q_GROUP, mins[g], inverses[g]);
    if (whole < groups) {
        size_t at = Q_GROUP * whole;
        q_group_codes(src + 4 * at, codes + at, n - at, mins[whole], inverses[whole]);
    }
    return 0;
}

Q_CLONES static void q_int8_row_to_fp32(const uint8_t *row, uint8_t *dst, size_t dim) {
    const uint8_t *pairs = row + dim;
    for (size_t start = 0; start < dim; start += Q_GROUP) {
        float scale = q_float(q_half_to(q_load16(pairs + start / 8)));
        float min = q_float(q_half_to(q_load16(pairs + start / 8 + 2)));
        size_t stop = dim - start < Q_GROUP ? dim : start + Q_GROUP;
        if (stop - start == Q_GROUP) {
            for (size_t i = 0; i < Q_GROUP; i++)
                q_store32(dst + 4 * (start + i), q_bits(q_within_half(min + scale * (float)row[start + i])));
        } else {
            for (size_t i = start; i < stop; i++)
                q_store32(dst + 4 * i, q_bits(q_within_half(min + scale * (float)row[i])));
        }
    }
}

static inline uint32_t q_int8_row(int from, const uint8_t *src, uint8_t *row, size_t dim, int f16c) {
    uint8_t wide[4 * Q_CHUNK];
    uint32_t bad = 0;
    for (size_t i = 0; i < dim; i += Q_CHUNK) {
        size_t m = dim - i < Q_CHUNK ? dim - i : Q_CHUNK;
        const uint8_t *values = wide;
        if (from == Q_FP32) values = src + 4 * i;
        else q_widen(from, src + 2 * i, wide, m, f16c);
        bad |= q_fp32_to_int8(values, row + i, row + dim + i / 8, m);
    }
    return bad;
}

#endif
