// int8: `dim` codes, then a pair (scale, min) of fp16 for each group of 32 values; a value is min + scale * code.
// One thread per value. scale * code is exact in fp32, so a fused multiply-add gives the same value.
const uint dim = H * D, groups = (dim + 31) / 32;
uint i = thread_position_in_grid.x, row = thread_position_in_grid.y;
uint count = extent[0], capacity = extent[1];
float value = 0.0f;
if (row < count) {
    uint start = row * (dim + 4 * groups), pair = start + dim + i / 32 * 4;
    value = within_half(half_at(rows, pair + 2) + half_at(rows, pair) * float(rows[start + i]));
}
out[(i / D * capacity + row) * D + i % D] = T(value);
