// mlx4g32 rows. One thread per value.
const uint dim = H * D;
uint i = thread_position_in_grid.x, row = thread_position_in_grid.y;
uint count = extent[0], capacity = extent[1];
float value = row < count ? mlx4g32_at(rows, row * (dim / 2 + dim / 8), dim, i) : 0.0f;
out[(i / D * capacity + row) * D + i % D] = T(value);
