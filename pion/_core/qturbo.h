/* turbo4, turbo3 and turbo2 rows: random rotation, Lloyd-Max codes, one gain a block (after TurboQuant, arXiv
 * 2504.19874, without its residual stage). pion/ref/turbo.py tells the same in numpy.
 *
 * A row is split into blocks (q_turbo_next). A block is rotated by signs, a Hartley (x) Hadamard matrix, other signs
 * and the matrix again: orthogonal for any size m * 2^k with m odd and at most 15, up to a factor that the gain takes.
 * Two rounds, because after one a row with a single large value has two sharp peaks and not a bell. The signs come first:
 * without them a constant row collapses onto one value (case C6).
 * Stored are the codes of all blocks, bits wide each and rounded up to a byte for a block, then a 16-bit gain for each
 * block: bits 30..15 of a positive fp32. A value's code is the index of its magnitude's level, plus half the number of
 * codes when it is negative.
 * The gain gives the decoded block the norm of the original. Least squares would shrink it by the relative error D
 * (12 % at 2 bits), and a sum over many decoded rows, as attention forms it of V, keeps that bias while the rest
 * averages out; keeping the norm raises D by a share D / 4 (0.2 % at 4 bits, 0.9 % at 3, 3.1 % at 2). At 2 bits the
 * gain is 1/128 smaller, which brings that to 2.4 %.
 */
#ifndef PION_QTURBO_H
#define PION_QTURBO_H

#include <math.h>

#include "qfp8.h"
#include "qpack.h"

#define Q_INLINE static inline __attribute__((always_inline))

enum { Q_TURBO_MOST = 4096, Q_TURBO_BLOCK = 128, Q_TURBO_ODD = 15, Q_TURBO_PASSES = 1 };
#define Q_TURBO_SEED_A 0xf793a9b9u /* of many, those that treat constant rows and ramps best at all usual sizes */
#define Q_TURBO_SEED_B 0x2b4861ecu
#define Q_TURBO_TINY 0x21800000u /* 2^-60: a block with no larger magnitude is zero */

static const float q_levels_2[2] = {0.45278004f, 1.5104176f};
static const float q_levels_3[4] = {0.24509418f, 0.7560053f, 1.3439093f, 2.1519456f};
static const float q_levels_4[8] = {0.12839504f, 0.3880483f,  0.65675914f, 0.94234043f,
                                    1.2562312f,  1.6180464f,  2.0690172f,  2.7325895f};
static const float q_edges_2[1] = {0.9815988f};
static const float q_edges_3[3] = {0.50054973f, 1.0499573f, 1.7479275f};
static const float q_edges_4[7] = {0.25822166f, 0.5224037f, 0.79954976f, 1.0992858f,
                                   1.4371388f,  1.8435318f, 2.4008033f};

/* cos + sin of 2 pi t / m for m = 3, 5, ... 15, one after the other; m starts at (m * m - 2 * m - 3) / 4. */
static const float q_hartley_table[63] = {
    1.0f, 0.36602542f, -1.3660254f,
    1.0f, 1.2600735f, -0.22123174f, -1.3968023f, -0.64203954f,
    1.0f, 1.4053212f, 0.75240695f, -0.46708512f, -1.3348526f, -1.1974488f, -0.15834168f,
    1.0f, 1.4088321f, 1.158456f, 0.36602542f, -0.59767246f, -1.2817128f, -1.3660254f, -0.81115955f, 0.12325683f,
    1.0f, 1.3818944f, 1.325047f, 0.8475066f, 0.10088884f, -0.6777604f, -1.2412255f, -1.4106103f, -1.1321362f,
    -0.49421698f, 0.30061272f,
    1.0f, 1.3501792f, 1.3910487f, 1.1132456f, 0.5804114f, -0.08538809f, -0.73162615f, -1.2102575f, -1.4116334f,
    -1.2896211f, -0.8721722f, -0.2549191f, 0.42073286f,
    1.0f, 1.3202821f, 1.4122754f, 1.2600735f, 0.8899934f, 0.36602542f, -0.22123174f, -0.7702359f, -1.1860592f,
    -1.3968023f, -1.3660254f, -1.0990504f, -0.64203954f, -0.07401422f, 0.5068088f,
};

/* ---- layout ---------------------------------------------------------------------------------------------------- */

static inline size_t q_odd_part(size_t n) { return n / (n & (~n + 1)); }

