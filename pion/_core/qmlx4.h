/* mlx4g32 rows: what mlx.core.quantize(row.astype(float16), group_size=32, bits=4) gives, bit for bit, so that a
 * QuantizedKVCache takes them as they are: dim / 8 uint32 with eight codes each, dim / 32 fp16 scales, dim / 32 fp16
 * biases. A value is scale * code + bias. The algorithm is that of MLX's affine quantization: the scale is chosen such
 * that the value of the larger magnitude (the edge) and zero are multiples of it; all arithmetic in fp32, the codes
 * against the unrounded scale and bias.
 */
#ifndef PION_QMLX4_H
#define PION_QMLX4_H

#include "qfp8.h"
#include "qint8.h"
#include "qpack.h"

static inline size_t q_mlx4_bytes(size_t dim) { return dim % Q_GROUP ? 0 : dim / 2 + dim / 8; }

static inline float q_mlx4_scale(float low, float high, float *bias) {
    float low_mag = low < 0.0f ? -low : low, high_mag = high < 0.0f ? -high : high;
    int negative_edge = low_mag > high_mag;
    float scale = (high - low) / 15.0f;
    scale = scale > 1e-7f ? scale : 1e-7f;
    float edge = negative_edge ? low : high;
    scale = negative_edge ? scale : -scale;
    float ratio = edge / scale, steps = ratio < 0.0f ? -ratio : ratio; /* positive in a negative constant group alone */
    if (steps < 8388608.0f) steps = (steps + 8388608.0f) - 8388608.0f; /* 2^23: to the nearest integer, even on ties */
    *bias = steps > 0.0f ? edge : 0.0f;
    return steps > 0.0f ? edge / (ratio < 0.0f ? -steps : steps) : scale;
}

static inline void q_mlx4_codes(const uint8_t *restrict src, uint8_t *restrict codes, float scale, float bias) {
    for (size_t i = 0; i < Q_GROUP; i++) {
        float code = (q_float(q_load32(src + 4 * i)) - bias) / scale;
        code = code > 0.0f ? code : 0.0f;
        code = code < 15.0f ? code : 15.0f;
        codes[i] = (uint8_t)(q_bits(code + 8388608.0f) - 0x4b000000u);
    }
}

/* Up to Q_CHUNK values, whole groups, of one row. Nonzero: a value is not within +-65504. */
Q_CLONES static uint32_t q_fp32_to_mlx4(const uint8_t *src, uint8_t *packed, uint8_t *scales, uint8_t *biases,
                                        size_t n) {
    float low[Q_CHUNK / Q_GROUP], high[Q_CHUNK / Q_GROUP];
    float scale[Q_CHUNK / Q_GROUP], bias[Q_CHUNK / Q_GROUP];
    uint8_t codes[Q_GROUP];
    size_t groups = n / Q_GROUP;
    uint32_t bad = 0;
    for (size_t g = 0; g < groups; g++) bad |= q_group_range(src + 4 * Q_GROUP * g, Q_GROUP, low + g, high + g);
    for (size_t g = 0; g < groups; g++) {
        scale[g] = q_mlx4_scale(low[g] + 0.0f, high[g] + 0.0f, bias + g); /* -0 becomes +0 */
        q_store16(scales + 2 * g, q_half_of(q_bits(scale[g])));
        q_store16(biases + 2 * g, q_half_of(q_bits(bias[g])));
    }
    if (bad) return bad;
    for (size_t g = 0; g < groups; g++) {
        q_mlx4_codes(src + 4 * Q_GROUP * g, codes, scale[g], bias[g]);
        q_pack_codes(codes, packed + Q_GROUP / 2 * g, Q_GROUP, 4);
    }
    return 0;
}

Q_CLONES static void q_mlx4_row_to_fp32(const uint8_t *row, uint8_t *dst, size_t dim) {
    const uint8_t *scales = row + dim / 2, *biases = scales + dim / 16;
    uint8_t codes[Q_GROUP];
    for (size_t g = 0; g < dim / Q_GROUP; g++) {
        float scale = q_float(q_half_to(q_load16(scales + 2 * g))), bias = q_float(q_half_to(q_load16(biases + 2 * g)));
        q_unpack_codes(row + Q_GROUP / 2 * g, codes, Q_GROUP, 4);
        for (size_t i = 0; i < Q_GROUP; i++)
            q_store32(dst + 4 * (Q_GROUP * g + i), q_bits(q_within_half(scale * (float)codes[i] + bias)));
    }
}

