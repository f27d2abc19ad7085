/* int8 rows: `dim` codes, then one (fp16 scale, fp16 min) pair for each group of 32 values, the last group possibly
 * shorter; a value is min + scale * code, kept within +-65504 (the rounded scale could carry the largest past that).
 */
#ifndef PION_QINT8_H
#define PION_QINT8_H

#include "qfloat.h"

static inline size_t q_int8_bytes(size_t dim) { return dim + 4 * ((dim + Q_GROUP - 1) / Q_GROUP); }

/* Floats as integers in the same order, so that minimum and maximum are integer reductions, which compilers vectorise. */
static inline int32_t q_ordered(uint32_t word) { return (int32_t)(word ^ ((uint32_t)((int32_t)word >> 31) >> 1)); }

/* The smallest and the largest value of a group. Nonzero: one is not within +-65504. */
static inline uint32_t q_group_range(const uint8_t *src, size_t n, float *low, float *high) {
    int32_t lo = INT32_MAX, hi = INT32_MIN;
    for (size_t i = 0; i < n; i++) {
        int32_t key = q_ordered(q_load32(src + 4 * i));
        lo = key < lo ? key : lo;
        hi = key > hi ? key : hi;
    }
    *low = q_float((uint32_t)q_ordered((uint32_t)lo));
    *high = q_float((uint32_t)q_ordered((uint32_t)hi));
    return (uint32_t)(hi > (int32_t)Q_F32_65504) | (uint32_t)(lo < q_ordered(Q_F32_65504 | Q_F32_SIGN));
}

static inline void q_group_codes(const uint8_t *restrict src, uint8_t *restrict codes, size_t n, float min,
                                 float inverse) {
    for (size_t i = 0; i < n; i++) {
        float code = (q_float(q_load32(src + 4 * i)) - min) * inverse + 12582912.0f; /* 1.5 * 2^23: rounds to even */
        codes[i] = (uint8_t)(q_bits(code) - 0x4b400000u);
    }
}

/* The fp16 pairs of groups from their ranges. In: mins are the smallest values; out: the rounded ones. */
static inline void q_int8_pairs(float *mins, const float *highs, float *inverses, uint8_t *pairs, size_t groups) {
    for (size_t g = 0; g < groups; g++) {
        float lo = mins[g] + 0.0f, hi = highs[g] + 0.0f; /* -0 becomes +0 */
        uint32_t half_min = q_half_down(lo);
        float min = q_float(q_half_to(half_min));
        uint32_t half_scale = q_half_up((hi - min) / 255.0f);
        float scale = q_float(q_half_to(half_scale));
        mins[g] = min;
        inverses[g] = scale > 0.0f ? 1.0f / scale : 0.0f;
        q_store32(pairs + 4 * g, half_scale | half_min << 16);
    }
}

#if defined(__x86_64__)
/* Eight fp16 words, each in a word of 32 bits, as floats. */
__attribute__((target("avx2,f16c"))) static inline __m256 q_wide_halves(__m256i halves) {
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}

/* As q_group_range for whole groups. A NaN may hide from minimum and maximum, not from the largest magnitude. */
__attribute__((target("avx2"))) static uint32_t q_ranges_avx2(const uint8_t *src, size_t groups, float *low,
                                                              float *high) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256i top = _mm256_setzero_si256();
    for (size_t g = 0; g < groups; g++, src += 4 * Q_GROUP) {
        __m256 part[4];
        for (int i = 0; i < 4; i++) {
            part[i] = _mm256_loadu_ps((const float *)(const void *)(src + 32 * i));
            top = _mm256_max_epi32(top, _mm256_castps_si256(_mm256_andnot_ps(sign, part[i])));
        }
        __m256 lo = _mm256_min_ps(_mm256_min_ps(part[0], part[1]), _mm256_min_ps(part[2], part[3]));
        __m256 hi = _mm256_max_ps(_mm256_max_ps(part[0], part[1]), _mm256_max_ps(part[2], part[3]));
        hi = _mm256_xor_ps(hi, sign); /* both as minima: one way through the lanes for the two */
        lo = _mm256_min_ps(_mm256_unpacklo_ps(lo, hi), _mm256_unpackhi_ps(lo, hi));
        __m128 both = _mm_min_ps(_mm256_castps256_ps128(lo), _mm256_extractf128_ps(lo, 1));
        both = _mm_min_ps(both, _mm_movehl_ps(both, both));
        low[g] = _mm_cvtss_f32(both);
        high[g] = -_mm_cvtss_f32(_mm_movehdup_ps(both));
    }
    return _mm256_movemask_epi8(_mm256_cmpgt_epi32(top, _mm256_set1_epi32(Q_F32_65504))) != 0;
}

