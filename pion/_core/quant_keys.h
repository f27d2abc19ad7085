/* The key forms turbo4, turbo3 and turbo2 for keys (codes 17, 19, 20): groups of 64 rows, levels per channel.
 *
 * Keys are not quantized row by row. A few channels carry a large common offset (some models add a bias to their
 * keys), which would take all of a row's precision, and the rope turns that offset by another angle in each row. So 64
 * consecutive rows are turned back to what they were before the rope, and then each channel gets 16, 8 or 4 equidistant
 * levels of its own for these rows. Decoding turns the rows again.
 *
 * A block, which is also what stands on disk, for `dim` channels and b = 4, 3 or 2 bits:
 *
 *     codes    8 octets of rows; octet o (rows 8o..8o+7 of the group) has b planes of dim bytes; byte c of plane k is
 *              channel c's and holds bit k of the code of the octet's row j in bit j (the last plane: see below)
 *     scales   dim fp16; the sign is a flag, the scale is the rest
 *     biases   dim fp16
 *     zeros    up to a multiple of 64 bytes
 *
 * A value is bias + scale * code in single precision, then turned. With a rope, pair i of a head of D values is
 * (i, i + D/2), i < P = floor(D/2), its angle position * theta^(-2i/D), as in mlx's rope with traditional=False; the
 * last value of a head of odd size is not turned. Without (theta 0), heads do not matter: the row counts as one of
 * D = dim.
 *
 * Channels have partners: value i of a head and P-1-i, and P+i and 2P-1-i. A rope's slow channels spread widest, and
 * this way they meet the fast ones. The middle pair, where P is odd, and the last value of an odd head have none. Where
 * one of a couple spreads much wider than the other, it has b+1 bits and its partner b-1: the sign of the wide one's
 * scale is set, and the byte that the narrow one leaves free in the last plane of each octet holds bit b of the wide
 * one's codes. Both signs set, which is never written: each has bit b in the other's byte and none of its own there. A
 * sign where there is no partner means nothing.
 *
 * Arithmetic is IEEE, one rounding per operation (-ffp-contract=off), and sine, cosine, logarithm and power are
 * computed here, so that every machine writes the same bytes; pion/ref/quant_keys.py says the same in numpy.
 *
 * Pure C, no Python, no allocation, no locks; about 40 KiB of stack.
 */
#ifndef PION_QUANT_KEYS_H
#define PION_QUANT_KEYS_H

#include "quant.h"

#include <math.h>

enum { QK_ROWS = Q_KEY_ROWS, QK_OCTET = 8, QK_RUN = 16, QK_PAIRS = 32, QK_LANES = 64, QK_WORDS = 8 };
enum { QK_MOST_BITS = 5, QK_WIDE = 0x8000 };

/* Into every clone of their caller: a shared copy would be compiled for the baseline processor. */
#define QK_INLINE static inline __attribute__((always_inline))

#define QK_POSITIONS (UINT64_C(1) << 40) /* beyond, an angle keeps too few digits */

/* A tile is up to 32 pairs in lanes i and 32 + i, so chosen that the partner of lane i is lane i ^ 31: n <= 16 pairs
 * from the head's start, and in lanes 32-n..31 the n that mirror them at the end of its half. Fewer runs: a middle
 * pair, or one value that is not turned. */
typedef struct {
    size_t start[4], n[4], ahead; /* runs of channels; ahead: channels from here to the next tile, most of the time */
    int full, partners, turned;
} qk_tile;

typedef struct {
    float cosine[QK_ROWS][QK_PAIRS], sine[QK_ROWS][QK_PAIRS];
} qk_turns;

/* A byte for each lane, in words: a byte's bits are moved with shifts of words. */
typedef struct {
    uint64_t word[QK_WORDS];
} qk_bytes;

#define QK_ONES UINT64_C(0x0101010101010101)

/* Word w of the bytes that the partners have. */
QK_INLINE uint64_t qk_partner(const qk_bytes *bytes, size_t w) { return __builtin_bswap64(bytes->word[w ^ 3]); }

/* The first lane of each run of a tile. */
QK_INLINE size_t qk_lane(const qk_tile *tile, int run) {
    return (run < 2 ? 0 : QK_PAIRS) + (run % 2 ? QK_PAIRS - tile->n[run] : 0);
}

