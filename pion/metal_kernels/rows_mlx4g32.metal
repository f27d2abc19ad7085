// mlx4g32: eight codes of 4 bits in each of dim / 8 words, the fp16 scales of the groups of 32, then their fp16 biases; a
// value is scale * code + bias. One thread per value. scale * code is exact in fp32, fused or not.
const uint dim = H * D;
uint i = thread_position_in_grid.x, row = thread_position_in_grid.y;
uint count = extent[0], capacity = extent[1];
float value = 0.0f;
if (row < count) {
    uint start = row * (dim / 2 + dim / 8), scale = start + dim / 2 + i / 32 * 2;
    uint code = uint(rows[start + i / 2]) >> i % 2 * 4 & 15;
    value = within_half(half_at(rows, scale) * float(code) + half_at(rows, scale + dim / 16));
}
out[(i / D * capacity + row) * D + i % D] = T(value);
