// int8 rows. One thread per value.
const uint dim = H * D, groups = (dim + 31) / 32;
uint i = thread_position_in_grid.x, row = thread_position_in_grid.y;
uint count = extent[0], capacity = extent[1];
float value = row < count ? int8_at(rows, row * (dim + 4 * groups), dim, i) : 0.0f;
out[(i / D * capacity + row) * D + i % D] = T(value);