/* Bytes of the block of 64 rows, a multiple of 64; 0 for what is no key form. */
static inline size_t qk_block_bytes(int fmt, size_t dim) {
    return q_key_bits(fmt) ? QK_ROWS * q_row_bytes(fmt, dim) : 0;
}

/* Whether rows of this dim can be turned with this base. A rope needs a head size that divides dim. */
static inline int qk_rope_fits(int fmt, size_t dim, double theta) {
    size_t head = q_param(fmt);
    if (theta == 0.0) return 1;
    return theta > 0.0 && theta < 1e300 && theta > 1e-300 && head > 0 && dim % head == 0;
}

/* Copies the runs of a tile between its lanes and an array of channels; `width` bytes a channel. */
QK_INLINE void qk_scatter(const qk_tile *tile, const void *lanes, uint8_t *channels, size_t width) {
    const uint8_t *from = (const uint8_t *)lanes;
    for (int run = 0; run < 4; run++) {
        uint8_t *to = channels + width * tile->start[run];
        if (tile->full) memcpy(to, from + width * QK_RUN * (size_t)run, width * QK_RUN);
        else memcpy(to, from + width * qk_lane(tile, run), width * tile->n[run]);
    }
}

QK_INLINE void qk_gather(const qk_tile *tile, const uint8_t *channels, void *lanes, size_t width) {
    uint8_t *to = (uint8_t *)lanes;
    for (int run = 0; run < 4; run++) {
        const uint8_t *from = channels + width * tile->start[run];
        if (tile->full) memcpy(to + width * QK_RUN * (size_t)run, from, width * QK_RUN);
        else memcpy(to + width * qk_lane(tile, run), from, width * tile->n[run]);
    }
}

/* ---- angles ---------------------------------------------------------------------------------------------------- */

#define QK_ROUND 6755399441055744.0 /* 1.5 * 2^52: adding and subtracting it rounds a double to an integer */

static inline double qk_log2(double value) {
    int exponent;
    double m = frexp(value, &exponent);
    if (m < 0.70710678118654752) {
        m = m + m;
        exponent--;
    }
    double s = (m - 1.0) / (m + 1.0), square = s * s, sum = 1.0 / 23;
    for (int k = 21; k > 0; k -= 2) sum = sum * square + 1.0 / k;
    return (double)exponent + 2.0 * s * sum * 1.4426950408889634;
}

/* 2^x, |x| < 1000. */
static inline double qk_exp2(double x) {
    double whole = (x + QK_ROUND) - QK_ROUND, z = (x - whole) * 0.69314718055994531, sum = 1.0;
    for (int k = 14; k > 0; k--) sum = 1.0 + sum * (z * (1.0 / k));
    return ldexp(sum, (int)whole);
}

/* cos and sin of `turns` full turns. */
QK_INLINE void qk_cos_sin(double turns, double *cosine, double *sine) {
    double part = turns - ((turns + QK_ROUND) - QK_ROUND);
    double quarter = (4.0 * part + QK_ROUND) - QK_ROUND;
    double x = (part - 0.25 * quarter) * 6.2831853071795865, square = x * x;
    double s = 1.0 / 355687428096000.0, c = 1.0 / 20922789888000.0;
    s = 1.0 / -1307674368000.0 + s * square;
    c = 1.0 / -87178291200.0 + c * square;
    s = 1.0 / 6227020800.0 + s * square;
    c = 1.0 / 479001600.0 + c * square;
    s = 1.0 / -39916800.0 + s * square;
    c = 1.0 / -3628800.0 + c * square;
    s = 1.0 / 362880.0 + s * square;
    c = 1.0 / 40320.0 + c * square;
    s = 1.0 / -5040.0 + s * square;
    c = 1.0 / -720.0 + c * square;
    s = 1.0 / 120.0 + s * square;
    c = 1.0 / 24.0 + c * square;
    s = 1.0 / -6.0 + s * square;
    c = -0.5 + c * square;
    s = x + x * (s * square);
    c = 1.0 + c * square;
    int odd = quarter == 1.0 || quarter == -1.0, back = quarter == 2.0 || quarter == -2.0;
    double first = odd ? s : c, second = odd ? c : s;
    *cosine = back || quarter == 1.0 ? -first : first;
    *sine = back || quarter == -1.0 ? -second : second;
}