/* The next block of a piece with `left` values to go: all of it when its odd factor is small, else a power of two. */
static inline size_t q_turbo_next(size_t left, size_t most) {
    if (left <= most && q_odd_part(left) <= Q_TURBO_ODD) return left;
    size_t block = most;
    while (block > left) block >>= 1;
    return block;
}

typedef struct q_turbo {
    int bits;
    size_t piece, most;     /* the row is whole pieces, each split alone into blocks of at most `most` values */
    size_t packed, blocks;  /* bytes of the codes of a row, and its blocks */
} q_turbo;

static inline q_turbo q_turbo_layout(int bits, size_t head, size_t dim) {
    int given = head != 0 && dim % head == 0;
    q_turbo t = {bits, given ? head : dim, given ? Q_TURBO_MOST : Q_TURBO_BLOCK, 0, 0};
    for (size_t left = t.piece, block; left; left -= block) {
        block = q_turbo_next(left, t.most);
        t.packed += (block * (size_t)bits + 7) / 8;
        t.blocks++;
    }
    t.packed *= dim / t.piece;
    t.blocks *= dim / t.piece;
    return t;
}

static inline size_t q_turbo_bytes(int bits, size_t head, size_t dim) {
    q_turbo t = q_turbo_layout(bits, head, dim);
    return t.packed + 2 * t.blocks;
}

/* ---- rotation -------------------------------------------------------------------------------------------------- */

