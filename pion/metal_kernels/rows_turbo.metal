// turbo4, turbo3, turbo2: the packed codes of all blocks, then a 16-bit gain for each block.
// A decoded block is its levels, times a matrix of size n, signs, the same matrix, other signs, and gain / n.
//
// One threadgroup per piece of a row: the blocks of one head, or of the whole row. The block lies in threadgroup
// memory. BITS, P values of a piece, N of the largest block, MOST values that the split allows, BLOCKS and BYTES of a
// piece, ROW bytes of a row, CODES bytes of its codes.
threadgroup float y[N];
uint t = thread_position_in_threadgroup.x, threads = threads_per_threadgroup.x;
uint piece = threadgroup_position_in_grid.y, row = threadgroup_position_in_grid.z;
uint count = extent[0], capacity = extent[1];
if (row >= count) {
    for (uint i = piece * P + t; i < piece * P + P; i += threads) out[(i / D * capacity + row) * D + i % D] = T(0.0f);
    return; // the whole threadgroup leaves
}
uint at = row * ROW + piece * BYTES, gain_at = row * ROW + CODES + piece * BLOCKS * 2, n = 0;
for (uint done = 0; done < P; done += n, at += (n * BITS + 7) / 8, gain_at += 2) {
    n = turbo_block(P - done, MOST);
    for (uint i = t; i < n; i += threads) y[i] = turbo_level<BITS>(rows, at, i * BITS);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    turbo_spread(y, n, t, threads);
    for (uint i = t; i < n; i += threads) y[i] = turbo_flip(y[i], i, turbo_seeds[1]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    turbo_spread(y, n, t, threads);
    float gain = turbo_gain(rows, gain_at) / float(n);
    for (uint j = t; j < n; j += threads) {
        uint i = piece * P + done + j;
        out[(i / D * capacity + row) * D + i % D] = T(within_half(turbo_flip(y[j], j, turbo_seeds[0]) * gain));
    }
    // No barrier here: the next block's y[j] is written by the thread that just read it.
}
