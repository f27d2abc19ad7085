/* Row formats fp32, fp16, bf16 and int8, in both directions, on unaligned little-endian buffers.
 *
 * A row of `dim` values takes q_row_bytes(code, dim) bytes. fp32, fp16 and bf16 rows are the plain words. An int8 row
 * is `dim` codes followed by one (fp16 scale, fp16 min) pair for each group of 32 values, the last group possibly
 * shorter; a value is min + scale * code.
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

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Pion's row formats are little-endian and this machine is not"
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

/* gcc on glibc builds these loops three times and the loader picks one. The names are micro-architecture levels and not
 * "avx2": that alone leaves F16C off. clang and other C libraries build the loop once, for the baseline. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12 && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define Q_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#endif
#endif
#ifndef Q_CLONES
#define Q_CLONES
#endif

enum { Q_INT8 = 0, Q_FP16 = 2, Q_FP32 = 8, Q_BF16 = 9 };
enum { Q_OK = 0, Q_REFUSED = 1, Q_UNSUPPORTED = -1 };
enum { Q_GROUP = 32, Q_CHUNK = 1024 }; /* a chunk of widened values is 4 KiB of stack */

#define Q_F32_SIGN 0x80000000u
#define Q_F32_INF 0x7f800000u
#define Q_F32_65504 0x477fe000u /* largest finite fp16 */
#define Q_BF16_LIMIT 0x7f7f7fffu /* largest magnitude that still rounds to a finite bf16 */

static inline uint32_t q_bits(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    return word;
}

static inline float q_float(uint32_t word) {
    float value;
    memcpy(&value, &word, 4);
    return value;
}

static inline uint32_t q_load32(const uint8_t *at) {
    uint32_t word;
    memcpy(&word, at, 4);
    return word;
}

static inline uint32_t q_load16(const uint8_t *at) {
    uint16_t word;
    memcpy(&word, at, 2);
    return word;
}

static inline void q_store32(uint8_t *at, uint32_t word) { memcpy(at, &word, 4); }

static inline void q_store16(uint8_t *at, uint32_t word) {
    uint16_t half = (uint16_t)word;
    memcpy(at, &half, 2);
}

/* Bytes of one row; 0 for a code this build does not know. */
static inline size_t q_row_bytes(int code, size_t dim) {
    switch (code) {
    case Q_INT8: return dim + 4 * ((dim + Q_GROUP - 1) / Q_GROUP);
    case Q_FP16:
    case Q_BF16: return 2 * dim;
    case Q_FP32: return 4 * dim;
    default: return 0;
    }
}

static inline int q_is_source(int code) { return code == Q_FP32 || code == Q_FP16 || code == Q_BF16; }

/* ---- single values ------------------------------------------------------------------------------------------- */

/* Round to nearest even without branches. NaN keeps its sign and the top of its payload and turns quiet, as F16C and
 * arm's fcvt do; magnitudes from 65520 on become infinity (callers refuse them first). */
static inline uint32_t q_half_of(uint32_t word) {
    uint32_t sign = (word >> 16) & 0x8000u, mag = word & ~Q_F32_SIGN;
    uint32_t normal = (mag + 0xc8000000u + 0xfffu + ((mag >> 13) & 1u)) >> 13;
    uint32_t tiny = q_bits(q_float(mag) + 0.5f) - 0x3f000000u; /* the addition rounds at the subnormals' last bit */
    uint32_t big = mag > Q_F32_INF ? 0x7e00u | ((mag >> 13) & 0x3ffu) : 0x7c00u;
    uint32_t half = mag < 0x38800000u ? tiny : normal;
    half = mag >= 0x47800000u ? big : half;
    return sign | half;
}

/* Exact. A signalling NaN turns quiet, as in hardware. */
static inline uint32_t q_half_to(uint32_t half) {
    uint32_t sign = (half & 0x8000u) << 16, shifted = (half & 0x7fffu) << 13;
    uint32_t finite = q_bits(q_float(shifted) * q_float(0x77800000u)); /* 2^112 moves the exponent's bias */
    uint32_t special = shifted | Q_F32_INF | (shifted > 0x0f800000u ? 0x400000u : 0u);
    return sign | (shifted >= 0x0f800000u ? special : finite);
}

static inline uint32_t q_bf16_of(uint32_t word) {
    uint32_t nan = (word >> 16) | 0x40u;
    uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
    return (word & ~Q_F32_SIGN) > Q_F32_INF ? nan : rounded;
}

