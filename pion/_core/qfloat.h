/* Words of fp32, fp16 and bf16: loads and stores, single conversions, and flat kernels over unaligned little-endian
 * buffers. The row formats in the other q*.h headers stand on this one; quant.h is what callers include.
 *
 * Pure C, no Python, no allocation, no locks.
 */
#ifndef PION_QFLOAT_H
#define PION_QFLOAT_H

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

enum { Q_FP16 = 2, Q_FP32 = 8, Q_BF16 = 9 };
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

/* For values decoded with a scale: what was encoded from fp16 fits fp16 again. NaN passes. */
static inline float q_within_half(float value) {
    value = value > 65504.0f ? 65504.0f : value;
    return value < -65504.0f ? -65504.0f : value;
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

#endif
