// Value d of a head of D values in a stored row, whatever its format. Turbo rows, whose blocks are those of a head: as
// they are kept, rotated, but for the gain.
template <int BITS, int D, typename P>
inline float turbo_at(P bytes, uint row, uint heads, uint head, uint d) {
    uint block = 0, blocks = 0, size = D;
    for (uint done = 0, n = 0; done < uint(D); done += n, blocks++) {
        n = turbo_block(D - done, 4096);
        if (d >= done && d < done + n) {
            block = blocks;
            size = n;
        }
    }
    uint gain = row + heads * (D * BITS / 8) + (head * blocks + block) * 2;
    return turbo_level<BITS>(bytes, row + head * (D * BITS / 8), d * BITS) * (turbo_gain(bytes, gain) / float(size));
}

template <int FORM, int BITS, int D, typename P>
inline float stored_at(P bytes, uint row, uint heads, uint head, uint d) {
    uint dim = heads * D, i = head * D + d;
    return FORM == 0   ? int8_at(bytes, row, dim, i)
           : FORM == 1 ? turbo_at<BITS == 0 ? 4 : BITS, D>(bytes, row, heads, head, d)
           : FORM == 2 ? half_at(bytes, row + 2 * i)
           : FORM == 5 ? fp8_at(bytes, row, dim, i)
           : FORM == 7 ? mlx4g32_at(bytes, row, dim, i)
           : FORM == 8 ? fp32_at(bytes, row + 4 * i)
                       : bf16_at(bytes, row + 2 * i);
}
