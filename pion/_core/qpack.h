/* Codes of 4, 3 and 2 bits: eight codes, one a byte, to and from 4, 3 and 2 bytes. Element k stands at bits
 * [bits * k, bits * k + bits) of the little-endian number that the bytes are; every word step halves the gaps.
 */
#ifndef PION_QPACK_H
#define PION_QPACK_H

#include "qfloat.h"

static inline uint64_t q_load64(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

static inline void q_store64(uint8_t *at, uint64_t word) { memcpy(at, &word, 8); }

/* Moved in whole words where others follow: three bytes alone take a detour through memory. */
static inline uint32_t q_load_word(const uint8_t *at) {
    uint32_t word;
    memcpy(&word, at, 4);
    return word;
}

/* Eight codes, one in each byte of `codes`, as 8 * bits contiguous bits. */
static inline uint64_t q_gather_bits(uint64_t codes, int bits) {
    switch (bits) {
    case 4:
        codes = (codes | codes >> 4) & 0x00ff00ff00ff00ffull;
        codes = (codes | codes >> 8) & 0x0000ffff0000ffffull;
        return (codes | codes >> 16) & 0xffffffffull;
    case 3:
        codes = (codes | codes >> 5) & 0x003f003f003f003full;
        codes = (codes | codes >> 10) & 0x00000fff00000fffull;
        return (codes | codes >> 20) & 0xffffffull;
    default:
        codes = (codes | codes >> 6) & 0x000f000f000f000full;
        codes = (codes | codes >> 12) & 0x000000ff000000ffull;
        return (codes | codes >> 24) & 0xffffull;
    }
}

static inline uint64_t q_spread_bits(uint64_t packed, int bits) {
    switch (bits) {
    case 4:
        packed = (packed | packed << 16) & 0x0000ffff0000ffffull;
        packed = (packed | packed << 8) & 0x00ff00ff00ff00ffull;
        return (packed | packed << 4) & 0x0f0f0f0f0f0f0f0full;
    case 3:
        packed = (packed | packed << 20) & 0x00000fff00000fffull;
        packed = (packed | packed << 10) & 0x003f003f003f003full;
        return (packed | packed << 5) & 0x0707070707070707ull;
    default:
        packed = (packed | packed << 24) & 0x000000ff000000ffull;
        packed = (packed | packed << 12) & 0x000f000f000f000full;
        return (packed | packed << 6) & 0x0303030303030303ull;
    }
}

/* n codes to (n * bits + 7) / 8 bytes. `codes` is readable, and 0, up to a multiple of 8. */
static inline void q_pack_codes(const uint8_t *restrict codes, uint8_t *restrict packed, size_t n, int bits) {
    size_t i = 0;
    for (; i + 16 <= n; i += 8, packed += bits) { /* the next eight overwrite what is too much */
        uint32_t word = (uint32_t)q_gather_bits(q_load64(codes + i), bits);
        memcpy(packed, &word, 4);
    }
    for (; i + 8 <= n; i += 8, packed += bits) {
        uint64_t word = q_gather_bits(q_load64(codes + i), bits);
        memcpy(packed, &word, (size_t)bits);
    }
    if (i < n) {
        uint64_t word = q_gather_bits(q_load64(codes + i), bits);
        memcpy(packed, &word, ((n - i) * (size_t)bits + 7) / 8);
    }
}

/* The reverse; `codes` is written up to a multiple of 8. */
static inline void q_unpack_codes(const uint8_t *restrict packed, uint8_t *restrict codes, size_t n, int bits) {
    size_t i = 0;
    const uint32_t mask = 0xffffffffu >> (32 - 8 * bits);
    for (; i + 16 <= n; i += 8, packed += bits) q_store64(codes + i, q_spread_bits(q_load_word(packed) & mask, bits));
    for (; i + 8 <= n; i += 8, packed += bits) {
        uint64_t word = 0;
        memcpy(&word, packed, (size_t)bits);
        q_store64(codes + i, q_spread_bits(word, bits));
    }
    if (i < n) {
        uint64_t word = 0;
        memcpy(&word, packed, ((n - i) * (size_t)bits + 7) / 8);
        q_store64(codes + i, q_spread_bits(word, bits));
    }
}

#endif