Q_INLINE float q_lanes(const float *lane) {
    float four[4] = {lane[0] + lane[4], lane[1] + lane[5], lane[2] + lane[6], lane[3] + lane[7]};
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* Sum of a[i] * b[i] in eight lanes; both are zero from n up to a multiple of 8. */
Q_CLONES static float q_dot(const float *a, const float *b, size_t n) {
    float lane[8] = {0};
    for (size_t i = 0; i < n; i += 8)
        for (size_t l = 0; l < 8; l++) lane[l] = lane[l] + a[i + l] * b[i + l];
    return q_lanes(lane);
}

static inline uint32_t q_hash32(uint32_t word) {
    word = (word ^ word >> 16) * 0x85ebca6bu;
    word = (word ^ word >> 13) * 0xc2b2ae35u;
    return word ^ word >> 16;
}

/* Flip the sign of y[i] where bit i % 32 of a hash of seed + i / 32 is set. */
Q_INLINE void q_flip(float *y, size_t n, uint32_t seed) {
    uint32_t whole = (uint32_t)(n / 32), rest = (uint32_t)(n % 32);
    for (uint32_t w = 0; w < whole; w++, y += 32) {
        uint32_t word = q_hash32(seed + w);
        for (uint32_t j = 0; j < 32; j++) y[j] = q_float(q_bits(y[j]) ^ (word >> j << 31));
    }
    uint32_t word = q_hash32(seed + whole);
    for (uint32_t j = 0; j < rest; j++) y[j] = q_float(q_bits(y[j]) ^ (word >> j << 31));
}

Q_INLINE void q_butterflies(float *y, size_t from, size_t n, size_t stride) {
    for (size_t i = from; i < from + n; i += 2 * stride) {
        for (size_t j = i; j < i + stride; j++) {
            float a = y[j], b = y[j + stride];
            y[j] = a + b;
            y[j + stride] = a - b;
        }
    }
}

/* Unnormalised Hadamard transform of each run of `n` (a power of two) of the `total` values. */
Q_CLONES static void q_hadamard_plain(float *y, size_t total, size_t n) {
    for (size_t stride = n / 2; stride >= 8; stride /= 2) q_butterflies(y, 0, total, stride);
    if (n >= 8) q_butterflies(y, 0, total, 4);
    if (n >= 4) q_butterflies(y, 0, total, 2);
    if (n >= 2) q_butterflies(y, 0, total, 1);
}

#if defined(__x86_64__)
/* The same additions in the same order, eight at a time; n is at least 8. Answers the sum of the results' squares, as
 * q_dot of them. */
__attribute__((target("avx2"))) static float q_hadamard_avx2(float *y, size_t total, size_t n) {
    const __m256 high4 = _mm256_castsi256_ps(_mm256_setr_epi32(0, 0, 0, 0, INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN));
    const __m256 high2 = _mm256_castsi256_ps(_mm256_setr_epi32(0, 0, INT32_MIN, INT32_MIN, 0, 0, INT32_MIN, INT32_MIN));
    const __m256 high1 = _mm256_castsi256_ps(_mm256_setr_epi32(0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN, 0, INT32_MIN));
    size_t stride = n / 2;
    for (; stride >= 16; stride /= 4) { /* two strides in one pass */
        size_t half = stride / 2;
        for (size_t i = 0; i < total; i += 2 * stride) {
            for (size_t j = i; j < i + half; j += 8) {
                __m256 a = _mm256_loadu_ps(y + j), b = _mm256_loadu_ps(y + j + half);
                __m256 c = _mm256_loadu_ps(y + j + stride), d = _mm256_loadu_ps(y + j + stride + half);
                __m256 ac = _mm256_add_ps(a, c), bd = _mm256_add_ps(b, d);
                __m256 a_c = _mm256_sub_ps(a, c), b_d = _mm256_sub_ps(b, d);
                _mm256_storeu_ps(y + j, _mm256_add_ps(ac, bd));
                _mm256_storeu_ps(y + j + half, _mm256_sub_ps(ac, bd));
                _mm256_storeu_ps(y + j + stride, _mm256_add_ps(a_c, b_d));
                _mm256_storeu_ps(y + j + stride + half, _mm256_sub_ps(a_c, b_d));
            }
        }
    }
    for (size_t i = 0; i < total; i += 2 * stride) {
        if (stride < 8) break;
        __m256 a = _mm256_loadu_ps(y + i), b = _mm256_loadu_ps(y + i + 8);
        _mm256_storeu_ps(y + i, _mm256_add_ps(a, b));
        _mm256_storeu_ps(y + i + 8, _mm256_sub_ps(a, b));
    }
    __m256 squares = _mm256_setzero_ps();
    for (size_t i = 0; i < total; i += 8) { /* a - b is a + -b, bit for bit */
        __m256 v = _mm256_loadu_ps(y + i);
        v = _mm256_add_ps(_mm256_permute2f128_ps(v, v, 1), _mm256_xor_ps(v, high4));
        v = _mm256_add_ps(_mm256_permute_ps(v, 0x4e), _mm256_xor_ps(v, high2));
        v = _mm256_add_ps(_mm256_permute_ps(v, 0xb1), _mm256_xor_ps(v, high1));
        _mm256_storeu_ps(y + i, v);
        squares = _mm256_add_ps(squares, _mm256_mul_ps(v, v));
    }
    float lanes[8];
    _mm256_storeu_ps(lanes, squares);
    return q_lanes(lanes);
}
#endif

/* The Hartley matrix of m = n / run over runs: run k of the result is the sum of cas(2 pi j k / m) times run j. */
Q_CLONES static void q_hartley(float *restrict y, size_t n, size_t run) {
    float mixed[Q_TURBO_MOST];
    size_t m = n / run;
    const float *factor = q_hartley_table + (m * m - 2 * m - 3) / 4;
    for (size_t k = 0; k < m; k++) {
        float *out = mixed + k * run;
        for (size_t i = 0; i < run; i++) out[i] = y[i] * factor[0];
        for (size_t j = 1; j < m; j++) {
            float f = factor[j * k % m];
            for (size_t i = 0; i < run; i++) out[i] = out[i] + y[j * run + i] * f;
        }
    }
    memcpy(y, mixed, 4 * n);
}

/* `energy` (unless NULL) gets the sum of the result's squares; then 8 values more than n are writable. */
static inline void q_spread(float *y, size_t n, int avx2, float *energy) {
    size_t run = n / q_odd_part(n), padded = (n + 7) & ~(size_t)7;
    int fast = avx2 && run >= 8;
#if defined(__x86_64__)
    float sum = 0;
    if (fast) sum = q_hadamard_avx2(y, n, run);
    if (fast && run == n) {
        if (energy != NULL) *energy = sum;
        return;
    }
#else
    fast = 0;
#endif
    if (!fast) q_hadamard_plain(y, n, run);
    if (run != n) q_hartley(y, n, run);
    if (energy == NULL) return;
    memset(y + n, 0, 4 * (padded - n));
    *energy = q_dot(y, y, padded);
}

Q_CLONES static void q_flip_a(float *y, size_t n) { q_flip(y, n, Q_TURBO_SEED_A); }

Q_CLONES static void q_flip_b(float *y, size_t n) { q_flip(y, n, Q_TURBO_SEED_B); }

/* ---- codes ----------------------------------------------------------------------------------------------------- */

/* Level and index for each magnitude. The levels rise, so each edge passed replaces a level by the next. */
Q_INLINE void q_pick(const float *restrict y, size_t n, float scale, const float *levels, const float *edges, int half,
                     float *restrict picked, uint8_t *restrict codes) {
    for (size_t i = 0; i < n; i++) {
        uint32_t word = q_bits(y[i]), index = 0, level = q_bits(levels[0]);
        float mag = q_float(word & ~Q_F32_SIGN) * scale;
        for (int k = 0; k + 1 < half; k++) {
            uint32_t over = mag > edges[k] ? 0xffffffffu : 0u;
            index -= over;
            level ^= over & (q_bits(levels[k]) ^ q_bits(levels[k + 1]));
        }
        picked[i] = q_float(level | (word & Q_F32_SIGN));
        codes[i] = (uint8_t)(index + (word >> 31) * (uint32_t)half);
    }
}

Q_CLONES static void q_pick_4(const float *y, size_t n, float scale, float *picked, uint8_t *codes) {
    q_pick(y, n, scale, q_levels_4, q_edges_4, 8, picked, codes);
}

Q_CLONES static void q_pick_3(const float *y, size_t n, float scale, float *picked, uint8_t *codes) {
    q_pick(y, n, scale, q_levels_3, q_edges_3, 4, picked, codes);
}

Q_CLONES static void q_pick_2(const float *y, size_t n, float scale, float *picked, uint8_t *codes) {
    q_pick(y, n, scale, q_levels_2, q_edges_2, 2, picked, codes);
}

static inline void q_pick_any(int bits, const float *y, size_t n, float scale, float *picked, uint8_t *codes) {
    if (bits == 4) q_pick_4(y, n, scale, picked, codes);
    else if (bits == 3) q_pick_3(y, n, scale, picked, codes);
    else q_pick_2(y, n, scale, picked, codes);
}

/* The codes (unless NULL) and the two sums that fit levels to y: of level^2 and of |y| level. y holds zeros up to a
 * multiple of 8. */
static inline void q_fit_plain(int bits, const float *y, size_t n, float scale, uint8_t *codes, float *weight,
                               float *product) {
    float picked[Q_TURBO_MOST + 8];
    uint8_t unused[Q_TURBO_MOST + 8];
    size_t padded = (n + 7) & ~(size_t)7;
    uint8_t *to = codes == NULL ? unused : codes;
    memset(picked + n, 0, 4 * (padded - n));
    memset(to + n, 0, padded - n);
    q_pick_any(bits, y, n, scale, picked, to);
    *weight = q_dot(picked, picked, padded);
    *product = q_dot(y, picked, padded);
}

/* The values of n codes. */
static inline void q_values_plain(int bits, const uint8_t *codes, size_t n, float *y) {
    const float *levels = bits == 4 ? q_levels_4 : bits == 3 ? q_levels_3 : q_levels_2;
    size_t half = (size_t)1 << (bits - 1);
    float table[16];
    for (size_t k = 0; k < half; k++) {
        table[k] = levels[k];
        table[k + half] = -levels[k];
    }
    for (size_t i = 0; i < n; i++) y[i] = table[codes[i] & 15];
}

#if defined(__x86_64__)
#define Q_AVX2 __attribute__((target("avx2"))) static

/* As q_fit_plain, for n a multiple of 8; the sums in the same lanes and order. `bits` is a constant of its callers.
 * A comparison yields -1, so the search for a level counts down from 0; lookups take an index's lower three bits, and the
 * tables stand in that order. */
__attribute__((always_inline)) Q_AVX2 inline void q_fit_bits(int bits, const float *y, size_t n, float scale,
                                                             uint8_t *codes, float *weight, float *product) {
    const float *levels = bits == 4 ? q_levels_4 : bits == 3 ? q_levels_3 : q_levels_2;
    const float *edges = bits == 4 ? q_edges_4 : bits == 3 ? q_edges_3 : q_edges_2;
    const int half = 1 << (bits - 1);
    const __m256 sign = _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN)), times = _mm256_set1_ps(scale);
    float level_table[8] = {0}, last_table[8] = {0}, lanes[8];
    for (int k = 0; k < half; k++) level_table[-k & 7] = levels[k];
    for (int k = 0; k < half / 2; k++) last_table[-k & 7] = edges[2 * k];
    const __m256 level = _mm256_loadu_ps(level_table), last = _mm256_loadu_ps(last_table);
    const __m256 middle = _mm256_set1_ps(edges[half / 2 - 1]);
    const __m256 lower = _mm256_set1_ps(edges[bits == 4 ? 1 : 0]), upper = _mm256_set1_ps(edges[bits == 4 ? 5 : 0]);
    __m256 squares = _mm256_setzero_ps(), products = _mm256_setzero_ps();
    for (size_t i = 0; i < n; i += 8) {
        __m256 v = _mm256_loadu_ps(y + i), mag = _mm256_andnot_ps(sign, v), at = _mm256_mul_ps(mag, times);
        __m256 over = _mm256_cmp_ps(at, middle, _CMP_GT_OQ);
        __m256i index = _mm256_castps_si256(over);
        if (bits == 4) {
            over = _mm256_cmp_ps(at, _mm256_blendv_ps(lower, upper, over), _CMP_GT_OQ);
            index = _mm256_add_epi32(_mm256_add_epi32(index, index), _mm256_castps_si256(over));
        }
        if (bits > 2) {
            over = _mm256_cmp_ps(at, _mm256_permutevar8x32_ps(last, index), _CMP_GT_OQ);
            index = _mm256_add_epi32(_mm256_add_epi32(index, index), _mm256_castps_si256(over));
        }
        __m256 picked = _mm256_permutevar8x32_ps(level, index);
        squares = _mm256_add_ps(squares, _mm256_mul_ps(picked, picked));
        products = _mm256_add_ps(products, _mm256_mul_ps(mag, picked));
        if (codes == NULL) continue;
        __m256i negative = _mm256_srli_epi32(_mm256_castps_si256(v), 31);
        __m256i code = _mm256_sub_epi32(_mm256_slli_epi32(negative, bits - 1), index);
        __m128i half_words = _mm_packs_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
        _mm_storel_epi64((__m128i *)(void *)(codes + i), _mm_packus_epi16(half_words, half_words));
    }
    _mm256_storeu_ps(lanes, squares);
    *weight = q_lanes(lanes);
    _mm256_storeu_ps(lanes, products);
    *product = q_lanes(lanes);
}

