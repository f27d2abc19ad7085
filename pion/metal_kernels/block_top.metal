// The `most` blocks of the highest scores, of equal ones the lower, and the last block; ascending, -1 where none is
// left. One threadgroup. A block's rank is how many go before it, so no two have the same; a score that is NaN goes
// last.
threadgroup uchar chosen[ROOM];
uint t = thread_position_in_threadgroup.x, threads = threads_per_threadgroup.x;
uint blocks = extent[0], most = extent[1];
for (uint b = t; b < blocks; b += threads) {
    float own = scores[b];
    own = own == own ? own : -INFINITY;
    uint rank = 0;
    for (uint other = 0; other < blocks; other++) {
        float score = scores[other];
        score = score == score ? score : -INFINITY;
        rank += score > own || (score == own && other < b) ? 1 : 0;
    }
    chosen[b] = rank < most || b == blocks - 1 ? 1 : 0;
}
for (uint i = t; i < most + 1; i += threads) out[i] = -1;
threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
for (uint b = t; b < blocks; b += threads) {
    if (!chosen[b]) continue;
    uint place = 0;
    for (uint other = 0; other < b; other++) place += chosen[other];
    out[place] = int(b);
}