/* As q_int8_pairs, eight groups at a time. */
__attribute__((target("avx2,f16c"))) static void q_int8_pairs_avx2(float *mins, const float *highs, float *inverses,
                                                                   uint8_t *pairs, size_t groups) {
    const __m256 zero = _mm256_setzero_ps(), steps = _mm256_set1_ps(255.0f), one = _mm256_set1_ps(1.0f);
    const __m256i signs = _mm256_set1_epi32(0x7fff);
    for (size_t g = 0; g < groups; g += 8) {
        __m256 lo = _mm256_add_ps(_mm256_loadu_ps(mins + g), zero), hi = _mm256_add_ps(_mm256_loadu_ps(highs + g), zero);
        __m128i near = _mm256_cvtps_ph(lo, _MM_FROUND_TO_NEAREST_INT);
        __m256i half_min = _mm256_cvtepu16_epi32(near), negative = _mm256_cmpgt_epi32(half_min, signs);
        __m256i over = _mm256_castps_si256(_mm256_cmp_ps(_mm256_cvtph_ps(near), lo, _CMP_GT_OQ)); /* -1 is one step */
        half_min = _mm256_add_epi32(half_min, _mm256_sub_epi32(_mm256_xor_si256(over, negative), negative));
        __m256 min = q_wide_halves(half_min);
        __m256 step = _mm256_div_ps(_mm256_sub_ps(hi, min), steps);
        near = _mm256_cvtps_ph(step, _MM_FROUND_TO_NEAREST_INT);
        __m256i under = _mm256_castps_si256(_mm256_cmp_ps(_mm256_cvtph_ps(near), step, _CMP_LT_OQ));
        __m256i half_scale = _mm256_sub_epi32(_mm256_cvtepu16_epi32(near), under);
        __m256 scale = q_wide_halves(half_scale), some = _mm256_cmp_ps(scale, zero, _CMP_GT_OQ);
        _mm256_storeu_ps(mins + g, min);
        _mm256_storeu_ps(inverses + g, _mm256_and_ps(some, _mm256_div_ps(one, scale)));
        _mm256_storeu_si256((__m256i *)(void *)(pairs + 4 * g),
                            _mm256_or_si256(half_scale, _mm256_slli_epi32(half_min, 16)));
    }
}

__attribute__((target("avx2"))) static void q_int8_codes_avx2(const uint8_t *src, uint8_t *codes, size_t groups,
                                                              const float *mins, const float *inverses) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* packing works within 128-bit lanes */
    for (size_t g = 0; g < groups; g++, src += 4 * Q_GROUP, codes += Q_GROUP) {
        const __m256 min = _mm256_set1_ps(mins[g]), inverse = _mm256_set1_ps(inverses[g]);
        __m256i part[4];
        for (int i = 0; i < 4; i++) {
            __m256 values = _mm256_loadu_ps((const float *)(const void *)(src + 32 * i));
            part[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_sub_ps(values, min), inverse)); /* rounds to even */
        }
        __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(part[0], part[1]), _mm256_packs_epi32(part[2], part[3]));
        _mm256_storeu_si256((__m256i *)(void *)codes, _mm256_permutevar8x32_epi32(bytes, order));
    }
}

/* Whole groups. */
__attribute__((target("avx2,f16c"))) static void q_int8_values_avx2(const uint8_t *codes, const uint8_t *pairs,
                                                                    uint8_t *dst, size_t groups) {
    const __m256 top = _mm256_set1_ps(65504.0f), bottom = _mm256_set1_ps(-65504.0f);
    for (size_t g = 0; g < groups; g++, pairs += 4) {
        __m128 pair = _mm_cvtph_ps(_mm_cvtsi32_si128((int)q_load32(pairs)));
        const __m256 scale = _mm256_broadcastss_ps(pair), min = _mm256_broadcastss_ps(_mm_movehdup_ps(pair));
        for (int i = 0; i < 4; i++, codes += 8, dst += 32) {
            __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)codes));
            __m256 value = _mm256_add_ps(min, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(code)));
            value = _mm256_max_ps(bottom, _mm256_min_ps(top, value)); /* the second operand where one is a NaN */
            _mm256_storeu_ps((float *)(void *)dst, value);
        }
    }
}
#endif