/* The fp16 at or just below a value within +-65504, and at or just above one in 0..65504: round, then one step. */
static inline uint32_t q_half_down(float value) {
    uint32_t half = q_half_of(q_bits(value));
    uint32_t over = q_float(q_half_to(half)) > value;
    return half & 0x8000u ? half + over : half - over;
}

static inline uint32_t q_half_up(float value) {
    uint32_t half = q_half_of(q_bits(value));
    return half + (q_float(q_half_to(half)) < value);
}

/* ---- flat kernels: n values; those that narrow answer nonzero when a finite value does not fit ----------------- */

Q_CLONES static void q_fp16_to_fp32_plain(const uint8_t *src, uint8_t *dst, size_t n) {
    for (size_t i = 0; i < n; i++) q_store32(dst + 4 * i, q_half_to(q_load16(src + 2 * i)));
}

Q_CLONES static uint32_t q_fp32_to_fp16_plain(const uint8_t *src, uint8_t *dst, size_t n) {
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t word = q_load32(src + 4 * i), mag = word & ~Q_F32_SIGN;
        bad |= (mag > Q_F32_65504) & (mag < Q_F32_INF);
        q_store16(dst + 2 * i, q_half_of(word));
    }
    return bad;
}

Q_CLONES static void q_bf16_to_fp32(const uint8_t *src, uint8_t *dst, size_t n) {
    for (size_t i = 0; i < n; i++) q_store32(dst + 4 * i, q_load16(src + 2 * i) << 16);
}

Q_CLONES static uint32_t q_fp32_to_bf16(const uint8_t *src, uint8_t *dst, size_t n) {
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t word = q_load32(src + 4 * i), mag = word & ~Q_F32_SIGN;
        bad |= (mag > Q_BF16_LIMIT) & (mag < Q_F32_INF);
        q_store16(dst + 2 * i, q_bf16_of(word));
    }
    return bad;
}

#if defined(__x86_64__)
__attribute__((target("avx2,f16c"))) static void q_fp16_to_fp32_f16c(const uint8_t *src, uint8_t *dst, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(src + 2 * i)));
        _mm256_storeu_si256((__m256i *)(void *)(dst + 4 * i), _mm256_castps_si256(wide));
    }
    for (; i < n; i++) q_store32(dst + 4 * i, q_half_to(q_load16(src + 2 * i)));
}

__attribute__((target("avx2,f16c"))) static uint32_t q_fp32_to_fp16_f16c(const uint8_t *src, uint8_t *dst, size_t n) {
    const __m256i abs_mask = _mm256_set1_epi32(0x7fffffff);
    const __m256i top = _mm256_set1_epi32(Q_F32_65504), inf = _mm256_set1_epi32(Q_F32_INF);
    __m256i bad = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i words = _mm256_loadu_si256((const __m256i *)(const void *)(src + 4 * i));
        __m256i mag = _mm256_and_si256(words, abs_mask);
        bad = _mm256_or_si256(bad, _mm256_and_si256(_mm256_cmpgt_epi32(mag, top), _mm256_cmpgt_epi32(inf, mag)));
        _mm_storeu_si128((__m128i *)(void *)(dst + 2 * i), _mm256_cvtps_ph(_mm256_castsi256_ps(words), 0));
    }
    uint32_t rest = !_mm256_testz_si256(bad, bad);
    for (; i < n; i++) {
        uint32_t word = q_load32(src + 4 * i), mag = word & ~Q_F32_SIGN;
        rest |= (mag > Q_F32_65504) & (mag < Q_F32_INF);
        q_store16(dst + 2 * i, q_half_of(word));
    }
    return rest;
}
#endif

/* Whether the F16C kernels may run here; the answer is kept, for cpuid is slow in virtual machines. */
static inline int q_have_f16c(void) {
#if defined(__x86_64__)
    static int known = -1;
    int have = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (have < 0) {
        unsigned a, b, c, d;
        have = __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
        __atomic_store_n(&known, have, __ATOMIC_RELAXED);
    }
    return have;
#else
    return 0;
#endif
}

static inline void q_fp16_to_fp32(const uint8_t *src, uint8_t *dst, size_t n, int f16c) {
#if defined(__x86_64__)
    if (f16c) {
        q_fp16_to_fp32_f16c(src, dst, n);
        return;
    }
#endif
    (void)f16c;
    q_fp16_to_fp32_plain(src, dst, n);
}

static inline uint32_t q_fp32_to_fp16(const uint8_t *src, uint8_t *dst, size_t n, int f16c) {
#if defined(__x86_64__)
    if (f16c) return q_fp32_to_fp16_f16c(src, dst, n);
#endif
    (void)f16c;
    return q_fp32_to_fp16_plain(src, dst, n);
}

