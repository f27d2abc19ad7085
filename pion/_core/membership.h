/* Sets of 64-bit block hashes, packed into one relocatable blob, and the question "which of these are in it?".
 *
 *   header | buckets of 4 slots, filled from the front, 0 = empty | sorted distinct members
 *
 * A member stands in its home bucket or one of the MT_NEXT after it (open addressing, never wrapped) or, where those
 * were full, only in the sorted copy. A probe ends at the first bucket that has room; one that meets full buckets only
 * searches the sorted copy. So the worst probe costs one short scan and one binary search, whatever the hashes are,
 * and the keyed hash makes that case rare also for hashes chosen by an adversary. Buckets and not single slots, because
 * four comparisons without a branch cost less than one branch that goes either way.
 * The member 0 is a flag of the header. The blob needs no alignment. It is for this process only (its seed is).
 *
 * Pure C, no Python, no allocation, no locks.
 */
#ifndef PION_MEMBERSHIP_H
#define PION_MEMBERSHIP_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    MT_MAGIC = 0x31544d50, /* "PMT1" */
    MT_BUCKET = 4,
    MT_NEXT = 3, /* buckets looked at after the home bucket */
    MT_EXTRA = MT_BUCKET * MT_NEXT, /* slots behind the last home bucket */
    MT_HEADER = 64,
    MT_MAX = 1048576 /* members of one table: the wire's limit */
};

enum { MT_HAS_ZERO = 1, MT_SPILLED = 2 };

typedef struct {
    uint32_t magic, flags;
    uint64_t slots; /* power of two; MT_EXTRA more follow */
    uint64_t distinct; /* length of the sorted copy, 0 not counted */
    uint64_t given; /* members as they were given, duplicates and 0 included */
    uint64_t key; /* odd */
    uint64_t shift; /* 64 - log2 slots */
    uint64_t reserved[2];
} mt_header;

/* What a probe needs, once per call. */
typedef struct {
    mt_header head;
    const char *table, *sorted;
} mt_view;

static inline uint64_t mt_load(const char *at, size_t index) {
    uint64_t value;
    memcpy(&value, at + 8 * index, 8);
    return value;
}

static inline void mt_store(char *at, size_t index, uint64_t value) { memcpy(at + 8 * index, &value, 8); }

/* The first slot of the home bucket: the top bits of the product with a secret odd number (multiply-shift, a universal
 * family: Dietzfelbinger, Hagerup, Katajainen, Penttonen 1997). */
static inline size_t mt_home(uint64_t value, const mt_header *head) {
    return (size_t)((value * head->key) >> head->shift) & ~(size_t)(MT_BUCKET - 1);
}

