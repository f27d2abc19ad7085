/* The key forms turbo4, turbo3 and turbo2 for keys (codes 17, 19, 20): groups of 64 rows, levels per channel.
 *
 * Keys are not quantized row by row. A few channels carry a large common offset (some models add a bias to their
 * keys), which would take all of a row's precision, and the rope turns that offset by another angle in each row. So 64
 * consecutive rows are turned back to what they were before the rope, and then each channel gets 16, 8 or 4 equidistant
 * levels of its own for these rows. Decoding turns the rows again.
 *
 * A block, which is also what stands on disk, for `dim` channels and b = 4, 3 or 2 bits:
 *
 *     codes    8 octets of rows; octet o (rows 8o..8o+7 of the group) has b planes of dim bytes, byte c is channel c's:
 *                  b = 4   plane k holds row 2k in bits 0-3 and row 2k+1 in bits 4-7        (rows within the octet)
 *                  b = 2   plane k holds row 4k+j in bits 2j and 2j+1, j = 0..3
 *                  b = 3   planes 0 and 1 hold the low two bits of the codes as for b = 2, plane 2 the high bit of
 *                          row j in bit j
 *     scales   dim fp16
 *     biases   dim fp16
 *     zeros    up to a multiple of 64 bytes
 *
 * A value is bias + scale * code in single precision, then turned. With a rope, pair i of a head of D values is
 * (i, i + D/2), i < floor(D/2), its angle position * theta^(-2i/D), as in mlx's rope with traditional=False; the last
 * value of a head of odd size is not turned. Without (theta 0), heads do not matter.
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

enum { QK_ROWS = Q_KEY_ROWS, QK_OCTET = 8, QK_RUN = 32, QK_LANES = 64 };

/* Into every clone of their caller: a shared copy would be compiled for the baseline processor. */
#define QK_INLINE static inline __attribute__((always_inline))

#define QK_POSITIONS (UINT64_C(1) << 40) /* beyond, an angle keeps too few digits */

/* A tile is two runs of up to 32 channels, in lanes 0..31 and 32..63; with a rope the second run holds the partners. */
typedef struct {
    size_t a, b, na, nb, ahead; /* ahead: channels from here to the next tile, most of the time */
    int turned;
} qk_tile;

typedef struct {
    float cosine[QK_ROWS][QK_RUN], sine[QK_ROWS][QK_RUN];
} qk_turns;

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

/* Cosines and sines for 64 rows and the pairs from..from+n of a head of `head` values: the angle of the first row and
 * the step from row to row in double precision, then products. */