/* Up to Q_CHUNK values of one row, starting at a group boundary: codes to `codes`, pairs to `pairs`. Three loops, so
 * that each vectorises: ranges, the pairs of all groups at once, codes.
 * min is rounded down and scale up, both to fp16, and the codes are chosen against the rounded pair: x - min is never
 * negative and (hi - min) / scale exceeds 255 by less than 2^-14, so no code needs clamping. A constant group that
 * fp16 holds gets scale 0 and is exact. Nonzero: a value is not within +-65504. */
Q_CLONES static uint32_t q_fp32_to_int8(const uint8_t *src, uint8_t *codes, uint8_t *pairs, size_t n, int avx2) {
    float mins[Q_CHUNK / Q_GROUP], highs[Q_CHUNK / Q_GROUP], inverses[Q_CHUNK / Q_GROUP] = {0};
    size_t groups = (n + Q_GROUP - 1) / Q_GROUP, done = 0;
    uint32_t bad = 0;
#if defined(__x86_64__)
    if (avx2) {
        done = n / Q_GROUP;
        bad = q_ranges_avx2(src, done, mins, highs);
    }
#else
    (void)avx2;
#endif
    for (size_t g = done; g < groups; g++) {
        size_t at = Q_GROUP * g;
        bad |= q_group_range(src + 4 * at, n - at < Q_GROUP ? n - at : Q_GROUP, mins + g, highs + g);
    }
    if (bad) return bad;
    size_t eights = avx2 ? groups / 8 * 8 : 0;
#if defined(__x86_64__)
    if (avx2) q_int8_pairs_avx2(mins, highs, inverses, pairs, eights);
#endif
    q_int8_pairs(mins + eights, highs + eights, inverses + eights, pairs + 4 * eights, groups - eights);
#if defined(__x86_64__)
    if (avx2) q_int8_codes_avx2(src, codes, done, mins, inverses);
#endif
    for (size_t g = done; g < groups; g++) {
        size_t at = Q_GROUP * g;
        q_group_codes(src + 4 * at, codes + at, n - at < Q_GROUP ? n - at : Q_GROUP, mins[g], inverses[g]);
    }
    return 0;
}

Q_CLONES static void q_int8_groups_to_fp32(const uint8_t *codes, const uint8_t *pairs, uint8_t *dst, size_t n) {
    for (size_t start = 0; start < n; start += Q_GROUP) {
        float scale = q_float(q_half_to(q_load16(pairs + start / 8)));
        float min = q_float(q_half_to(q_load16(pairs + start / 8 + 2)));
        size_t stop = n - start < Q_GROUP ? n : start + Q_GROUP;
        if (stop - start == Q_GROUP) {
            for (size_t i = 0; i < Q_GROUP; i++)
                q_store32(dst + 4 * (start + i), q_bits(q_within_half(min + scale * (float)codes[start + i])));
        } else {
            for (size_t i = start; i < stop; i++)
                q_store32(dst + 4 * i, q_bits(q_within_half(min + scale * (float)codes[i])));
        }
    }
}

static inline void q_int8_row_to_fp32(const uint8_t *row, uint8_t *dst, size_t dim, int avx2) {
    size_t whole = 0;
#if defined(__x86_64__)
    if (avx2) {
        whole = dim / Q_GROUP;
        q_int8_values_avx2(row, row + dim, dst, whole);
    }
#else
    (void)avx2;
#endif
    q_int8_groups_to_fp32(row + Q_GROUP * whole, row + dim + 4 * whole, dst + 4 * Q_GROUP * whole, dim - Q_GROUP * whole);
}

static inline uint32_t q_int8_row(int from, const uint8_t *src, uint8_t *row, size_t dim, int f16c) {
    uint8_t wide[4 * Q_CHUNK];
    uint32_t bad = 0;
    for (size_t i = 0; i < dim; i += Q_CHUNK) {
        size_t m = dim - i < Q_CHUNK ? dim - i : Q_CHUNK;
        const uint8_t *values = wide;
        if (from == Q_FP32) values = src + 4 * i;
        else q_widen(from, src + 2 * i, wide, m, f16c);
        bad |= q_fp32_to_int8(values, row + i, row + dim + i / 8, m, f16c);
    }
    return bad;
}

#endif
