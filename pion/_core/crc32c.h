/* CRC-32C (Castagnoli, reflected polynomial 0x82F63B78, as in iSCSI and ext4).
 *
 * Three ways to the same number, chosen once at load: SSE4.2 and ARMv8 instructions, three independent streams each
 * (the instruction has a latency of three cycles and a throughput of one), and slicing-by-8 tables elsewhere.
 * Streams are joined by multiplying with x^(8 n) mod P, through byte-indexed tables for the two fixed block sizes.
 */
#ifndef PION_CRC32C_H
#define PION_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the file formats are little-endian; a big-endian build is not supported"
#endif

/* The instructions are spelled as assembly: the intrinsics want a whole function compiled for a feature set whose name
 * differs between compilers, and such a function cannot be inlined into its callers. */
#if defined(__x86_64__)
#define PION_CRC32C_HARDWARE 1
static inline uint64_t pion_crc32c_u64(uint64_t crc, uint64_t word) {
    __asm__("crc32q %1, %0" : "+r"(crc) : "r"(word));
    return crc;
}
static inline uint32_t pion_crc32c_u8(uint32_t crc, uint8_t byte) {
    __asm__("crc32b %1, %0" : "+r"(crc) : "r"(byte));
    return crc;
}
#elif defined(__aarch64__)
#define PION_CRC32C_HARDWARE 1
#if defined(__linux__)
#include <sys/auxv.h>
#endif
static inline uint64_t pion_crc32c_u64(uint64_t crc, uint64_t word) {
    uint32_t low = (uint32_t)crc;
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(low) : "r"(word));
    return low;
}
static inline uint32_t pion_crc32c_u8(uint32_t crc, uint8_t byte) {
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"((uint32_t)byte));
    return crc;
}
#endif

#define PION_CRC32C_POLY 0x82F63B78u
#define PION_CRC32C_LONG 4096u  /* bytes per stream: three of them still leave room in a 32 KiB L1 */
#define PION_CRC32C_SHORT 256u

/* Filled before main by the constructor below, read-only afterwards. */
static struct {
    uint32_t slice[8][256];
    uint32_t shift_long[4][256];
    uint32_t shift_short[4][256];
    int hardware;
} pion_crc32c_state;

/* a * b mod P, both bit-reflected (bit 31 is x^0). */
static inline uint32_t pion_crc32c_multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b >> 1) ^ (b & 1 ? PION_CRC32C_POLY : 0);
    }
    return product;
}

/* x^(8 n) mod P. */
static inline uint32_t pion_crc32c_power(uint64_t n) {
    uint32_t result = 1u << 31, square = 1u << 23; /* x^0, x^8 */
    for (; n; n >>= 1) {
        if (n & 1) result = pion_crc32c_multiply(result, square);
        square = pion_crc32c_multiply(square, square);
    }
    return result;
}

static inline void pion_crc32c_shift_table(uint32_t table[4][256], uint64_t n) {
    const uint32_t power = pion_crc32c_power(n);
    for (int byte = 0; byte < 4; byte++)
        for (uint32_t value = 0; value < 256; value++)
            table[byte][value] = pion_crc32c_multiply(power, value << (8 * byte));
}

static inline int pion_crc32c_detect(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2") ? 1 : 0;
#elif defined(__aarch64__) && defined(__linux__)
    return (getauxval(AT_HWCAP) & (1ul << 7)) != 0; /* HWCAP_CRC32 */
#elif defined(__aarch64__) && defined(__APPLE__)
    return 1; /* every Apple arm64 core has it */
#else
    return 0;
#endif
}

__attribute__((constructor)) static void pion_crc32c_init(void) {
    for (uint32_t value = 0; value < 256; value++) {
        uint32_t crc = value;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? PION_CRC32C_POLY : 0);
        pion_crc32c_state.slice[0][value] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t value = 0; value < 256; value++) {
            const uint32_t previous = pion_crc32c_state.slice[k - 1][value];
            pion_crc32c_state.slice[k][value] = (previous >> 8) ^ pion_crc32c_state.slice[0][previous & 255];
        }
    pion_crc32c_shift_table(pion_crc32c_state.shift_long, PION_CRC32C_LONG);
    pion_crc32c_shift_table(pion_crc32c_state.shift_short, PION_CRC32C_SHORT);
    pion_crc32c_state.hardware = pion_crc32c_detect();
}

