/* fp8 rows: `dim` e4m3fn codes, then one fp16 scale for each group of 32 values, the last group possibly shorter; a
 * value is scale * code, kept within +-65504. And the hybrid whose first R values stay bf16.
 *
 * The scale is absmax / 448 rounded to the nearest fp16, so that the largest value lands on code 448 itself: at most
 * 2^-11 above it, which rounds to 448, and a constant group is exact to one fp16 step. Where that scale would be
 * subnormal, and thereby coarse, it is doubled until it is normal: the group then uses the lower binades of e4m3, which
 * are as fine. Below 2^-28 of 448 the scale stays 2^-14, and codes are multiples of 2^-23.
 */
#ifndef PION_QFP8_H
#define PION_QFP8_H

#include "qfloat.h"

enum { Q_E4M3_TOP = 0x7e }; /* 448; 0x7f is the NaN */

static inline size_t q_fp8_bytes(size_t dim) { return dim + 2 * ((dim + Q_GROUP - 1) / Q_GROUP); }

static inline size_t q_hybrid_bytes(size_t dim, size_t lead) {
    return lead == 0 || lead >= dim ? 0 : 2 * lead + q_fp8_bytes(dim - lead);
}

/* ---- single values ------------------------------------------------------------------------------------------- */

/* Round to nearest even, saturate at 448 (infinities too); NaN becomes the NaN of its sign. */
static inline uint32_t q_e4m3_of(uint32_t word) {
    uint32_t sign = (word >> 24) & 0x80u, mag = word & ~Q_F32_SIGN;
    uint32_t normal = ((mag + 0x7ffffu + ((mag >> 20) & 1u)) >> 20) - (120u << 3);
    uint32_t tiny = q_bits(q_float(mag) + 16384.0f) - 0x46800000u; /* rounds at 2^-9, the subnormals' step */
    uint32_t code = mag < 0x3c800000u ? tiny : normal;
    code = code > Q_E4M3_TOP ? Q_E4M3_TOP : code;
    code = mag > Q_F32_INF ? 0x7fu : code;
    return sign | code;
}

static inline uint32_t q_e4m3_to(uint32_t code) {
    uint32_t mag = code & 0x7fu;
    uint32_t finite = q_bits(q_float(mag << 20) * q_float(0x7b800000u)); /* 2^120 moves the exponent's bias */
    return (code & 0x80u) << 24 | (mag == 0x7fu ? 0x7fc00000u : finite);
}

/* ---- the plain cast, for values that need no scale ------------------------------------------------------------ */

Q_CLONES static void q_fp32_to_e4m3(const uint8_t *src, uint8_t *dst, size_t n) {
    for (size_t i = 0; i < n; i++) dst[i] = (uint8_t)q_e4m3_of(q_load32(src + 4 * i));
}

Q_CLONES static void q_e4m3_to_fp32(const uint8_t *src, uint8_t *dst, size_t n) {
    for (size_t i = 0; i < n; i++) q_store32(dst + 4 * i, q_e4m3_to(src[i]));
}

/* ---- groups ---------------------------------------------------------------------------------------------------- */

static inline uint32_t q_group_top(const uint8_t *src, size_t n) {
    int32_t top = 0; /* signed: SSE2 and AVX2 compare no other way */
    for (size_t i = 0; i < n; i++) {
        int32_t mag = (int32_t)(q_load32(src + 4 * i) & ~Q_F32_SIGN);
        top = mag > top ? mag : top;
    }
    return (uint32_t)top;
}

/* The scale of a group, an fp16 word, from the bits of its largest magnitude. */
static inline uint32_t q_fp8_scale(uint32_t top) {
    const uint32_t normal = 0x38800000u; /* 2^-14, the smallest normal fp16 */
    uint32_t word = q_bits(q_float(top) / 448.0f);
    uint32_t raised = word >= normal - (14u << 23) ? (word & 0x7fffffu) | normal : normal;
    return q_half_of(word < normal ? raised : word);
}

/* As q_e4m3_of for finite values that are at most 464. */
static inline uint32_t q_e4m3_small(uint32_t word) {
    uint32_t sign = (word >> 24) & 0x80u, mag = word & ~Q_F32_SIGN;
    uint32_t normal = ((mag + 0x7ffffu + ((mag >> 20) & 1u)) >> 20) - (120u << 3);
    uint32_t tiny = q_bits(q_float(mag) + 16384.0f) - 0x46800000u;
    return sign | ((int32_t)mag < 0x3c800000 ? tiny : normal);
}