/* splitmix64 (Steele, Lea, Flood 2014). */
static inline uint64_t mt_mix(uint64_t value) {
    value += 0x9e3779b97f4a7c15u;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

static inline uint64_t mt_slots_for(size_t n) {
    uint64_t slots = 16;
    while (slots < 2 * (uint64_t)n) slots *= 2;
    return slots;
}

/* Bytes that mt_build may write for n hashes. */
static inline size_t mt_room(size_t n) { return MT_HEADER + 8 * ((size_t)mt_slots_for(n) + MT_EXTRA + n); }

/* Ascending, by bytes from the least significant on; a byte that is the same everywhere costs no pass. */
static inline void mt_sort(char *values, char *scratch, size_t n) {
    char *from = values, *to = scratch;
    for (int shift = 0; shift < 64; shift += 8) {
        size_t at[256] = {0}, sum = 0;
        for (size_t i = 0; i < n; i++) at[(mt_load(from, i) >> shift) & 255]++;
        if (n == 0 || at[(mt_load(from, 0) >> shift) & 255] == n) continue;
        for (int digit = 0; digit < 256; digit++) {
            size_t count = at[digit];
            at[digit] = sum;
            sum += count;
        }
        for (size_t i = 0; i < n; i++) {
            uint64_t value = mt_load(from, i);
            mt_store(to, at[(value >> shift) & 255]++, value);
        }
        char *swap = from;
        from = to;
        to = swap;
    }
    if (from != values) memcpy(values, from, 8 * n);
}

/* Pack n hashes (8 bytes each, little-endian) into `out`, which has mt_room(n) bytes. Answers the blob's length. */
static inline size_t mt_build(const char *hashes, size_t n, uint64_t seed, char *out) {
    mt_header head = {MT_MAGIC, 0, mt_slots_for(n), 0, n, mt_mix(seed) | 1, 0, {0, 0}};
    head.shift = 64 - (uint64_t)__builtin_ctzll(head.slots);
    char *table = out + MT_HEADER;
    char *sorted = table + 8 * (head.slots + MT_EXTRA);
    memcpy(sorted, hashes, 8 * n);
    mt_sort(sorted, table, n); /* the slots, twice as many, are free to sort in */
    uint64_t last = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t value = mt_load(sorted, i);
        if (value == 0) head.flags |= MT_HAS_ZERO;
        if (value != last) mt_store(sorted, head.distinct++, last = value);
    }
    memset(table, 0, 8 * (head.slots + MT_EXTRA));
    for (size_t i = 0; i < head.distinct; i++) {
        uint64_t value = mt_load(sorted, i);
        size_t slot = mt_home(value, &head), end = slot + MT_BUCKET + MT_EXTRA;
        while (slot < end && mt_load(table, slot) != 0) slot++;
        if (slot < end) mt_store(table, slot, value);
        else head.flags |= MT_SPILLED;
    }
    memcpy(out, &head, sizeof head);
    return MT_HEADER + 8 * ((size_t)head.slots + MT_EXTRA + (size_t)head.distinct);
}

/* 0, or -1 when `blob` is not a table made by mt_build. */
static inline int mt_open(const char *blob, size_t length, mt_view *view) {
    memset(view, 0, sizeof *view);
    if (length < MT_HEADER) return -1;
    memcpy(&view->head, blob, sizeof view->head);
    const mt_header *head = &view->head;
    if (head->magic != (uint32_t)MT_MAGIC || head->distinct > MT_MAX || head->slots > 4 * (uint64_t)MT_MAX ||
        head->slots < 16 || (head->slots & (head->slots - 1)) != 0 ||
        head->shift != 64 - (uint64_t)__builtin_ctzll(head->slots) ||
        length != MT_HEADER + 8 * (head->slots + MT_EXTRA + head->distinct))
        return -1;
    view->table = blob + MT_HEADER;
    view->sorted = view->table + 8 * (head->slots + MT_EXTRA);
    return 0;
}

static inline int mt_search(const mt_view *view, uint64_t value) {
    const char *base = view->sorted;
    size_t n = (size_t)view->head.distinct;
    if (n == 0) return 0;
    while (n > 1) {
        size_t half = n / 2;
        base += (mt_load(base, half - 1) < value) * 8 * half;
        n -= half;
    }
    return mt_load(base, 0) == value;
}

static inline unsigned mt_same(const char *at, size_t slot, uint64_t value) { return mt_load(at, slot) == value; }

static inline unsigned mt_in_bucket(const char *at, uint64_t value) {
    return mt_same(at, 0, value) | mt_same(at, 1, value) | mt_same(at, 2, value) | mt_same(at, 3, value);
}

static inline unsigned mt_full(const char *at) { return mt_load(at, MT_BUCKET - 1) != 0; }

/* Everything the quick look below leaves open: 0, and values whose home bucket is full. */
static inline unsigned mt_slow(const mt_view *view, uint64_t value) {
    if (value == 0) return view->head.flags & MT_HAS_ZERO; /* an empty slot looks like it */
    const char *at = view->table + 8 * mt_home(value, &view->head);
    for (int bucket = 0; bucket <= MT_NEXT; bucket++, at += 8 * MT_BUCKET) {
        if (mt_in_bucket(at, value)) return 1;
        if (!mt_full(at)) return 0;
    }
    return view->head.flags & MT_SPILLED ? (unsigned)mt_search(view, value) : 0;
}