#if defined(__x86_64__)
/* The same, a group at a time in registers, straight from the source's words. */
__attribute__((target("avx2,f16c"))) static uint32_t q_mlx4_row_f16c(int from, const uint8_t *src, uint8_t *row,
                                                                      size_t dim) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), limit = _mm256_set1_epi32(Q_F32_65504);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    uint8_t *scales = row + dim / 2, *biases = scales + dim / 16;
    __m256i bad = _mm256_setzero_si256();
    for (size_t g = 0; g < dim / Q_GROUP; g++) {
        __m256 x[4];
        for (int k = 0; k < 4; k++) {
            size_t at = Q_GROUP * g + 8 * (size_t)k;
            __m256i words;
            if (from == Q_FP16) {
                __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(src + 2 * at));
                words = _mm256_castps_si256(_mm256_cvtph_ps(half));
            } else if (from == Q_BF16) {
                __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(src + 2 * at));
                words = _mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
            } else {
                words = _mm256_loadu_si256((const __m256i *)(const void *)(src + 4 * at));
            }
            bad = _mm256_or_si256(bad, _mm256_cmpgt_epi32(_mm256_and_si256(words, magnitude), limit));
            x[k] = _mm256_castsi256_ps(words);
            if (from != Q_FP16) x[k] = _mm256_cvtph_ps(_mm256_cvtps_ph(x[k], 0));
        }
        __m256 low = _mm256_min_ps(_mm256_min_ps(x[0], x[1]), _mm256_min_ps(x[2], x[3]));
        __m256 high = _mm256_max_ps(_mm256_max_ps(x[0], x[1]), _mm256_max_ps(x[2], x[3]));
        __m128 lo = _mm_min_ps(_mm256_castps256_ps128(low), _mm256_extractf128_ps(low, 1));
        __m128 hi = _mm_max_ps(_mm256_castps256_ps128(high), _mm256_extractf128_ps(high, 1));
        lo = _mm_min_ps(lo, _mm_movehl_ps(lo, lo));
        hi = _mm_max_ps(hi, _mm_movehl_ps(hi, hi));
        lo = _mm_min_ss(lo, _mm_shuffle_ps(lo, lo, 1));
        hi = _mm_max_ss(hi, _mm_shuffle_ps(hi, hi, 1));
        float bias, scale = q_mlx4_scale(_mm_cvtss_f32(lo) + 0.0f, _mm_cvtss_f32(hi) + 0.0f, &bias);
        __m128i pair = _mm_cvtps_ph(_mm_setr_ps(scale, bias, 0.0f, 0.0f), 0);
        q_store16(scales + 2 * g, (uint32_t)_mm_extract_epi16(pair, 0));
        q_store16(biases + 2 * g, (uint32_t)_mm_extract_epi16(pair, 1));
        const __m256 from_bias = _mm256_set1_ps(bias), step = _mm256_set1_ps(scale), top = _mm256_set1_ps(15.0f);
        __m256i code[4];
        for (int k = 0; k < 4; k++) {
            __m256 steps = _mm256_div_ps(_mm256_sub_ps(x[k], from_bias), step);
            steps = _mm256_min_ps(_mm256_max_ps(steps, _mm256_setzero_ps()), top);
            code[k] = _mm256_cvtps_epi32(steps);
        }
        __m256i first = _mm256_packs_epi32(code[0], code[1]), second = _mm256_packs_epi32(code[2], code[3]);
        __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order);
        __m256i nibbles = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001)); /* even + 16 * odd */
        nibbles = _mm256_permute4x64_epi64(_mm256_packus_epi16(nibbles, nibbles), 0x08);
        _mm_storeu_si128((__m128i *)(void *)(row + Q_GROUP / 2 * g), _mm256_castsi256_si128(nibbles));
    }
    return !_mm256_testz_si256(bad, bad);
}
#endif

static inline uint32_t q_mlx4_row(int from, const uint8_t *src, uint8_t *row, size_t dim, int f16c) {
    uint8_t half[2 * Q_CHUNK], wide[4 * Q_CHUNK];
    uint32_t bad = 0;
#if defined(__x86_64__)
    if (f16c) return q_mlx4_row_f16c(from, src, row, dim);
#endif
    for (size_t i = 0; i < dim; i += Q_CHUNK) {
        size_t m = dim - i < Q_CHUNK ? dim - i : Q_CHUNK;
        const uint8_t *halves = half;
        if (from == Q_FP16) halves = src + 2 * i;
        else bad |= q_flat(from, Q_FP16, src + (from == Q_FP32 ? 4 : 2) * i, half, m, f16c);
        q_fp16_to_fp32(halves, wide, m, f16c);
        bad |= q_fp32_to_mlx4(wide, row + i / 2, row + dim / 2 + i / 16, row + dim / 2 + dim / 16 + i / 16, m);
    }
    return bad;
}

#endif