static inline void q_fp8_codes(const uint8_t *restrict src, uint8_t *restrict codes, size_t n, float inverse) {
    for (size_t i = 0; i < n; i++)
        codes[i] = (uint8_t)q_e4m3_small(q_bits(q_float(q_load32(src + 4 * i)) * inverse));
}

/* Up to Q_CHUNK values of one row, starting at a group boundary. Nonzero: a value is not within +-65504. */
Q_CLONES static uint32_t q_fp32_to_fp8(const uint8_t *src, uint8_t *codes, uint8_t *scales, size_t n) {
    uint32_t tops[Q_CHUNK / Q_GROUP];
    float inverses[Q_CHUNK / Q_GROUP];
    size_t whole = n / Q_GROUP, groups = (n + Q_GROUP - 1) / Q_GROUP;
    uint32_t bad = 0;
    for (size_t g = 0; g < whole; g++) tops[g] = q_group_top(src + 4 * Q_GROUP * g, Q_GROUP);
    if (whole < groups) tops[whole] = q_group_top(src + 4 * Q_GROUP * whole, n - Q_GROUP * whole);
    for (size_t g = 0; g < groups; g++) {
        bad |= tops[g] > Q_F32_65504;
        uint32_t scale = q_fp8_scale(tops[g]);
        inverses[g] = 1.0f / q_float(q_half_to(scale));
        q_store16(scales + 2 * g, scale);
    }
    if (bad) return bad;
    for (size_t g = 0; g < whole; g++)
        q_fp8_codes(src + 4 * Q_GROUP * g, codes + Q_GROUP * g, Q_GROUP, inverses[g]);
    if (whole < groups) {
        size_t at = Q_GROUP * whole;
        q_fp8_codes(src + 4 * at, codes + at, n - at, inverses[whole]);
    }
    return 0;
}

static inline void q_fp8_values(const uint8_t *restrict codes, uint8_t *restrict dst, size_t n, float scale) {
    for (size_t i = 0; i < n; i++)
        q_store32(dst + 4 * i, q_bits(q_within_half(scale * q_float(q_e4m3_to(codes[i])))));
}

Q_CLONES static void q_fp8_row_to_fp32(const uint8_t *row, uint8_t *dst, size_t dim) {
    const uint8_t *scales = row + dim;
    size_t start = 0;
    for (; start + Q_GROUP <= dim; start += Q_GROUP)
        q_fp8_values(row + start, dst + 4 * start, Q_GROUP, q_float(q_half_to(q_load16(scales + start / 16))));
    if (start < dim)
        q_fp8_values(row + start, dst + 4 * start, dim - start, q_float(q_half_to(q_load16(scales + start / 16))));
}

/* ---- rows ------------------------------------------------------------------------------------------------------ */

static inline uint32_t q_fp8_row(int from, const uint8_t *src, uint8_t *row, size_t dim, int f16c) {
    uint8_t wide[4 * Q_CHUNK];
    uint32_t bad = 0;
    for (size_t i = 0; i < dim; i += Q_CHUNK) {
        size_t m = dim - i < Q_CHUNK ? dim - i : Q_CHUNK;
        const uint8_t *values = wide;
        if (from == Q_FP32) values = src + 4 * i;
        else q_widen(from, src + 2 * i, wide, m, f16c);
        bad |= q_fp32_to_fp8(values, row + i, row + dim + i / 16, m);
    }
    return bad;
}

/* The first `lead` values as bf16 words, the rest as an fp8 row of its own. */
static inline uint32_t q_hybrid_row(int from, const uint8_t *src, uint8_t *row, size_t dim, size_t lead, int f16c) {
    uint32_t bad = 0;
    size_t width = from == Q_FP32 ? 4 : 2;
    if (from == Q_BF16) memcpy(row, src, 2 * lead);
    else bad = q_flat(from, Q_BF16, src, row, lead, f16c);
    return bad | q_fp8_row(from, src + width * lead, row + 2 * lead, dim - lead, f16c);
}

static inline void q_hybrid_row_to_fp32(const uint8_t *row, uint8_t *dst, size_t dim, size_t lead) {
    q_bf16_to_fp32(row, dst, lead);
    q_fp8_row_to_fp32(row + 2 * lead, dst + 4 * lead, dim - lead);
}

#endif