/* Cosines and sines for 64 rows and the pairs from..from+n of a head and those that mirror them: the angle of the first
 * row and the step from row to row in double precision, then products. */
Q_CLONES static void qk_fill_turns(qk_turns *turns, uint64_t position, double theta, size_t head, size_t from,
                                   size_t n) {
    double c[QK_PAIRS] = {0}, s[QK_PAIRS] = {0}, step_c[QK_PAIRS] = {0}, step_s[QK_PAIRS] = {0};
    double log2_theta = qk_log2(theta);
    for (size_t k = 0; k < 2 * n; k++) {
        size_t lane = k < n ? k : QK_PAIRS - 1 - (k - n), pair = k < n ? from + k : head / 2 - 1 - from - (k - n);
        double turn = qk_exp2(-(2.0 * (double)pair / (double)head) * log2_theta) * 0.15915494309189535;
        qk_cos_sin(turn, step_c + lane, step_s + lane);
        qk_cos_sin((double)position * turn, c + lane, s + lane);
    }
    for (size_t row = 0; row < QK_ROWS; row++) {
        for (size_t i = 0; i < QK_PAIRS; i++) {
            turns->cosine[row][i] = (float)c[i];
            turns->sine[row][i] = (float)s[i];
            double next = c[i] * step_c[i] - s[i] * step_s[i];
            s[i] = c[i] * step_s[i] + s[i] * step_c[i];
            c[i] = next;
        }
    }
}

/* ---- encoding --------------------------------------------------------------------------------------------------- */

/* A float rounded to fp16 and kept as a float; |value| below 65520. */
QK_INLINE float qk_half(uint32_t word) {
    uint32_t sign = word & Q_F32_SIGN, mag = word & ~Q_F32_SIGN;
    uint32_t normal = (mag + 0xfffu + ((mag >> 13) & 1u)) & ~0x1fffu;
    uint32_t tiny = q_bits((q_float(mag) + 0.5f) - 0.5f); /* the addition rounds at the subnormals' last bit */
    return q_float(sign | (mag < 0x38800000u ? tiny : normal));
}

QK_INLINE uint32_t qk_beyond(uint32_t word) { return (word & ~Q_F32_SIGN) > Q_F32_65504; }

/* Source values of a tile's lanes as floats that fp16 holds. Nonzero: one of them is not within +-65504. */
QK_INLINE uint32_t qk_load(int from, const uint8_t *restrict src, float *restrict out) {
    uint32_t bad = 0;
    if (from == Q_FP32) {
        for (size_t i = 0; i < QK_LANES; i++) {
            uint32_t word = q_load32(src + 4 * i);
            bad |= qk_beyond(word);
            out[i] = qk_half(word);
        }
    } else if (from == Q_BF16) {
        for (size_t i = 0; i < QK_LANES; i++) {
            uint32_t word = q_load16(src + 2 * i) << 16;
            bad |= qk_beyond(word);
            out[i] = qk_half(word);
        }
    } else {
        for (size_t i = 0; i < QK_LANES; i++) {
            uint32_t word = q_half_to(q_load16(src + 2 * i));
            bad |= qk_beyond(word);
            out[i] = q_float(word);
        }
    }
    return bad;
}

/* Undo the rope of one row of a tile. Nonzero: a value has left +-65504. */
QK_INLINE uint32_t qk_turn_back(float *restrict row, const float *restrict cosine, const float *restrict sine) {
    uint32_t bad = 0;
    for (size_t i = 0; i < QK_PAIRS; i++) {
        float lo = row[i], hi = row[QK_PAIRS + i];
        float first = lo * cosine[i] + hi * sine[i], second = hi * cosine[i] - lo * sine[i];
        row[i] = first;
        row[QK_PAIRS + i] = second;
        bad |= qk_beyond(q_bits(first)) | qk_beyond(q_bits(second));
    }
    return bad;
}

/* What is stored of each lane, its highest code, and the line that leads from a value above the minimum to its code. */
typedef struct {
    uint16_t scale[QK_LANES], bias[QK_LANES];
    float top[QK_LANES], slope[QK_LANES], shift[QK_LANES];
} qk_levels;