/* Without the codes, where only the sums are wanted. */
#define Q_FIT(BITS)                                                                                                    \
    Q_AVX2 void q_fit_##BITS(const float *y, size_t n, float scale, uint8_t *codes, float *weight, float *product) {   \
        if (codes == NULL) q_fit_bits(BITS, y, n, scale, NULL, weight, product);                                       \
        else q_fit_bits(BITS, y, n, scale, codes, weight, product);                                                    \
    }

Q_FIT(4)
Q_FIT(3)
Q_FIT(2)

/* As q_values_plain; y is written up to a multiple of 8. */
Q_AVX2 void q_values_avx2(int bits, const uint8_t *codes, size_t n, float *y) {
    const float *levels = bits == 4 ? q_levels_4 : bits == 3 ? q_levels_3 : q_levels_2;
    const int half = 1 << (bits - 1);
    const __m256 sign = _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MIN));
    float table[8];
    for (int k = 0; k < 8; k++) table[k] = levels[k % half]; /* the lookup takes three bits of a code */
    const __m256 level = _mm256_loadu_ps(table);
    for (size_t i = 0; i < n; i += 8) {
        __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(codes + i)));
        __m256 negative = _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32(code, 32 - bits)), sign);
        _mm256_storeu_ps(y + i, _mm256_xor_ps(_mm256_permutevar8x32_ps(level, code), negative));
    }
}
#endif

