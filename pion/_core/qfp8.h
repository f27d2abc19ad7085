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

#if defined(__x86_64__)
/* As q_group_top for whole groups. */
__attribute__((target("avx2"))) static void q_tops_avx2(const uint8_t *src, uint32_t *tops, size_t groups) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    for (size_t g = 0; g < groups; g++, src += 4 * Q_GROUP) {
        __m256i part[4];
        for (int i = 0; i < 4; i++)
            part[i] = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(const void *)(src + 32 * i)), magnitude);
        __m256i most = _mm256_max_epi32(_mm256_max_epi32(part[0], part[1]), _mm256_max_epi32(part[2], part[3]));
        __m128i top = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
        top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
        top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1));
        tops[g] = (uint32_t)_mm_cvtsi128_si32(top);
    }
}

/* The codes of whole groups, 32 values at a time. The addition of 2^20 times a value's power of two (the subnormals'
 * at least) rounds it at the last bit of its code: the sum's low bits count those; its binade adds 8 a power. */
__attribute__((target("avx2"))) static void q_fp8_codes_avx2(const uint8_t *src, uint8_t *codes, size_t groups,
                                                             const float *inverses) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m256i power = _mm256_set1_epi32(0x7f800000), least = _mm256_set1_epi32(0x3c800000);
    const __m256i far = _mm256_set1_epi32(20 << 23), bias = _mm256_set1_epi16(0x3c8);
    const __m256i sign = _mm256_set1_epi8((char)0x80);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* packing works within 128-bit lanes */
    for (size_t g = 0; g < groups; g++, src += 4 * Q_GROUP, codes += Q_GROUP) {
        const __m256 inverse = _mm256_set1_ps(inverses[g]);
        __m256i word[4], part[4];
        for (int i = 0; i < 4; i++) {
            __m256 value = _mm256_mul_ps(_mm256_loadu_ps((const float *)(const void *)(src + 32 * i)), inverse);
            __m256 mag = _mm256_and_ps(value, magnitude);
            __m256i two = _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(value), power), least);
            __m256i push = _mm256_add_epi32(two, far);
            __m256i sum = _mm256_castps_si256(_mm256_add_ps(mag, _mm256_castsi256_ps(push)));
            part[i] = _mm256_add_epi32(_mm256_sub_epi32(sum, push), _mm256_srli_epi32(two, 20));
            word[i] = _mm256_castps_si256(value);
        }
        __m256i low = _mm256_sub_epi16(_mm256_packs_epi32(part[0], part[1]), bias);
        __m256i high = _mm256_sub_epi16(_mm256_packs_epi32(part[2], part[3]), bias);
        __m256i bytes = _mm256_packus_epi16(low, high);
        __m256i signs = _mm256_packs_epi16(_mm256_packs_epi32(word[0], word[1]), _mm256_packs_epi32(word[2], word[3]));
        bytes = _mm256_or_si256(bytes, _mm256_and_si256(signs, sign)); /* saturation keeps the sign */
        _mm256_storeu_si256((__m256i *)(void *)codes, _mm256_permutevar8x32_epi32(bytes, order));
    }
}
#endif

