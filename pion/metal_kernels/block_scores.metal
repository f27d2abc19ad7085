// How well each block fits a query: the mean over the query heads of q . mean (QUEST false), or of an upper bound of q
// . k over the block, the sum of the larger of q * low and q * high (Quest, arXiv 2406.10774). A threadgroup per block.
// q: (heads, D), of which kv_of names the head of keys; low, high: (heads of keys, blocks, D), `low` being the means
// when QUEST is false.
threadgroup float partial[G];
uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
uint heads = extent[0], blocks = extent[1], number = threadgroup_position_in_grid.y;
float scale = as_type<float>(extent[2]), total = 0.0f;
for (uint i = group * 32 + lane; i < heads * D; i += 32 * G) {
    uint at = (kv_of[i / D] * blocks + number) * D + i % D;
    float below = q[i] * low[at], above = QUEST ? q[i] * high[at] : below;
    total += above > below ? above : below;
}
total = simd_sum(total);
if (lane == 0) partial[group] = total;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (group == 0 && lane == 0) {
    float whole = 0.0f;
    for (int g = 0; g < G; g++) whole += partial[g];
    scores[number] = whole * scale / float(heads);
}
