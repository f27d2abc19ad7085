// Rows of D floats, of which each is split as a head of turbo rows is, times the rotation of each block (a matrix,
// signs, the same matrix: an orthogonal matrix times the block's size), or BACK. q . decoded = rotated(q) . levels *
// gain / n, so attention over turbo rows rotates what it asks with once, and what it answers once. One threadgroup per
// row. N values of the largest block; MOST as in rows_turbo.metal.
threadgroup float y[N];
uint t = thread_position_in_threadgroup.x, threads = threads_per_threadgroup.x, row = threadgroup_position_in_grid.y;
uint n = 0;
for (uint done = 0; done < D; done += n) {
    n = turbo_block(D - done, MOST);
    uint at = row * D + done;
    for (uint i = t; i < n; i += threads) y[i] = BACK ? rows[at + i] : turbo_flip(rows[at + i], i, turbo_seeds[0]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    turbo_spread(y, n, t, threads);
    for (uint i = t; i < n; i += threads) y[i] = turbo_flip(y[i], i, turbo_seeds[1]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    turbo_spread(y, n, t, threads);
    for (uint i = t; i < n; i += threads) out[at + i] = BACK ? turbo_flip(y[i], i, turbo_seeds[0]) : y[i];
    // No barrier here: the next block's y[i] is written by the thread that just read it.
}
