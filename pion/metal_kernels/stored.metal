// One value of a stored row, for each format. `row` is where the row's bytes begin, dim how many values it has, i
// which.

// int8: dim codes, then a pair (scale, min) of fp16 for each group of 32 values; a value is min + scale * code.
// scale * code is exact in fp32, here and in the other formats, so a fused multiply-add gives the same value.
template <typename P>
inline float int8_at(P bytes, uint row, uint dim, uint i) {
    uint pair = row + dim + i / 32 * 4;
    return within_half(half_at(bytes, pair + 2) + half_at(bytes, pair) * float(bytes[row + i]));
}

// fp8: dim codes e4m3fn, then an fp16 scale for each group of 32 values; a value is scale * code. The code is put
// together from exponent and mantissa: as a shifted word, its subnormals would be subnormal floats, which GPUs take for
// zero.
template <typename P>
inline float fp8_at(P bytes, uint row, uint dim, uint i) {
    uint code = bytes[row + i], exponent = code >> 3 & 15, mantissa = code & 7;
    uint power = exponent == 0 ? 118 : 117 + exponent; // 2^-9 for subnormals, else 2^(exponent - 10)
    float magnitude = float(exponent == 0 ? mantissa : 8 + mantissa) * as_type<float>(power << 23);
    magnitude = (code & 0x7f) == 0x7f ? NAN : magnitude;
    return within_half((code & 0x80 ? -magnitude : magnitude) * half_at(bytes, row + dim + i / 32 * 2));
}

// mlx4g32: eight codes of 4 bits in each of dim / 8 words, the fp16 scales of the groups of 32, then their fp16 biases;
// a value is scale * code + bias.
template <typename P>
inline float mlx4g32_at(P bytes, uint row, uint dim, uint i) {
    uint scale = row + dim / 2 + i / 32 * 2, code = uint(bytes[row + i / 2]) >> i % 2 * 4 & 15;
    return within_half(half_at(bytes, scale) * float(code) + half_at(bytes, scale + dim / 16));
}

// Words of bf16 and fp32, byte by byte.
template <typename P>
inline float bf16_at(P bytes, uint at) {
    return as_type<float>(uint(bytes[at]) << 16 | uint(bytes[at + 1]) << 24);
}

template <typename P>
inline float fp32_at(P bytes, uint at) {
    uint low = uint(bytes[at]) | uint(bytes[at + 1]) << 8;
    return as_type<float>(low | uint(bytes[at + 2]) << 16 | uint(bytes[at + 3]) << 24);
}

// The key forms of turbo4, turbo3 and turbo2: blocks of 64 rows with levels per channel. A block: eight octets of rows,
// BITS planes of dim bytes each, a byte the bits of a channel's eight codes; then dim fp16 scales and dim fp16 biases.
// A value is bias + scale * code. Where a scale's sign is set, the channel has a bit more, kept in the last plane in
// the place of its partner, which has one less.

// The other channel that shares the last plane: mirrored in half of the `pairs` * 2 channels from `start` on, itself
// where their number is odd and it is the last.
inline uint key_partner(uint channel, uint start, uint pairs) {
    uint at = channel - start;
    return start + (at < pairs ? pairs - 1 - at : at < 2 * pairs ? 3 * pairs - 1 - at : at);
}

// The planes of a channel in the octet that begins at `octet`, the one beyond included; `scales`: where the scales
// begin.
template <int BITS, typename P>
inline void key_planes(P bytes, uint octet, uint scales, uint dim, uint channel, uint partner,
                       thread uint (&plane)[BITS + 1]) {
    for (uint k = 0; k < uint(BITS); k++) plane[k] = bytes[octet + k * dim + channel];
    plane[BITS] = 0;
    if (partner != channel) {
        if (bytes[scales + 2 * partner + 1] >> 7) plane[BITS - 1] = 0;
        if (bytes[scales + 2 * channel + 1] >> 7) plane[BITS] = bytes[octet + (BITS - 1) * dim + partner];
    }
}

// The code of row `line` of the octet.
template <int BITS>
inline float key_code(thread uint (&plane)[BITS + 1], uint line) {
    uint code = 0;
    for (uint k = 0; k <= uint(BITS); k++) code |= (plane[k] >> line & 1) << k;
    return float(code);
}