static inline uint32_t pion_crc32c_shift(const uint32_t table[4][256], uint32_t crc) {
    return table[0][crc & 255] ^ table[1][(crc >> 8) & 255] ^ table[2][(crc >> 16) & 255] ^ table[3][crc >> 24];
}

static inline uint64_t pion_crc32c_load(const uint8_t *p) {
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

/* The table way; also the oracle of the hardware way in the tests. */
static inline uint32_t crc32c_portable(uint32_t crc, const void *data, size_t n) {
    const uint8_t *p = (const uint8_t *)data;
    const uint32_t(*t)[256] = (const uint32_t(*)[256])pion_crc32c_state.slice;
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        const uint64_t word = pion_crc32c_load(p) ^ crc;
        crc = t[7][word & 255] ^ t[6][(word >> 8) & 255] ^ t[5][(word >> 16) & 255] ^ t[4][(word >> 24) & 255] ^
              t[3][(word >> 32) & 255] ^ t[2][(word >> 40) & 255] ^ t[1][(word >> 48) & 255] ^ t[0][word >> 56];
    }
    for (; n; n--) crc = (crc >> 8) ^ t[0][(crc ^ *p++) & 255];
    return ~crc;
}

#if defined(PION_CRC32C_HARDWARE)
/* As many triples of blocks as fit; p and n move on. */
static inline uint32_t pion_crc32c_streams(uint32_t start, const uint8_t **data, size_t *left, size_t block,
                                           const uint32_t table[4][256]) {
    const uint8_t *p = *data;
    size_t n = *left;
    uint64_t crc = start;
    for (; n >= 3 * block; n -= 3 * block, p += 3 * block) {
        uint64_t second = 0, third = 0;
        for (size_t i = 0; i < block; i += 8) {
            crc = pion_crc32c_u64(crc, pion_crc32c_load(p + i));
            second = pion_crc32c_u64(second, pion_crc32c_load(p + block + i));
            third = pion_crc32c_u64(third, pion_crc32c_load(p + 2 * block + i));
        }
        crc = pion_crc32c_shift(table, (uint32_t)crc) ^ second;
        crc = pion_crc32c_shift(table, (uint32_t)crc) ^ third;
    }
    *data = p;
    *left = n;
    return (uint32_t)crc;
}

static inline uint32_t crc32c_hardware(uint32_t crc, const void *data, size_t n) {
    const uint8_t *p = (const uint8_t *)data;
    crc = ~crc;
    if (n >= 3 * PION_CRC32C_SHORT) {
        crc = pion_crc32c_streams(crc, &p, &n, PION_CRC32C_LONG, pion_crc32c_state.shift_long);
        crc = pion_crc32c_streams(crc, &p, &n, PION_CRC32C_SHORT, pion_crc32c_state.shift_short);
    }
    for (; n >= 8; n -= 8, p += 8) crc = (uint32_t)pion_crc32c_u64(crc, pion_crc32c_load(p));
    for (; n; n--) crc = pion_crc32c_u8(crc, *p++);
    return ~crc;
}
#endif

/* CRC of `data` appended to bytes whose CRC is `crc` (0 for none; any other start value seeds the checksum). */
static inline uint32_t crc32c(uint32_t crc, const void *data, size_t n) {
#if defined(PION_CRC32C_HARDWARE)
    if (pion_crc32c_state.hardware) return crc32c_hardware(crc, data, n);
#endif
    return crc32c_portable(crc, data, n);
}

/* CRC of A followed by B, from crc(A), the unseeded crc(B) and the length of B. */
static inline uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b) {
    return pion_crc32c_multiply(pion_crc32c_power(length_b), crc_a) ^ crc_b;
}

#endif