/* How much wider than its partner's the spread of a channel (maximum - minimum) must be to take a bit from it. */
#define QK_MUCH 2.0f

/* How far inside minimum and maximum the outer levels lie, in steps: what errors on Gaussian keys and case C1 need. */
QK_INLINE float qk_inset(int bits) { return bits == 4 ? 0.0f : bits == 3 ? 0.25f : 0.5625f; }

/* Levels for the lanes of a tile. x becomes its height above the lane's minimum.
 * Equidistant levels from minimum to maximum, or a bit inside. Fitting them by least squares makes errors smaller and
 * answers worse, for it moves the extremes, where attention looks.
 * The scale that is stored gives the decoded lane the spread that the lane has, and the codes are then chosen anew, so
 * that they make up for the rounding of scale and bias to fp16. */
QK_INLINE void qk_fit(float (*restrict x)[QK_LANES], int bits, int partners, qk_levels *restrict levels) {
    float low[QK_LANES], high[QK_LANES], total[QK_LANES], squared[QK_LANES], base[QK_LANES], inverse[QK_LANES];
    float sum[QK_LANES], squares[QK_LANES], wide[QK_LANES], top[QK_LANES];
    const float inset = qk_inset(bits), usual = (float)(1 << bits);
    for (size_t i = 0; i < QK_LANES; i++) {
        low[i] = high[i] = x[0][i];
        total[i] = squared[i] = sum[i] = squares[i] = wide[i] = 0.0f;
    }
    for (size_t row = 1; row < QK_ROWS; row++) {
        for (size_t i = 0; i < QK_LANES; i++) {
            low[i] = x[row][i] < low[i] ? x[row][i] : low[i];
            high[i] = x[row][i] > high[i] ? x[row][i] : high[i];
        }
    }
    for (size_t i = 0; i < QK_LANES; i++) {
        low[i] += 0.0f; /* -0 becomes +0 */
        high[i] -= low[i];
    }
    if (partners)
        for (size_t i = 0; i < QK_LANES; i++) wide[i] = high[i] > QK_MUCH * high[i ^ 31] ? 1.0f : 0.0f;
    for (size_t i = 0; i < QK_LANES; i++) {
        float count = wide[i] > 0.0f ? usual + usual : wide[i ^ 31] > 0.0f ? 0.5f * usual : usual;
        levels->top[i] = top[i] = count - 1.0f;
        float step = high[i] / (top[i] + 2.0f * inset);
        base[i] = inset * step;
        inverse[i] = step > 0.0f ? 1.0f / step : 0.0f;
    }
    for (size_t row = 0; row < QK_ROWS; row++) {
        for (size_t i = 0; i < QK_LANES; i++) {
            float y = x[row][i] - low[i], at = (y - base[i]) * inverse[i];
            at = at > 0.0f ? at : 0.0f;
            at = at < top[i] ? at : top[i];
            float code = (at + 12582912.0f) - 12582912.0f; /* 1.5 * 2^23: rounds to even */
            x[row][i] = y;
            total[i] += y;
            squared[i] += y * y;
            sum[i] += code;
            squares[i] += code * code;
        }
    }
    for (size_t i = 0; i < QK_LANES; i++) {
        float spread = 64.0f * squares[i] - sum[i] * sum[i], wanted = 64.0f * squared[i] - total[i] * total[i];
        float scale = spread > 0.0f && wanted > 0.0f ? sqrtf(wanted / spread) : 0.0f;
        scale = scale < 65504.0f ? scale : 65504.0f;
        uint32_t half = q_half_of(q_bits(scale));
        half = half == 0 && scale > 0.0f ? 1 : half;
        float kept = q_float(q_half_to(half)), mean = total[i] * 0.015625f, middle = sum[i] * 0.015625f;
        float bias = (mean - kept * middle) + low[i];
        bias = bias < 65504.0f ? bias : 65504.0f;
        bias = bias > -65504.0f ? bias : -65504.0f;
        uint32_t half_bias = q_half_of(q_bits(bias));
        float offset = q_float(q_half_to(half_bias)) - low[i];
        float ratio = kept > 0.0f ? scale / kept : 0.0f, from = kept > 0.0f ? (mean - offset) / kept : 0.0f;
        levels->scale[i] = (uint16_t)(half | (wide[i] > 0.0f ? QK_WIDE : 0));
        levels->bias[i] = (uint16_t)half_bias;
        levels->slope[i] = inverse[i] * ratio;
        levels->shift[i] = from - ratio * (base[i] * inverse[i] + middle);
    }
}