/* Up to 64 probes, one bit each: first a look without a branch, then the few that it left open one by one. */
static inline uint64_t mt_settle(const mt_view *view, const char *probes, uint64_t hits, uint64_t open) {
    for (; open != 0; open &= open - 1) {
        int i = __builtin_ctzll(open);
        hits = (hits & ~((uint64_t)1 << i)) | (uint64_t)mt_slow(view, mt_load(probes, (size_t)i)) << i;
    }
    return hits;
}

static inline uint64_t mt_block_plain(const mt_view *view, const char *probes, size_t n) {
    const mt_header head = view->head;
    uint64_t hits = 0, open = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t value = mt_load(probes, i);
        const char *at = view->table + 8 * mt_home(value, &head);
        unsigned found = mt_in_bucket(at, value);
        hits |= (uint64_t)found << i;
        open |= (uint64_t)((mt_full(at) & (found ^ 1)) | (value == 0)) << i;
    }
    return mt_settle(view, probes, hits, open);
}

#if defined(__x86_64__)
/* 32 bytes as bits: set where the byte is not 0. */
__attribute__((target("avx2"))) static inline uint64_t mt_nonzero32(const uint8_t *bytes) {
    __m256i zero = _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i *)(const void *)bytes), _mm256_setzero_si256());
    return (uint32_t)~_mm256_movemask_epi8(zero);
}

/* One comparison for a bucket. What it says is kept as bytes and turned into bits for the whole block. */
__attribute__((target("avx2,bmi2"))) static uint64_t mt_block_avx2(const mt_view *view, const char *probes, size_t n) {
    const mt_header head = view->head;
    const char *const table = view->table;
    uint8_t same[64] = {0}, full[64] = {0};
    __m256i zeros = _mm256_setzero_si256();
    for (size_t i = 0; i < n; i++) {
        uint64_t value = mt_load(probes, i);
        const char *at = table + 8 * mt_home(value, &head);
        __m256i wanted = _mm256_set1_epi64x((long long)value);
        __m256i bucket = _mm256_loadu_si256((const __m256i *)(const void *)at);
        same[i] = (uint8_t)_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(bucket, wanted)));
        full[i] = (uint8_t)mt_full(at);
        zeros = _mm256_or_si256(zeros, _mm256_cmpeq_epi64(wanted, _mm256_setzero_si256()));
    }
    if (!_mm256_testz_si256(zeros, zeros)) return mt_block_plain(view, probes, n);
    uint64_t hits = mt_nonzero32(same) | mt_nonzero32(same + 32) << 32;
    uint64_t open = (mt_nonzero32(full) | mt_nonzero32(full + 32) << 32) & ~hits;
    return mt_settle(view, probes, hits, open);
}
#endif

/* Bit i of `bitmap` (byte i >> 3, least significant first) tells whether probe i is a member; the last byte is padded
 * with 0. `bitmap` has (n + 7) / 8 bytes. 0, or -1 when `blob` is not a table. */
static inline int mt_probe_with(const char *blob, size_t length, const char *probes, size_t n, uint8_t *bitmap,
                                int avx2) {
    mt_view view;
    (void)avx2;
    if (mt_open(blob, length, &view)) return -1;
    for (size_t i = 0; i < n; i += 64) {
        size_t count = n - i < 64 ? n - i : 64;
        uint64_t hits;
#if defined(__x86_64__)
        if (avx2) hits = mt_block_avx2(&view, probes + 8 * i, count);
        else
#endif
            hits = mt_block_plain(&view, probes + 8 * i, count);
        memcpy(bitmap + i / 8, &hits, (count + 7) / 8);
    }
    return 0;
}

static inline int mt_have_avx2(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
#else
    return 0;
#endif
}

static inline int mt_probe(const char *blob, size_t length, const char *probes, size_t n, uint8_t *bitmap) {
    return mt_probe_with(blob, length, probes, n, bitmap, mt_have_avx2());
}

#endif