static inline void q_fit(int bits, const float *y, size_t n, float scale, uint8_t *codes, float *weight, float *product,
                         int avx2) {
#if defined(__x86_64__)
    if (avx2 && n % 8 == 0) {
        if (bits == 4) q_fit_4(y, n, scale, codes, weight, product);
        else if (bits == 3) q_fit_3(y, n, scale, codes, weight, product);
        else q_fit_2(y, n, scale, codes, weight, product);
        return;
    }
#endif
    (void)avx2;
    q_fit_plain(bits, y, n, scale, codes, weight, product);
}

static inline void q_values(int bits, const uint8_t *codes, size_t n, float *y, int avx2) {
#if defined(__x86_64__)
    if (avx2) {
        q_values_avx2(bits, codes, n, y);
        return;
    }
#endif
    (void)avx2;
    q_values_plain(bits, codes, n, y);
}

Q_CLONES static void q_pack_4(const uint8_t *codes, uint8_t *packed, size_t n) { q_pack_codes(codes, packed, n, 4); }

Q_CLONES static void q_pack_3(const uint8_t *codes, uint8_t *packed, size_t n) { q_pack_codes(codes, packed, n, 3); }

Q_CLONES static void q_pack_2(const uint8_t *codes, uint8_t *packed, size_t n) { q_pack_codes(codes, packed, n, 2); }