QK_INLINE void qk_codes(float (*restrict y)[QK_LANES], const qk_levels *restrict levels,
                        qk_bytes *restrict codes) {
    for (size_t row = 0; row < QK_ROWS; row++) {
        uint8_t code[QK_LANES];
        for (size_t i = 0; i < QK_LANES; i++) {
            float at = y[row][i] * levels->slope[i] + levels->shift[i];
            at = at > 0.0f ? at : 0.0f;
            at = at < levels->top[i] ? at : levels->top[i];
            code[i] = (uint8_t)(q_bits(at + 12582912.0f) - 0x4b400000u);
        }
        memcpy(codes + row, code, sizeof code);
    }
}

/* The planes of one octet of rows, made of its codes. The bits beyond the last plane move to the partner's place there,
 * whose own bits are 0. */
QK_INLINE void qk_pack(int bits, const qk_bytes *restrict codes, qk_bytes *restrict planes) {
    for (int k = 0; k <= bits; k++) {
        qk_bytes plane = {{0}};
        for (int row = 0; row < QK_OCTET; row++)
            for (size_t w = 0; w < QK_WORDS; w++) plane.word[w] |= (codes[row].word[w] >> k & QK_ONES) << row;
        planes[k] = plane;
    }
    for (size_t w = 0; w < QK_WORDS; w++) planes[bits - 1].word[w] |= qk_partner(planes + bits, w);
}

/* One tile of a group. bad[row] turns nonzero where the row cannot be kept; the block's content is then undefined. */
Q_CLONES static void qk_encode_tile(int from, int bits, const qk_tile *tile, const qk_turns *turns, const uint8_t *src,
                                    uint8_t *block, size_t dim, uint32_t *bad) {
    float x[QK_ROWS][QK_LANES];
    qk_bytes codes[QK_ROWS], planes[QK_MOST_BITS];
    uint8_t given[4 * QK_LANES] = {0};
    qk_levels levels;
    size_t width = from == Q_FP32 ? 4 : 2;
    for (size_t row = 0; row < QK_ROWS; row++) {
        const uint8_t *at = src + row * dim * width;
        for (int run = 0; run < 4; run++) /* the next tile: no prefetcher sees it coming */
            __builtin_prefetch(at + width * (tile->start[run] + tile->ahead), 0, 2);
        if (width == 4) qk_gather(tile, at, given, 4);
        else qk_gather(tile, at, given, 2);
        bad[row] |= qk_load(from, given, x[row]);
        if (tile->turned) bad[row] |= qk_turn_back(x[row], turns->cosine[row], turns->sine[row]);
    }
    qk_fit(x, bits, tile->partners, &levels);
    qk_codes(x, &levels, codes);
    for (size_t octet = 0; octet < QK_ROWS / QK_OCTET; octet++) {
        if (bits == 4) qk_pack(4, codes + QK_OCTET * octet, planes);
        else if (bits == 3) qk_pack(3, codes + QK_OCTET * octet, planes);
        else qk_pack(2, codes + QK_OCTET * octet, planes);
        for (int k = 0; k < bits; k++)
            qk_scatter(tile, planes + k, block + (octet * (size_t)bits + (size_t)k) * dim, 1);
    }
    uint8_t *scales = block + 8 * (size_t)bits * dim;
    qk_scatter(tile, levels.scale, scales, 2);
    qk_scatter(tile, levels.bias, scales + 2 * dim, 2);
}

/* ---- decoding --------------------------------------------------------------------------------------------------- */

/* The values of one octet of rows, not yet turned. wide: 255 in lanes that have a bit more, whose partners have a bit
 * less; there is one more plane than was stored, which this fills. */