/* Up to Q_CHUNK values of one row, starting at a group boundary. Nonzero: a value is not within +-65504. */
Q_CLONES static uint32_t q_fp32_to_fp8(const uint8_t *src, uint8_t *codes, uint8_t *scales, size_t n, int avx2) {
    uint32_t tops[Q_CHUNK / Q_GROUP];
    float inverses[Q_CHUNK / Q_GROUP] = {0};
    size_t whole = n / Q_GROUP, groups = (n + Q_GROUP - 1) / Q_GROUP;
    uint32_t bad = 0;
#if defined(__x86_64__)
    if (avx2) q_tops_avx2(src, tops, whole);
#endif
    for (size_t g = 0; g < whole && !avx2; g++) tops[g] = q_group_top(src + 4 * Q_GROUP * g, Q_GROUP);
    if (whole < groups) tops[whole] = q_group_top(src + 4 * Q_GROUP * whole, n - Q_GROUP * whole);
    for (size_t g = 0; g < groups; g++) {
        bad |= tops[g] > Q_F32_65504;
        uint32_t scale = q_fp8_scale(tops[g]);
        inverses[g] = 1.0f / q_float(q_half_to(scale));
        q_store16(scales + 2 * g, scale);
    }
    if (bad) return bad;
#if defined(__x86_64__)
    if (avx2) q_fp8_codes_avx2(src, codes, whole, inverses);
#endif
    for (size_t g = 0; g < whole && !avx2; g++)
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

#if defined(__x86_64__)
/* Whole groups. A code's bits in their place in an fp16 mean 2^-8 of the code; F16C widens those, subnormals too. */
__attribute__((target("avx2,f16c"))) static void q_fp8_values_avx2(const uint8_t *codes, const uint8_t *scales,
                                                                   uint8_t *dst, size_t groups) {
    const __m256i place = _mm256_set1_epi16((short)0xbf80), magnitude = _mm256_set1_epi16(0x3f80);
    const __m256i nan = _mm256_set1_epi16(0x7e00);
    const __m256 top = _mm256_set1_ps(65504.0f), bottom = _mm256_set1_ps(-65504.0f);
    for (size_t g = 0; g < groups; g++, scales += 2) {
        const __m256 scale = _mm256_set1_ps(q_float(q_half_to(q_load16(scales))) * 256.0f);
        for (int i = 0; i < 2; i++, codes += 16, dst += 64) {
            __m256i word = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)codes));
            word = _mm256_and_si256(_mm256_slli_epi16(word, 7), place); /* the sign was extended into bit 15 */
            __m256i none = _mm256_cmpeq_epi16(_mm256_and_si256(word, magnitude), magnitude);
            word = _mm256_or_si256(word, _mm256_and_si256(none, nan));
            __m256 low = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(word)), scale);
            __m256 high = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(word, 1)), scale);
            low = _mm256_max_ps(bottom, _mm256_min_ps(top, low)); /* the second operand where one is a NaN */
            high = _mm256_max_ps(bottom, _mm256_min_ps(top, high));
            _mm256_storeu_ps((float *)(void *)dst, low);
            _mm256_storeu_ps((float *)(void *)(dst + 32), high);
        }
    }
}
#endif

Q_CLONES static void q_fp8_groups_to_fp32(const uint8_t *codes, const uint8_t *scales, uint8_t *dst, size_t n) {
    size_t start = 0;
    for (; start + Q_GROUP <= n; start += Q_GROUP)
        q_fp8_values(codes + start, dst + 4 * start, Q_GROUP, q_float(q_half_to(q_load16(scales + start / 16))));
    if (start < n)
        q_fp8_values(codes + start, dst + 4 * start, n - start, q_float(q_half_to(q_load16(scales + start / 16))));
}

static inline void q_fp8_row_to_fp32(const uint8_t *row, uint8_t *dst, size_t dim, int avx2) {
    size_t whole = 0;
#if defined(__x86_64__)
    if (avx2) {
        whole = dim / Q_GROUP;
        q_fp8_values_avx2(row, row + dim, dst, whole);
    }
#else
    (void)avx2;
#endif
    q_fp8_groups_to_fp32(row + Q_GROUP * whole, row + dim + 2 * whole, dst + 4 * Q_GROUP * whole, dim - Q_GROUP * whole);
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
        bad |= q_fp32_to_fp8(values, row + i, row + dim + i / 16, m, f16c);
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

static inline void q_hybrid_row_to_fp32(const uint8_t *row, uint8_t *dst, size_t dim, size_t lead, int avx2) {
    q_bf16_to_fp32(row, dst, lead);
    q_fp8_row_to_fp32(row + 2 * lead, dst + 4 * lead, dim - lead, avx2);
}

#endif