Q_CLONES static void q_unpack_4(const uint8_t *packed, uint8_t *codes, size_t n) {
    q_unpack_codes(packed, codes, n, 4);
}

Q_CLONES static void q_unpack_3(const uint8_t *packed, uint8_t *codes, size_t n) {
    q_unpack_codes(packed, codes, n, 3);
}

Q_CLONES static void q_unpack_2(const uint8_t *packed, uint8_t *codes, size_t n) {
    q_unpack_codes(packed, codes, n, 2);
}

/* ---- blocks and rows ------------------------------------------------------------------------------------------- */

Q_CLONES static uint32_t q_block_top(const uint8_t *src, size_t n) { return q_group_top(src, n); }

/* One block, in y (8 values more than n are writable): its codes to `packed`, the gain as the result. */
static inline uint32_t q_turbo_block(int bits, float *y, size_t n, uint8_t *packed, int avx2) {
    uint8_t codes[Q_TURBO_MOST + 8];
    q_flip_a(y, n);
    q_spread(y, n, avx2, NULL);
    q_flip_b(y, n);
    float energy, weight, product;
    q_spread(y, n, avx2, &energy);
    float scale = sqrtf((float)n / energy);
    for (int pass = 0;; pass++) {
        q_fit(bits, y, n, scale, pass == Q_TURBO_PASSES ? codes : NULL, &weight, &product, avx2);
        if (pass == Q_TURBO_PASSES) break;
        scale = weight / product;
    }
    if (bits == 4) q_pack_4(codes, packed, n);
    else if (bits == 3) q_pack_3(codes, packed, n);
    else q_pack_2(codes, packed, n);
    float gain = sqrtf(energy / weight) / (float)n;
    return (q_bits(bits == 2 ? gain * 0.9921875f : gain) + 0x4000u) >> 15;
}

static inline uint32_t q_turbo_row(int bits, size_t head, int from, const uint8_t *src, uint8_t *row, size_t dim,
                                   int best) {
    float y[Q_TURBO_MOST + 8];
    q_turbo t = q_turbo_layout(bits, head, dim);
    uint8_t *gains = row + t.packed;
    size_t width = from == Q_FP32 ? 4 : 2;
    for (size_t piece = 0; piece < dim; piece += t.piece) {
        for (size_t left = t.piece, n; left; left -= n, src += width * n, gains += 2) {
            n = q_turbo_next(left, t.most);
            if (from == Q_FP32) memcpy(y, src, 4 * n);
            else q_widen(from, src, (uint8_t *)y, n, best);
            uint32_t top = q_block_top((const uint8_t *)y, n), gain = 0;
            if (top > Q_F32_65504) return 1;
            if (top < Q_TURBO_TINY) memset(row, 0, (n * (size_t)bits + 7) / 8);
            else gain = q_turbo_block(bits, y, n, row, best);
            q_store16(gains, gain);
            row += (n * (size_t)bits + 7) / 8;
        }
    }
    return 0;
}

Q_CLONES static void q_scale_out(const float *y, uint8_t *dst, size_t n, float scale) {
    for (size_t i = 0; i < n; i++) q_store32(dst + 4 * i, q_bits(q_within_half(y[i] * scale)));
}

static inline void q_turbo_row_to_fp32(int bits, size_t head, const uint8_t *row, uint8_t *dst, size_t dim, int best) {
    float y[Q_TURBO_MOST + 8];
    uint8_t codes[Q_TURBO_MOST + 8];
    q_turbo t = q_turbo_layout(bits, head, dim);
    const uint8_t *gains = row + t.packed;
    for (size_t piece = 0; piece < dim; piece += t.piece) {
        for (size_t left = t.piece, n; left; left -= n, dst += 4 * n, gains += 2) {
            n = q_turbo_next(left, t.most);
            float gain = q_float(q_load16(gains) << 15) / (float)n;
            if (bits == 4) {
                q_unpack_4(row, codes, n);
            } else if (bits == 3) {
                q_unpack_3(row, codes, n);
            } else {
                q_unpack_2(row, codes, n);
            }
            q_values(bits, codes, n, y, best);
            q_spread(y, n, best, NULL);
            q_flip_b(y, n);
            q_spread(y, n, best, NULL);
            q_flip_a(y, n);
            q_scale_out(y, dst, n, gain);
            row += (n * (size_t)bits + 7) / 8;
        }
    }
}

#endif