QK_INLINE void qk_unpack(int bits, qk_bytes *restrict planes, const qk_bytes *restrict wide,
                         const float *restrict scale, const float *restrict bias, float (*restrict out)[QK_LANES]) {
    for (size_t w = 0; w < QK_WORDS; w++) planes[bits].word[w] = qk_partner(planes + bits - 1, w) & wide->word[w];
    for (size_t w = 0; w < QK_WORDS; w++) planes[bits - 1].word[w] &= ~qk_partner(wide, w);
    for (int row = 0; row < QK_OCTET; row++) {
        qk_bytes code = {{0}};
        uint8_t codes[QK_LANES];
        for (int k = 0; k <= bits; k++)
            for (size_t w = 0; w < QK_WORDS; w++) code.word[w] |= (planes[k].word[w] >> row & QK_ONES) << k;
        memcpy(codes, &code, sizeof codes);
        for (size_t i = 0; i < QK_LANES; i++) out[row][i] = bias[i] + scale[i] * (float)codes[i];
    }
}

QK_INLINE void qk_turn(float *restrict row, const float *restrict cosine, const float *restrict sine) {
    for (size_t i = 0; i < QK_PAIRS; i++) {
        float lo = row[i], hi = row[QK_PAIRS + i];
        row[i] = lo * cosine[i] - hi * sine[i];
        row[QK_PAIRS + i] = hi * cosine[i] + lo * sine[i];
    }
}

Q_CLONES static void qk_decode_tile(int bits, const qk_tile *tile, const qk_turns *turns, const uint8_t *block,
                                    uint8_t *dst, size_t dim) {
    float values[QK_OCTET][QK_LANES], scale[QK_LANES], bias[QK_LANES];
    uint16_t words[2][QK_LANES] = {{0}};
    uint8_t flags[QK_LANES];
    qk_bytes planes[QK_MOST_BITS] = {{{0}}}, wide;
    const uint8_t *scales = block + 8 * (size_t)bits * dim;
    qk_gather(tile, scales, words[0], 2);
    qk_gather(tile, scales + 2 * dim, words[1], 2);
    for (size_t i = 0; i < QK_LANES; i++) {
        scale[i] = q_float(q_half_to(words[0][i] & (QK_WIDE - 1u)));
        bias[i] = q_float(q_half_to(words[1][i]));
        flags[i] = tile->partners && words[0][i] & QK_WIDE ? 255 : 0;
    }
    memcpy(&wide, flags, sizeof wide);
    for (size_t octet = 0; octet < QK_ROWS / QK_OCTET; octet++) {
        for (int k = 0; k < bits; k++)
            qk_gather(tile, block + (octet * (size_t)bits + (size_t)k) * dim, planes + k, 1);
        if (bits == 4) qk_unpack(4, planes, &wide, scale, bias, values);
        else if (bits == 3) qk_unpack(3, planes, &wide, scale, bias, values);
        else qk_unpack(2, planes, &wide, scale, bias, values);
        for (size_t k = 0; k < QK_OCTET; k++) {
            size_t row = QK_OCTET * octet + k;
            if (tile->turned) qk_turn(values[k], turns->cosine[row], turns->sine[row]);
            qk_scatter(tile, values[k], dst + 4 * row * dim, 4);
        }
    }
}

/* ---- groups ----------------------------------------------------------------------------------------------------- */

/* The tiles of a row: of each 16 pairs and their mirrors those of all heads, so that they share their turns; then the
 * middle pairs; then what is not turned. */
typedef struct {
    size_t dim, head, at, from, done;
    int turned;
} qk_walk;

static inline qk_walk qk_start(int fmt, size_t dim, double theta) {
    qk_walk walk = {dim, theta == 0.0 ? dim : q_param(fmt), 0, 0, 0, theta != 0.0};
    return walk;
}