/* ---- int8, groups of 32 ---------------------------------------------------------------------------------------- */

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
                q_store32(dst + 4 * (start + i), q_bits(min + scale * (float)row[start + i]));
        } else {
            for (size_t i = start; i < stop; i++) q_store32(dst + 4 * i, q_bits(min + scale * (float)row[i]));
        }
    }
}

/* ---- rows ------------------------------------------------------------------------------------------------------ */

static inline void q_widen(int from, const uint8_t *src, uint8_t *dst, size_t n, int f16c) {
    if (from == Q_FP16) q_fp16_to_fp32(src, dst, n, f16c);
    else q_bf16_to_fp32(src, dst, n);
}

/* n flat values between fp32, fp16 and bf16. */
static inline uint32_t q_flat(int from, int to, const uint8_t *src, uint8_t *dst, size_t n, int f16c) {
    if (from == Q_FP32) return to == Q_FP16 ? q_fp32_to_fp16(src, dst, n, f16c) : q_fp32_to_bf16(src, dst, n);
    if (to == Q_FP32) {
        q_widen(from, src, dst, n, f16c);
        return 0;
    }
    uint8_t wide[4 * Q_CHUNK];
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i += Q_CHUNK) {
        size_t m = n - i < Q_CHUNK ? n - i : Q_CHUNK;
        q_widen(from, src + 2 * i, wide, m, f16c);
        bad |= to == Q_FP16 ? q_fp32_to_fp16(wide, dst + 2 * i, m, f16c) : q_fp32_to_bf16(wide, dst + 2 * i, m);
    }
    return bad;
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

/* As q_encode, with the choice of kernel left to the caller (tests compare both). */
static inline int q_encode_with(int from, int to, const void *source, void *target, size_t rows, size_t dim,
                                int64_t *bad_row, int f16c) {
    const uint8_t *src = (const uint8_t *)source;
    uint8_t *dst = (uint8_t *)target;
    size_t in = q_row_bytes(from, dim), out = q_row_bytes(to, dim);
    *bad_row = -1;
    if (!q_is_source(from) || (to != Q_INT8 && !q_is_source(to))) return Q_UNSUPPORTED;
    if (rows == 0 || dim == 0) return Q_OK;
    if (from == to) {
        memcpy(dst, src, rows * out);
        return Q_OK;
    }
    if (to != Q_INT8 && !q_flat(from, to, src, dst, rows * dim, f16c)) return Q_OK; /* no row boundaries to mind */
    for (size_t row = 0; row < rows; row++) {
        uint32_t bad = to == Q_INT8 ? q_int8_row(from, src + row * in, dst + row * out, dim, f16c)
                                    : q_flat(from, to, src + row * in, dst + row * out, dim, f16c);
        if (bad) {
            *bad_row = (int64_t)row;
            return Q_REFUSED;
        }
    }
    return Q_OK;
}

/* Convert `rows` rows of `dim` values from `from` (fp32, fp16, bf16) to `to` (those and int8).
 * Q_OK; Q_REFUSED with the first refused row in *bad_row (the target's content is then undefined); Q_UNSUPPORTED.
 * Buffers may be unaligned and must not overlap. Whole rows only: pieces at row boundaries give the bytes of one call. */
static inline int q_encode(int from, int to, const void *src, void *dst, size_t rows, size_t dim, int64_t *bad_row) {
    return q_encode_with(from, to, src, dst, rows, dim, bad_row, q_have_f16c());
}

static inline int q_decode_with(int code, const void *source, void *target, size_t rows, size_t dim, int f16c) {
    const uint8_t *src = (const uint8_t *)source;
    uint8_t *dst = (uint8_t *)target;
    switch (code) {
    case Q_FP32:
        if (rows != 0 && dim != 0) memcpy(dst, src, 4 * rows * dim);
        return Q_OK;
    case Q_FP16:
        q_fp16_to_fp32(src, dst, rows * dim, f16c);
        return Q_OK;
    case Q_BF16:
        q_bf16_to_fp32(src, dst, rows * dim);
        return Q_OK;
    case Q_INT8:
        for (size_t row = 0; row < rows; row++)
            q_int8_row_to_fp32(src + row * q_row_bytes(Q_INT8, dim), dst + 4 * row * dim, dim);
        return Q_OK;
    default: return Q_UNSUPPORTED;
    }
}

/* Rows in any stored format to fp32. Q_OK or Q_UNSUPPORTED. */
static inline int q_decode(int code, const void *src, void *dst_f32, size_t rows, size_t dim) {
    return q_decode_with(code, src, dst_f32, rows, dim, q_have_f16c());
}

#endif