Q_CLONES static void qk_fill_turns(qk_turns *turns, uint64_t position, double theta, size_t head, size_t from,
                                   size_t n) {
    double c[QK_RUN] = {0}, s[QK_RUN] = {0}, step_c[QK_RUN] = {0}, step_s[QK_RUN] = {0};
    double log2_theta = qk_log2(theta);
    for (size_t i = 0; i < n; i++) {
        double turn = qk_exp2(-(2.0 * (double)(from + i) / (double)head) * log2_theta) * 0.15915494309189535;
        qk_cos_sin(turn, step_c + i, step_s + i);
        qk_cos_sin((double)position * turn, c + i, s + i);
    }
    for (size_t row = 0; row < QK_ROWS; row++) {
        for (size_t i = 0; i < QK_RUN; i++) {
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

/* n source values as floats that fp16 holds. Nonzero: one of them is not within +-65504. */
QK_INLINE uint32_t qk_load(int from, const uint8_t *restrict src, float *restrict out, size_t n) {
    uint32_t bad = 0;
    if (from == Q_FP32) {
        for (size_t i = 0; i < n; i++) {
            uint32_t word = q_load32(src + 4 * i);
            bad |= qk_beyond(word);
            out[i] = qk_half(word);
        }
    } else if (from == Q_BF16) {
        for (size_t i = 0; i < n; i++) {
            uint32_t word = q_load16(src + 2 * i) << 16;
            bad |= qk_beyond(word);
            out[i] = qk_half(word);
        }
    } else {
        for (size_t i = 0; i < n; i++) {
            uint32_t word = q_half_to(q_load16(src + 2 * i));
            bad |= qk_beyond(word);
            out[i] = q_float(word);
        }
    }
    return bad;
}

QK_INLINE uint32_t qk_load_run(int from, const uint8_t *src, float *out, size_t n) {
    return n == QK_RUN ? qk_load(from, src, out, QK_RUN) : qk_load(from, src, out, n);
}

/* Undo the rope of one row of a tile. Nonzero: a value has left +-65504. */
QK_INLINE uint32_t qk_turn_back(float *restrict row, const float *restrict cosine, const float *restrict sine) {
    uint32_t bad = 0;
    for (size_t i = 0; i < QK_RUN; i++) {
        float lo = row[i], hi = row[QK_RUN + i];
        float first = lo * cosine[i] + hi * sine[i], second = hi * cosine[i] - lo * sine[i];
        row[i] = first;
        row[QK_RUN + i] = second;
        bad |= qk_beyond(q_bits(first)) | qk_beyond(q_bits(second));
    }
    return bad;
}

/* What is stored of each lane, and the line that leads from a value above the minimum to its code. */
typedef struct {
    uint16_t scale[QK_LANES], bias[QK_LANES];
    float slope[QK_LANES], shift[QK_LANES];
} qk_levels;

/* One pass of assigning codes to y (64 rows above their minimum) along (y - base) * inverse, and the codes' sums. */
QK_INLINE void qk_sums(float (*restrict y)[QK_LANES], const float *restrict base, const float *restrict inverse,
                           float top, float *restrict sum, float *restrict squares, float *restrict products) {
    for (size_t i = 0; i < QK_LANES; i++) sum[i] = squares[i] = products[i] = 0.0f;
    for (size_t row = 0; row < QK_ROWS; row++) {
        for (size_t i = 0; i < QK_LANES; i++) {
            float at = (y[row][i] - base[i]) * inverse[i];
            at = at > 0.0f ? at : 0.0f;
            at = at < top ? at : top;
            float code = (at + 12582912.0f) - 12582912.0f; /* 1.5 * 2^23: rounds to even */
            sum[i] += code;
            squares[i] += code * code;
            products[i] += y[row][i] * code;
        }
    }
}

/* Levels for the lanes of a tile. x becomes its height above the lane's minimum.
 * The outer levels are minimum and maximum. For 2 bits, whose error would be too large, scale and bias are then fitted
 * to the codes by least squares and the codes chosen anew; with more bits that made errors smaller and answers worse,
 * for it moves the extremes, where attention looks.
 * The last scale gives the decoded lane the spread of the lane instead (least squares would shrink it), and the
 * final codes make up for the rounding of scale and bias to fp16. */
QK_INLINE void qk_fit(float (*restrict x)[QK_LANES], float top, int passes, qk_levels *restrict levels) {
    float low[QK_LANES], high[QK_LANES], total[QK_LANES], squared[QK_LANES];
    float step[QK_LANES], base[QK_LANES], inverse[QK_LANES], sum[QK_LANES], squares[QK_LANES], products[QK_LANES];
    for (size_t i = 0; i < QK_LANES; i++) {
        low[i] = high[i] = x[0][i];
        total[i] = squared[i] = base[i] = 0.0f;
    }
    for (size_t row = 1; row < QK_ROWS; row++) {
        for (size_t i = 0; i < QK_LANES; i++) {
            low[i] = x[row][i] < low[i] ? x[row][i] : low[i];
            high[i] = x[row][i] > high[i] ? x[row][i] : high[i];
        }
    }
    for (size_t i = 0; i < QK_LANES; i++) {
        low[i] += 0.0f; /* -0 becomes +0 */
        step[i] = (high[i] - low[i]) / top;
    }
    for (size_t row = 0; row < QK_ROWS; row++) {
        for (size_t i = 0; i < QK_LANES; i++) {
            x[row][i] -= low[i];
            total[i] += x[row][i];
            squared[i] += x[row][i] * x[row][i];
        }
    }
    for (int pass = 0;; pass++) {
        for (size_t i = 0; i < QK_LANES; i++) inverse[i] = step[i] > 0.0f ? 1.0f / step[i] : 0.0f;
        qk_sums(x, base, inverse, top, sum, squares, products);
        if (pass == passes - 1) break;
        for (size_t i = 0; i < QK_LANES; i++) {
            float spread = 64.0f * squares[i] - sum[i] * sum[i];
            float shared = 64.0f * products[i] - total[i] * sum[i];
            int fits = spread > 0.0f && shared > 0.0f;
            float fitted = shared / (fits ? spread : 1.0f);
            step[i] = fits ? fitted : step[i];
            base[i] = fits ? (total[i] - fitted * sum[i]) * 0.015625f : base[i];
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
        levels->scale[i] = (uint16_t)half;
        levels->bias[i] = (uint16_t)half_bias;
        levels->slope[i] = inverse[i] * ratio;
        levels->shift[i] = from - ratio * (base[i] * inverse[i] + middle);
    }
}

QK_INLINE void qk_codes(float (*restrict y)[QK_LANES], const qk_levels *restrict levels, float top,
                            uint8_t (*restrict codes)[QK_LANES]) {
    for (size_t row = 0; row < QK_ROWS; row++) {
        for (size_t i = 0; i < QK_LANES; i++) {
            float at = y[row][i] * levels->slope[i] + levels->shift[i];
            at = at > 0.0f ? at : 0.0f;
            at = at < top ? at : top;
            codes[row][i] = (uint8_t)(q_bits(at + 12582912.0f) - 0x4b400000u);
        }
    }
}

/* The planes of one octet of rows, made of its codes. */
QK_INLINE void qk_pack(int bits, uint8_t (*restrict codes)[QK_LANES], uint8_t (*restrict planes)[QK_LANES]) {
    if (bits == 4) {
        for (size_t k = 0; k < 4; k++)
            for (size_t i = 0; i < QK_LANES; i++)
                planes[k][i] = (uint8_t)(codes[2 * k][i] | codes[2 * k + 1][i] << 4);
        return;
    }
    for (size_t k = 0; k < 2; k++)
        for (size_t i = 0; i < QK_LANES; i++)
            planes[k][i] = (uint8_t)((codes[4 * k][i] & 3) | (codes[4 * k + 1][i] & 3) << 2 |
                                     (codes[4 * k + 2][i] & 3) << 4 | (codes[4 * k + 3][i] & 3) << 6);
    if (bits == 3) {
        for (size_t i = 0; i < QK_LANES; i++) planes[2][i] = codes[0][i] >> 2;
        for (size_t k = 1; k < QK_OCTET; k++)
            for (size_t i = 0; i < QK_LANES; i++) planes[2][i] |= (uint8_t)((codes[k][i] >> 2) << k);
    }
}

/* Copies the two runs of a tile between its lanes and an array of channels; `width` bytes a channel. */
QK_INLINE void qk_scatter(const qk_tile *tile, const void *lanes, uint8_t *channels, size_t width) {
    const uint8_t *from = (const uint8_t *)lanes;
    memcpy(channels + width * tile->a, from, width * tile->na);
    memcpy(channels + width * tile->b, from + width * QK_RUN, width * tile->nb);
}

QK_INLINE void qk_gather(const qk_tile *tile, const uint8_t *channels, void *lanes, size_t width) {
    uint8_t *to = (uint8_t *)lanes;
    memcpy(to, channels + width * tile->a, width * tile->na);
    memcpy(to + width * QK_RUN, channels + width * tile->b, width * tile->nb);
}

/* One tile of a group. bad[row] turns nonzero where the row cannot be kept; the block's content is then undefined. */
Q_CLONES static void qk_encode_tile(int from, int bits, const qk_tile *tile, const qk_turns *turns, const uint8_t *src,
                                    uint8_t *block, size_t dim, uint32_t *bad) {
    float x[QK_ROWS][QK_LANES];
    uint8_t codes[QK_ROWS][QK_LANES], planes[4][QK_LANES];
    qk_levels levels;
    const float top = (float)((1 << bits) - 1);
    size_t width = from == Q_FP32 ? 4 : 2, ahead = tile->ahead;
    if (tile->na < QK_RUN || tile->nb < QK_RUN) memset(x, 0, sizeof x);
    for (size_t row = 0; row < QK_ROWS; row++) {
        const uint8_t *at = src + row * dim * width;
        for (size_t line = 0; line < QK_RUN * width; line += 64) { /* the next tile: no prefetcher sees it coming */
            __builtin_prefetch(at + width * (tile->a + ahead) + line, 0, 2);
            __builtin_prefetch(at + width * (tile->b + ahead) + line, 0, 2);
        }
        bad[row] |= qk_load_run(from, at + width * tile->a, x[row], tile->na);
        bad[row] |= qk_load_run(from, at + width * tile->b, x[row] + QK_RUN, tile->nb);
        if (tile->turned) bad[row] |= qk_turn_back(x[row], turns->cosine[row], turns->sine[row]);
    }
    qk_fit(x, top, bits > 2 ? 1 : 4, &levels);
    qk_codes(x, &levels, top, codes);
    for (size_t octet = 0; octet < QK_ROWS / QK_OCTET; octet++) {
        qk_pack(bits, codes + QK_OCTET * octet, planes);
        for (int k = 0; k < bits; k++)
            qk_scatter(tile, planes[k], block + (octet * (size_t)bits + (size_t)k) * dim, 1);
    }
    uint8_t *scales = block + 8 * (size_t)bits * dim;
    qk_scatter(tile, levels.scale, scales, 2);
    qk_scatter(tile, levels.bias, scales + 2 * dim, 2);
}

/* ---- decoding --------------------------------------------------------------------------------------------------- */

/* The values of one octet of rows, not yet turned. */
QK_INLINE void qk_unpack(int bits, uint8_t (*restrict planes)[QK_LANES], const float *restrict scale,
                             const float *restrict bias, float (*restrict out)[QK_LANES]) {
    if (bits == 4) {
        for (size_t k = 0; k < 4; k++) {
            for (size_t i = 0; i < QK_LANES; i++) {
                out[2 * k][i] = bias[i] + scale[i] * (float)(planes[k][i] & 15);
                out[2 * k + 1][i] = bias[i] + scale[i] * (float)(planes[k][i] >> 4);
            }
        }
    } else if (bits == 3) {
        for (size_t k = 0; k < QK_OCTET; k++)
            for (size_t i = 0; i < QK_LANES; i++) {
                int low = planes[k / 4][i] >> 2 * (k % 4) & 3, high = planes[2][i] >> k & 1;
                out[k][i] = bias[i] + scale[i] * (float)(low | high << 2);
            }
    } else {
        for (size_t k = 0; k < QK_OCTET; k++)
            for (size_t i = 0; i < QK_LANES; i++)
                out[k][i] = bias[i] + scale[i] * (float)(planes[k / 4][i] >> 2 * (k % 4) & 3);
    }
}

QK_INLINE void qk_turn(float *restrict row, const float *restrict cosine, const float *restrict sine) {
    for (size_t i = 0; i < QK_RUN; i++) {
        float lo = row[i], hi = row[QK_RUN + i];
        row[i] = lo * cosine[i] - hi * sine[i];
        row[QK_RUN + i] = hi * cosine[i] + lo * sine[i];
    }
}

Q_CLONES static void qk_decode_tile(int bits, const qk_tile *tile, const qk_turns *turns, const uint8_t *block,
                                    uint8_t *dst, size_t dim) {
    float values[QK_OCTET][QK_LANES], scale[QK_LANES], bias[QK_LANES];
    uint16_t words[2][QK_LANES] = {{0}};
    uint8_t planes[4][QK_LANES] = {{0}};
    const uint8_t *scales = block + 8 * (size_t)bits * dim;
    qk_gather(tile, scales, words[0], 2);
    qk_gather(tile, scales + 2 * dim, words[1], 2);
    for (size_t i = 0; i < QK_LANES; i++) {
        scale[i] = q_float(q_half_to(words[0][i]));
        bias[i] = q_float(q_half_to(words[1][i]));
    }
    for (size_t octet = 0; octet < QK_ROWS / QK_OCTET; octet++) {
        for (int k = 0; k < bits; k++)
            qk_gather(tile, block + (octet * (size_t)bits + (size_t)k) * dim, planes[k], 1);
        qk_unpack(bits, planes, scale, bias, values);
        for (size_t k = 0; k < QK_OCTET; k++) {
            size_t row = QK_OCTET * octet + k;
            if (tile->turned) qk_turn(values[k], turns->cosine[row], turns->sine[row]);
            qk_scatter(tile, values[k], dst + 4 * row * dim, 4);
        }
    }
}

/* ---- groups ----------------------------------------------------------------------------------------------------- */

/* The tiles of a row: of each 32 pairs those of all heads, so that they share their turns; then what is not turned. */
typedef struct {
    size_t dim, head, pairs, from, at;
    int bare;
} qk_walk;

static inline qk_walk qk_start(int fmt, size_t dim, double theta) {
    size_t head = theta == 0.0 ? 0 : q_param(fmt);
    qk_walk walk = {dim, head, head / 2, 0, 0, head < 2};
    return walk;
}

/* The next tile; 0 at the end. *fresh: the turns of pairs tile->a % head onwards are needed from here on. */
static inline int qk_next(qk_walk *walk, qk_tile *tile, int *fresh) {
    size_t dim = walk->dim, head = walk->head;
    *fresh = 0;
    if (!walk->bare) {
        size_t left = walk->pairs - walk->from, n = left < QK_RUN ? left : QK_RUN;
        *fresh = walk->at == 0;
        tile->turned = 1;
        tile->a = walk->at + walk->from;
        tile->b = tile->a + walk->pairs;
        tile->na = tile->nb = n;
        tile->ahead = head;
        walk->at += head;
        if (walk->at == dim) {
            walk->at = 0;
            walk->from += n;
            walk->bare = walk->from == walk->pairs;
        }
        return 1;
    }
    if (walk->at >= dim) return 0;
    tile->turned = 0;
    if (head > 1 && head % 2 == 0) return 0;
    if (head > 1) { /* the last value of each head */
        tile->a = tile->b = walk->at + head - 1;
        tile->na = 1;
        tile->nb = 0;
        tile->ahead = head;
        walk->at += head;
        return 1;
    }
    size_t left = dim - walk->at;
    tile->a = walk->at;
    tile->ahead = QK_LANES;
    tile->na = left < QK_RUN ? left : QK_RUN;
    tile->b = tile->a + tile->na;
    tile->nb = left - tile->na < QK_RUN ? left - tile->na : QK_RUN;
    walk->at += QK_LANES;
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
            if (fresh) qk_fill_turns(&turns, position, theta, walk.head, tile.a, tile.na);
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
            if (fresh) qk_fill_turns(&turns, first_row + QK_ROWS * group, theta, walk.head, tile.a, tile.na);
            qk_decode_tile(bits, &tile, &turns, src, dst, dim);
        }
        src += qk_block_bytes(fmt, dim);
        dst += 4 * QK_ROWS * dim;
    }
    return Q_OK;
}

#endif
