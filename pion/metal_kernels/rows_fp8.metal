// fp8: `dim` codes e4m3fn, then an fp16 scale for each group of 32 values; a value is scale * code, which is exact.
// One thread per value. The code is put together from exponent and mantissa: as a shifted word, its subnormals would be
// subnormal floats, which GPUs take for zero.
const uint dim = H * D, groups = (dim + 31) / 32;
uint i = thread_position_in_grid.x, row = thread_position_in_grid.y;
uint count = extent[0], capacity = extent[1];
float value = 0.0f;
if (row < count) {
    uint start = row * (dim + 2 * groups);
    uint code = rows[start + i], exponent = code >> 3 & 15, mantissa = code & 7;
    uint power = exponent == 0 ? 118 : 117 + exponent; // 2^-9 for subnormals, else 2^(exponent - 10)
    float magnitude = float(exponent == 0 ? mantissa : 8 + mantissa) * as_type<float>(power << 23);
    magnitude = (code & 0x7f) == 0x7f ? NAN : magnitude;
    value = within_half((code & 0x80 ? -magnitude : magnitude) * half_at(rows, start + dim + i / 32 * 2));
}
out[(i / D * capacity + row) * D + i % D] = T(value);
