// Shared by the attention kernels: the online softmax of FlashAttention (arXiv 2205.14135), a few keys at a time. R
// query rows share the keys that a SIMD group reads. A lane holds the values lane, lane + 32, ... of a row, E of them.
// What has been read so far is: top, the largest logit; sum, of exp(logit - top); acc, of exp(logit - top) * value.

template <int D>
inline bool inside(uint d) {
    return D % 32 == 0 || d < uint(D);
}

// exp(x - base) without a difference of infinities: nothing read yet is base -inf, and then every x is -inf, or NaN.
inline float weight_of(float x, float base) {
    return exp(x - (base == -INFINITY ? 0.0f : base));
}

// The logits of K more keys become weights, and what was summed is scaled to the new top. -inf is a key that is not
// seen.
template <int R, int K, int E>
inline void absorb(thread float (&logit)[R][K], thread float (&top)[R], thread float (&sum)[R],
                   thread float (&acc)[R][E]) {
    for (int r = 0; r < R; r++) {
        float high = top[r];
        for (int i = 0; i < K; i++) high = logit[r][i] > high ? logit[r][i] : high;
        float shrink = weight_of(top[r], high), more = 0.0f;
        for (int i = 0; i < K; i++) {
            logit[r][i] = weight_of(logit[r][i], high);
            more += logit[r][i];
        }
        top[r] = high;
        sum[r] = sum[r] * shrink + more;
        for (int e = 0; e < E; e++) acc[r][e] *= shrink;
    }
}

// Joins what the G SIMD groups of a threadgroup read and writes `rows` rows of it from row `start` on: D sums into
// `parts`, top and sum into `tops`. `sums` holds G * D values, `heights` 2 * G * R.
template <int D, int R, int G, int E, typename P>
inline void hand_in(threadgroup float *sums, threadgroup float *heights, thread float (&acc)[R][E],
                    thread float (&top)[R], thread float (&sum)[R], P parts, P tops, uint start, uint rows, uint lane,
                    uint group) {
    if (lane == 0) {
        for (int r = 0; r < R; r++) {
            heights[2 * (group * R + r)] = top[r];
            heights[2 * (group * R + r) + 1] = sum[r];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int r = 0; r < R && uint(r) < rows; r++) {
        float high = -INFINITY, total = 0.0f;
        for (int g = 0; g < G; g++) {
            float one = heights[2 * (g * R + r)];
            high = one > high ? one : high;
        }
        for (int g = 0; g < G; g++) total += weight_of(heights[2 * (g * R + r)], high) * heights[2 * (g * R + r) + 1];
        float mine = weight_of(top[r], high);
        for (int e = 0; e < E; e++) {
            uint d = lane + 32 * e;
            if (inside<D>(d)) sums[group * D + d] = acc[r][e] * mine;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint d = group * 32 + lane; d < uint(D); d += 32 * G) {
            float value = 0.0f;
            for (int g = 0; g < G; g++) value += sums[g * D + d];
            parts[(start + r) * D + d] = value;
        }
        if (group == 0 && lane == 0) {
            tops[2 * (start + r)] = high;
            tops[2 * (start + r) + 1] = total;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup); // before the next row takes the room
    }
}
