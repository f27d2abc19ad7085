// Attention of query rows over stored rows of one head, of which no decoded copy is made: see attend.metal for how a
// threadgroup works, pion/ref for the formats. A tile is eight places, so that an octet of the key forms is read once.
//
// KFORM, VFORM: the format's code, 1 for all turbo rows and 17 for all key forms, of KBITS and VBITS. Turbo rows are
// read in their rotated form: `q` is rotated already when the keys are, and sums over such values are rotated back
// later. A place is a row of keys counted from the first byte of `keys` on; values begin at place `skip`. Places below
// `first` are not seen. k_row, v_row: bytes of a row, for key forms of a block of 64. `turns`: cosines and sines of 0
// to 63 positions, then those at which each block begins.
constexpr int E = (D + 31) / 32, half_head = D / 2, PE = (half_head + 31) / 32, QE = KFORM == 17 ? 2 * PE : E;
threadgroup float sums[G * D];
threadgroup float heights[2 * G * R];
uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
uint rows = extent[0], all = extent[1], heads = extent[2], first = extent[3], stored = extent[4], skip = extent[5];
uint per = extent[6], k_row = extent[7], v_row = extent[8];
float scale = as_type<float>(extent[9]);

uint chunks = (rows + R - 1) / R, chunk = threadgroup_position_in_grid.y, split = threadgroup_position_in_grid.z;
uint slot = chunk / chunks, row = chunk % chunks * R, head = kv_of[slot], dim = heads * D;
uint real = rows - row < uint(R) ? rows - row : uint(R);
uint begin = first / 8 * 8 + split * per, end = stored - begin < per ? stored : begin + per;

float query[R][QE], acc[R][E], top[R], sum[R];
for (int r = 0; r < R; r++) {
    uint line = (slot * rows + row + r) * D;
    top[r] = -INFINITY;
    sum[r] = 0.0f;
    for (int e = 0; e < E; e++) acc[r][e] = 0.0f;
    for (int e = 0; e < QE; e++) {
        uint j = lane + 32 * (KFORM == 17 ? e % PE : e), d = KFORM == 17 && e >= PE ? half_head + j : j;
        bool there = uint(r) < real && j < uint(KFORM == 17 ? half_head : D);
        query[r][e] = there ? q[line + d] * scale : 0.0f;
    }
}

for (uint tile = begin + group * 8; tile < end; tile += G * 8) {
    float logit[R][8];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 8; i++) logit[r][i] = 0.0f;
    if (KFORM == 17) {
        uint block = tile / 64, start = block * k_row, octet = start + tile % 64 / 8 * (KBITS * dim);
        uint scales = start + 8 * KBITS * dim, pairs = (TURNED ? D : dim) / 2;
        for (int e = 0; e < PE; e++) {
            uint j = lane + 32 * e;
            if (j >= uint(half_head)) continue;
            uint low = head * D + j, high = low + half_head, from = TURNED ? head * D : 0;
            uint low_plane[KBITS + 1], high_plane[KBITS + 1];
            key_planes<KBITS>(keys, octet, scales, dim, low, key_partner(low, from, pairs), low_plane);
            key_planes<KBITS>(keys, octet, scales, dim, high, key_partner(high, from, pairs), high_plane);
            uint biases = scales + 2 * dim;
            float low_scale = fabs(half_at(keys, scales + 2 * low)), low_bias = half_at(keys, biases + 2 * low);
            float high_scale = fabs(half_at(keys, scales + 2 * high)), high_bias = half_at(keys, biases + 2 * high);
            uint base = (64 + block) * 2 * half_head + j;
            float c0 = TURNED ? turns[base] : 1.0f, s0 = TURNED ? turns[base + half_head] : 0.0f;
            for (int i = 0; i < 8; i++) {
                float a = low_bias + low_scale * key_code<KBITS>(low_plane, i);
                float b = high_bias + high_scale * key_code<KBITS>(high_plane, i);
                if (TURNED) {
                    uint step = (tile % 64 + i) * 2 * half_head + j;
                    float c1 = turns[step], s1 = turns[step + half_head];
                    float c = c0 * c1 - s0 * s1, s = s0 * c1 + c0 * s1, straight = a;
                    a = straight * c - b * s;
                    b = b * c + straight * s;
                }
                for (int r = 0; r < R; r++) logit[r][i] += query[r][e] * a + query[r][PE + e] * b;
            }
        }
    } else {
        for (int i = 0; i < 8; i++) {
            if (tile + i < first || tile + i >= end) continue;
            for (int e = 0; e < E; e++) {
                uint d = lane + 32 * e;
                float key = inside<D>(d) ? stored_at<KFORM, KBITS, D>(keys, (tile + i) * k_row, heads, head, d) : 0.0f;
                for (int r = 0; r < R; r++) logit[r][i] += query[r][e] * key;
            }
        }
    }
    for (int i = 0; i < 8; i++) {
        bool seen = tile + i >= first && tile + i < end;
        for (int r = 0; r < R; r++) {
            float whole = simd_sum(logit[r][i]);
            logit[r][i] = seen ? whole : -INFINITY;
        }
    }
    absorb<R, 8, E>(logit, top, sum, acc);
    for (int i = 0; i < 8; i++) {
        if (tile + i < first || tile + i >= end) continue;
        for (int e = 0; e < E; e++) {
            uint d = lane + 32 * e, line = (tile + i - skip) * v_row;
            float value = inside<D>(d) ? stored_at<VFORM, VBITS, D>(values, line, heads, head, d) : 0.0f;
            for (int r = 0; r < R; r++) acc[r][e] += logit[r][i] * value;
        }
    }
}
hand_in<D, R, G, E>(sums, heights, acc, top, sum, parts, tops, split * all + slot * rows + row, real, lane, group);