/* The next tile; 0 at the end. *fresh: from here on the turns of n[0] pairs from walk->from on are needed. */
static inline int qk_next(qk_walk *walk, qk_tile *tile, int *fresh) {
    if (walk->at == walk->dim) {
        walk->at = 0;
        walk->from += walk->done;
    }
    size_t head = walk->head, at = walk->at, from = walk->from, pairs = head / 2, half = pairs / 2;
    size_t left = from < half ? half - from : 1, n = left < QK_RUN ? left : QK_RUN;
    int partners = from < half, two = from < half + pairs % 2;
    if (!two && (head % 2 == 0 || from > half + pairs % 2)) return 0;
    *fresh = walk->turned && two && at == 0;
    tile->start[0] = at + (two ? from : head - 1);
    tile->start[1] = partners ? at + pairs - from - n : tile->start[0];
    tile->start[2] = two ? tile->start[0] + pairs : tile->start[0];
    tile->start[3] = partners ? tile->start[1] + pairs : tile->start[0];
    tile->n[0] = n;
    tile->n[1] = partners ? n : 0;
    tile->n[2] = two ? n : 0;
    tile->n[3] = partners ? n : 0;
    tile->ahead = walk->head < walk->dim ? head : n;
    tile->full = partners && n == QK_RUN;
    tile->partners = partners;
    tile->turned = walk->turned && two;
    walk->at += head;
    walk->done = n;
    return 1;
}

/* Encode `groups` groups of 64 rows of `dim` values, given as fp32, fp16 or bf16 and rounded to fp16 first.
 * `to` is a key form with the head size in bits 8-23; first_row is the position of the first row; theta 0: no rope.
 * Q_OK; Q_REFUSED with the first refused row in *bad_row (NaN, an infinity, a value beyond +-65504, or a pair that
 * leaves +-65504 when it is turned back; the target's content is then undefined); Q_UNSUPPORTED.
 * Buffers may be unaligned and must not overlap. Pieces at group boundaries give the bytes of one call. */
static inline int q_keys_encode(int from, int to, const void *source, void *target, size_t groups, size_t dim,
                                uint64_t first_row, double theta, int64_t *bad_row) {
    const uint8_t *src = (const uint8_t *)source;
    uint8_t *dst = (uint8_t *)target;
    int bits = (int)q_key_bits(to), fresh;
    size_t in = QK_ROWS * dim * (from == Q_FP32 ? 4 : 2), out = qk_block_bytes(to, dim);
    size_t used = (8 * (size_t)bits + 4) * dim;
    qk_turns turns;
    qk_tile tile;
    *bad_row = -1;
    if (!bits || !q_is_source(from) || !qk_rope_fits(to, dim, theta)) return Q_UNSUPPORTED;
    for (size_t group = 0; group < groups; group++, src += in, dst += out) {
        uint64_t position = first_row + QK_ROWS * group;
        uint32_t bad[QK_ROWS] = {0};
        qk_walk walk = qk_start(to, dim, theta);
        while (qk_next(&walk, &tile, &fresh)) {
            if (fresh) qk_fill_turns(&turns, position, theta, walk.head, walk.from, tile.n[0]);
            qk_encode_tile(from, bits, &tile, &turns, src, dst, dim, bad);
        }
        memset(dst + used, 0, out - used);
        for (size_t row = 0; row < QK_ROWS; row++) {
            if (bad[row]) {
                *bad_row = (int64_t)(QK_ROWS * group + row);
                return Q_REFUSED;
            }
        }
    }
    return Q_OK;
}

/* `groups` blocks to fp32 rows; fmt, first_row and theta as they were encoded. Q_OK or Q_UNSUPPORTED. */
static inline int q_keys_decode(int fmt, const void *source, void *target, size_t groups, size_t dim,
                                uint64_t first_row, double theta) {
    const uint8_t *src = (const uint8_t *)source;
    uint8_t *dst = (uint8_t *)target;
    int bits = (int)q_key_bits(fmt), fresh;
    qk_turns turns;
    qk_tile tile;
    if (!bits || !qk_rope_fits(fmt, dim, theta)) return Q_UNSUPPORTED;
    for (size_t group = 0; group < groups; group++) {
        qk_walk walk = qk_start(fmt, dim, theta);
        while (qk_next(&walk, &tile, &fresh)) {
            if (fresh)
                qk_fill_turns(&turns, first_row + QK_ROWS * group, theta, walk.head, walk.from, tile.n[0]);
            qk_decode_tile(bits, &tile, &turns, src, dst, dim);
        }
        src += qk_block_bytes(fmt, dim);
        dst += 4 * QK_ROWS * dim;
    }
    return Q_OK;
}

#endif
