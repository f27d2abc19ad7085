// Attention of query rows over a part of the keys of one head, whose keys and values lie in arrays of T.
//
// A threadgroup is G SIMD groups. It takes up to R query rows that share a head of keys, and `per` of the places that
// these rows may see; its SIMD groups take K places in turn. Places are first those of the prefix, then those of the
// suffix. PICKED 0: the prefix from `first` on; 1: the keys whose numbers stand in `pick` for this head, `counts` of
// them; 2: the blocks whose numbers stand in `pick`. A number outside the prefix, or before `first`, is no key. Query
// row m of `length` sees the suffix up to position max(suffix - length, 0) + m, and all that it sees of the prefix.
//
// VALUES false: only the logits count, and values are not read.
//
// q: (slots, rows, D), what shares a head of keys being a slot; kv_of: the head of each. k, v: strides of a row and of
// a head in `extent`; k_suf, v_suf: (heads, suffix, D). Out: sums and heights of each split, see softmax.metal.
constexpr int E = (D + 31) / 32;
constexpr uint none = 0xffffffffu;
threadgroup float sums[G * D];
threadgroup float heights[2 * G * R];
uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
uint rows = extent[0], length = extent[1], all = extent[2], stored = extent[3], first = extent[4], suffix = extent[5];
uint picked = extent[6], block = extent[7], per = extent[8], key_row = extent[9], key_head = extent[10];
float scale = as_type<float>(extent[11]);

uint chunks = (rows + R - 1) / R, chunk = threadgroup_position_in_grid.y, split = threadgroup_position_in_grid.z;
uint slot = chunk / chunks, row = chunk % chunks * R, head = kv_of[slot];
uint real = rows - row < uint(R) ? rows - row : uint(R);
uint own = PICKED == 0 ? stored - first : picked, begin = split * per, end = own + suffix;
end = end - begin < per ? end : begin + per;
uint last = suffix > length ? suffix - length : 0;

float query[R][E], acc[R][E], top[R], sum[R];
for (int r = 0; r < R; r++) {
    top[r] = -INFINITY;
    sum[r] = 0.0f;
    for (int e = 0; e < E; e++) {
        uint d = lane + 32 * e;
        acc[r][e] = 0.0f;
        query[r][e] = uint(r) < real && inside<D>(d) ? q[(slot * rows + row + r) * D + d] * scale : 0.0f;
    }
}

for (uint tile = begin + group * K; tile < end; tile += G * K) {
    uint at[K];
    float logit[R][K];
    for (int i = 0; i < K; i++) {
        uint place = tile + i, n = first + place;
        bool past = SUFFIX && place >= own, seen = place < end;
        if (past) n = place - own;
        if (PICKED != 0 && !past && seen) {
            int number = PICKED == 1 ? pick[slot * picked + place] : pick[place / block];
            uint limit = PICKED == 1 ? stored : stored / block + 1;
            seen = uint(number) < limit && (PICKED == 2 || place < counts[slot]);
            n = PICKED == 1 ? uint(number) : seen ? uint(number) * block + place % block : 0;
            seen = seen && n >= first && n < stored;
        }
        at[i] = !seen ? none : past ? (head * suffix + n) * D : head * key_head + n * key_row;
        float dot[R];
        for (int r = 0; r < R; r++) dot[r] = 0.0f;
        if (seen) {
            for (int e = 0; e < E; e++) {
                uint d = lane + 32 * e;
                float key = !inside<D>(d) ? 0.0f : past ? float(k_suf[at[i] + d]) : float(k[at[i] + d]);
                for (int r = 0; r < R; r++) dot[r] += query[r][e] * key;
            }
        }
        for (int r = 0; r < R; r++) {
            float whole = simd_sum(dot[r]);
            bool visible = seen && (!past || n <= last + (row + r) % length);
            logit[r][i] = visible ? whole : -INFINITY;
        }
    }
    absorb<R, K, E>(logit, top, sum, acc);
    for (int i = 0; i < K; i++) {
        if (!VALUES || at[i] == none) continue;
        bool past = SUFFIX && tile + i >= own;
        for (int e = 0; e < E; e++) {
            uint d = lane + 32 * e;
            float value = !inside<D>(d) ? 0.0f : past ? float(v_suf[at[i] + d]) : float(v[at[i] + d]);
            // A value that a row does not see must not reach it, not even as 0 * inf.
            for (int r = 0; r < R; r++) acc[r][e] += logit[r][i] > 0.0f ? logit[r][i] * value : 0.0f;
        }
    }
}
hand_in<D, R, G, E>(sums, heights, acc, top, sum, parts, tops, split * all + slot * rows + row, real, lane, group);
